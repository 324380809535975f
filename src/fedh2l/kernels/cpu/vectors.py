"""Checks of tensors for C functions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LARGEST = 1 << 17
"""Longest vector. PyTorch's threads are faster than one thread on longer ones."""


def can_take(vector: Tensor, *others: Tensor) -> bool:
    """Return whether these are plain vectors `(parameters,)` without gradients and short enough for one thread."""
    alike = vector.dim() == 1 and all(each.shape == vector.shape for each in others)
    if not alike or not (len(vector) <= LARGEST or torch.get_num_threads() == 1):
        return False
    derived = torch.is_grad_enabled() and any(each.requires_grad for each in (vector, *others))
    return not derived and all(has_floats(each) for each in (vector, *others))


def has_floats(tensor: Tensor) -> bool:
    """Return whether this is a plain float32 tensor in CPU memory. Wrapped tensors of `torch.func` are not."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.dtype == torch.float32
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
