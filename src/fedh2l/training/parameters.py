"""A module's trainable parameters as one vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
