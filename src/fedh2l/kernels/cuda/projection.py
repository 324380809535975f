"""The projection of gradients in one pass, without a copy in float64 (`projection.cu`)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedh2l.kernels.cuda.compiler import THREADS, can_take, kernel, rows_of

WARP = 32
TINY = torch.finfo(torch.float64).tiny


def can_project(a: Tensor, b: Tensor) -> bool:
    """Return whether kernels support these gradients `(…, parameters)`."""
    return can_take(a, b)


def related(a: Tensor, b: Tensor) -> list[Tensor]:
    """Return ⟨a, b⟩, ⟨a, a⟩, ⟨b, b⟩, whether ⟨a, b⟩ < 0, and the angle in degrees, `(…)` each, in float64."""
    blocks, nets, size = rows_of(a)
    sums = torch.empty(nets, blocks, 3, dtype=torch.float64, device=a.device)
    with torch.cuda.device(a.device):
        run = kernel("projection.cu", "products", a.dtype, {})
        run((blocks, nets), THREADS, a.contiguous(), b.contiguous(), sums, size)
        results = torch.empty(5, *a.shape[:-1], dtype=torch.float64, device=a.device)
        kernel("projection.cu", "related", a.dtype, {})((nets,), WARP, sums, results, blocks, nets, TINY)
    return list(results.unbind())


def moved(a: Tensor, b: Tensor, inner: Tensor, square: Tensor) -> Tensor:
    """Return `a + v · b`, with v = max(0, −inner / square) per row, in float64."""
    blocks, nets, size = rows_of(a)
    result = torch.empty_like(a, memory_format=torch.contiguous_format)
    with torch.cuda.device(a.device):
        run = kernel("projection.cu", "moved", a.dtype, {})
        run((blocks, nets), THREADS, a.contiguous(), b.contiguous(), inner, square, result, size, TINY)
    return result
