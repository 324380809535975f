"""What functions in C can go through: vectors as long as a model."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 1 << 17
"""Numbers beyond which PyTorch's threads are quicker than one pass in one of them."""


def can_take(vector: Tensor, other: Tensor) -> bool:
    """Whether they are two plain vectors `(parameters,)` that one thread is quickest with."""
    alike = vector.shape == other.shape and vector.dtype == other.dtype == torch.float32
    plain = vector.dim() == 1 and all(each.is_cpu and _has_memory(each) for each in (vector, other))
    return alike and plain and (len(vector) <= LARGEST or torch.get_num_threads() == 1)


def _has_memory(vector: Tensor) -> bool:
    """Whether it is more than a name for numbers elsewhere, as while `torch.func` transforms a function."""
    return type(vector) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(vector)
