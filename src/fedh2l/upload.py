"""Copies from the host to the model's device."""

from __future__ import annotations

import torch
from torch import Tensor


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """Copy values from the host to a device. Unlike a plain copy, this does not wait for a busy GPU."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
