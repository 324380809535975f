"""The relation of two gradients, and one moved along the other. `training/projection.py` says what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedh2l.kernels.blocks import blocks
from fedh2l.kernels.cpu import projection as on_cpu
from fedh2l.kernels.cuda import projection as on_cuda


class Relation(NamedTuple):
    """Inner products of two gradients a and b, and their conflict and angle, `(…)` each, in float64."""

    inner: Tensor
    """⟨a, b⟩"""
    first: Tensor
    """⟨a, a⟩"""
    second: Tensor
    """⟨b, b⟩"""
    conflict: Tensor
    """1 where ⟨a, b⟩ < 0, else 0."""
    angle: Tensor
    """Angle in degrees."""


def relate(a: Tensor, b: Tensor, compiled: bool) -> Relation:
    """Return the relation of gradients `(…, parameters)`."""
    for own in (on_cpu, on_cuda) if compiled else ():
        if own.can_project(a, b):
            return Relation(*own.related(a, b))
    return relate_by_pytorch(a, b)


def move(a: Tensor, b: Tensor, relation: Relation, compiled: bool) -> Tensor:
    """Return `a + v · b` with v = max(0, −⟨a, b⟩ / ⟨b, b⟩), which is `a` without a conflict."""
    for own in (on_cpu, on_cuda) if compiled else ():
        if own.can_project(a, b):
            moved: Tensor = own.moved(a, b, relation.inner, relation.second)
            return moved
    return move_by_pytorch(a, b, relation)


def relate_by_pytorch(a: Tensor, b: Tensor) -> Relation:
    """Compute `relate` with PyTorch's operations."""
    sums: list[Tensor] = []
    for part_a, part_b in blocks(a, b):
        part_a, part_b = part_a.double(), part_b.double()
        parts = [torch.linalg.vecdot(x, y) for x, y in ((part_a, part_b), (part_a, part_a), (part_b, part_b))]
        sums = [total + part for total, part in zip(sums, parts, strict=True)] if sums else parts
    inner, first, second = sums
    cosine = inner / (_nonzero(first).sqrt() * _nonzero(second).sqrt())
    angle = torch.rad2deg(torch.acos(cosine.clamp(-1, 1)))
    return Relation(inner, first, second, (inner < 0).double(), angle)


def move_by_pytorch(a: Tensor, b: Tensor, relation: Relation) -> Tensor:
    """Compute `move` with PyTorch's operations."""
    v = factor(relation.inner, relation.second)
    return whole([part_a + (v * part_b.double()).to(a.dtype) for part_a, part_b in blocks(a, b)])


def factor(inner: Tensor, square: Tensor) -> Tensor:
    """Return v = max(0, −inner / square) `(…, 1)`, which is 0 without a conflict."""
    return ((-inner).clamp_min(0) / _nonzero(square)).unsqueeze(-1)


def whole(parts: Sequence[Tensor]) -> Tensor:
    """Return vectors from the results for their blocks."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)


def _nonzero(square: Tensor) -> Tensor:
    """Return a square, or a tiny number in place of 0, to divide by."""
    return square.clamp_min(torch.finfo(square.dtype).tiny)
