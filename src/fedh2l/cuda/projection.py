"""What the projection computes of two gradients, in one pass through them and with no copy in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from fedh2l.cuda.compiler import THREADS, can_take, kernel, rows_of


def can_project(a: Tensor, b: Tensor) -> bool:
    """Whether there are kernels for these gradients `(…, parameters)`."""
    return can_take(a, b)


def inner_products(a: Tensor, b: Tensor) -> list[Tensor]:
    """⟨a, b⟩, ⟨a, a⟩ and ⟨b, b⟩, `(…)` each, in float64."""
    blocks, nets, size = rows_of(a)
    sums = torch.empty(nets, blocks, 3, dtype=torch.float64, device=a.device)
    with torch.cuda.device(a.device):
        run = kernel("projection.cu", "products", a.dtype, {})
        run((blocks, nets), THREADS, a.contiguous(), b.contiguous(), sums, size)
    return [total.view(a.shape[:-1]) for total in sums.sum(1).unbind(1)]


def moved(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """`a + v · b`, with v `(…, 1)` in float64."""
    blocks, nets, size = rows_of(a)
    result = torch.empty_like(a, memory_format=torch.contiguous_format)
    with torch.cuda.device(a.device):
        run = kernel("projection.cu", "moved", a.dtype, {})
        run((blocks, nets), THREADS, a.contiguous(), b.contiguous(), v.contiguous(), result, size)
    return result
