"""A module's trainable parameters as one vector."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 25}
"""How many parameters are worked on at once: what a cache holds, or what a GPU is busy with for a while."""


def blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same parts of some vectors `(…, parameters)`, one after the other.

    What is computed on the way of a large model, a copy in float64 say, is then never as large as the model.
    """
    first = vectors[0]
    largest = BLOCK["cuda" if first.is_cuda else "cpu"]
    if first.shape[-1] <= largest:
        yield vectors
        return
    yield from zip(*(torch.split(vector, largest, -1) for vector in vectors), strict=True)


class FlatParameters:
    """Lays the trainable parameters of a module out in one vector, of which the module then sees views.

    The projection, the optimisers and checkpoints work on `vector`; whatever is written to it, the module has.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors = [p for p in module.parameters() if p.requires_grad]
        with torch.no_grad():
            self.vector = torch.cat([p.reshape(-1) for p in self.tensors])
        self._point_at(list(torch.split(self.vector, [p.numel() for p in self.tensors])))

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient of a scalar loss, in the layout of `vector`; parameters that it does not touch have 0."""
        parts = torch.autograd.grad(loss, self.tensors, materialize_grads=True)
        return torch.cat([part.reshape(-1) for part in parts])

    def release(self) -> None:
        """Gives each parameter a storage of its own again."""
        self._point_at([p.detach().clone() for p in self.tensors])

    def _point_at(self, storages: list[Tensor]) -> None:
        for parameter, storage in zip(self.tensors, storages, strict=True):
            parameter.data = storage.view_as(parameter)
