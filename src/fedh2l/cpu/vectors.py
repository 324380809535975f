"""Which tensors functions in C can be given."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LARGEST = 1 << 17
"""Numbers of a vector beyond which PyTorch's threads are quicker than one pass in one of them."""


def can_take(vector: Tensor, *others: Tensor) -> bool:
    """Whether they are plain vectors `(parameters,)` that one thread is quickest with, and nobody derives by them."""
    alike = vector.dim() == 1 and all(each.shape == vector.shape for each in others)
    if not alike or not (len(vector) <= LARGEST or torch.get_num_threads() == 1):
        return False
    derived = torch.is_grad_enabled() and any(each.requires_grad for each in (vector, *others))
    return not derived and all(has_floats(each) for each in (vector, *others))


def has_floats(tensor: Tensor) -> bool:
    """Whether it is float32 in this machine's memory: not a name for numbers elsewhere, as `torch.func` makes them."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.dtype == torch.float32
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
