"""From the host to where a model computes."""

from __future__ import annotations

import torch
from torch import Tensor


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on a device: of a GPU without waiting for what it is doing, unlike a plain copy."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
