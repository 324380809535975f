"""The projection of gradients in one pass, without a copy in float64 (`projection.c`)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedh2l.kernels.cpu.compiler import call, library
from fedh2l.kernels.cpu.vectors import can_take

TINY = torch.finfo(torch.float64).tiny


def can_project(a: Tensor, b: Tensor) -> bool:
    """Return whether the functions support these gradients `(parameters,)`."""
    return can_take(a, b) and library("projection.c") is not None


def related(a: Tensor, b: Tensor) -> list[Tensor]:
    """Return ⟨a, b⟩, ⟨a, a⟩, ⟨b, b⟩, whether ⟨a, b⟩ < 0, and the angle in degrees, `()` each, in float64."""
    functions = library("projection.c")
    assert functions is not None
    results = a.new_empty(5, dtype=torch.float64)
    call(functions.related, a.contiguous(), b.contiguous(), results, len(a), TINY)
    return list(results.unbind())


def moved(a: Tensor, b: Tensor, inner: Tensor, square: Tensor) -> Tensor:
    """Return `a + v · b`, with v = max(0, −inner / square), in float64."""
    functions = library("projection.c")
    assert functions is not None
    result = torch.empty_like(a)
    call(functions.moved, a.contiguous(), b.contiguous(), inner, square, result, len(a), TINY)
    return result
