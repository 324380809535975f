"""The state of networks and nodes as named tensors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def check_alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Raise ValueError if a tensor of `expected` is missing in `found`, or has another shape or type there."""
    for name, tensor in expected.items():
        if name not in found or (found[name].shape, found[name].dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(f"'{name}' of {what} has another shape or type, or is missing")


def grouped(state: Mapping[str, Tensor], device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Return entries named `group.rest` by group, on a device."""
    groups: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value.to(device)
    return groups


def flattened(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Reverse `grouped`."""
    return {f"{group}.{name}": value for group, entries in state.items() for name, value in entries.items()}
