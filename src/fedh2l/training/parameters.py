"""A module's trainable parameters as one vector."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Parameters per block. A block fits in a CPU's cache, or keeps a GPU busy for a while."""


def blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same parts of some vectors `(…, parameters)`, one after the other.

    Intermediate results, such as a copy in float64, are then much smaller than a large model.
    """
    first = vectors[0]
    largest = BLOCK["cuda" if first.is_cuda else "cpu"]
    if first.shape[-1] <= largest:
        yield vectors
        return
    yield from zip(*(torch.split(vector, largest, -1) for vector in vectors), strict=True)


class FlatParameters:
    """Keeps the trainable parameters of a module in one vector. The module's parameters are views of it.

    The projection, the optimisers and checkpoints work on `vector`. The module sees every change of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors = [p for p in module.parameters() if p.requires_grad]
        with torch.no_grad():
            self.vector = torch.cat([p.reshape(-1) for p in self.tensors])
        self._point_at(list(torch.split(self.vector, [p.numel() for p in self.tensors])))

    def gradient(self, loss: Tensor) -> Tensor:
        """Return the gradient of a scalar loss in the layout of `vector`. Parameters without influence have 0."""
        parts = torch.autograd.grad(loss, self.tensors, materialize_grads=True)
        return torch.cat([part.reshape(-1) for part in parts])

    def release(self) -> None:
        """Give each parameter its own storage again."""
        self._point_at([p.detach().clone() for p in self.tensors])

    def _point_at(self, storages: list[Tensor]) -> None:
        for parameter, storage in zip(self.tensors, storages, strict=True):
            parameter.data = storage.view_as(parameter)
