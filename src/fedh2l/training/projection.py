"""The nearest teaching gradient that does not conflict with the local one: eqs. (7) to (14) of the paper.

The paper's dual problem has one variable and one bound, so its solution has a closed form. It is g̃ = g_pub + v*·g_loc
with v* = max(0, −⟨g_pub, g_loc⟩ / ⟨g_loc, g_loc⟩). Gradients are whole flattened models `(…, parameters)`. Everything
runs on the device: there are no branches on values and no reads by the host.

Inner products use float64. For models with hundreds of thousands of parameters, float32 loses the digits that decide
the constraint. Squares of large or small gradients would overflow or underflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedh2l.kernels.cpu import projection as on_cpu
from fedh2l.kernels.cuda import projection as on_cuda
from fedh2l.training.parameters import blocks


class Projection(NamedTuple):
    """A projected gradient `(…, parameters)`, and the relation of the two original gradients, `(…)` each."""

    gradient: Tensor
    conflict: Tensor
    """1 where ⟨g_pub, g_loc⟩ < 0, else 0."""
    angle: Tensor
    """Angle between the two gradients, in degrees."""


def project(g_pub: Tensor, g_loc: Tensor) -> Projection:
    """Return g̃ of eq. (8): g_pub where ⟨g_pub, g_loc⟩ ≥ 0, else its projection on the plane normal to g_loc."""
    relation = _Relation.of(g_pub, g_loc)
    for own in (on_cpu, on_cuda):
        if own.can_project(g_pub, g_loc):
            return relation.projection(own.moved(g_pub, g_loc, relation.inner, relation.local))
    v = relation.v(relation.local)
    return relation.projection(_whole([p + (v * loc.double()).to(p.dtype) for p, loc in blocks(g_pub, g_loc)]))


def pcgrad(g_pub: Tensor, g_loc: Tensor) -> Projection:
    """Return PCGrad (Yu et al., 2020) of two gradients: each is projected on the other's normal plane, then summed."""
    relation = _Relation.of(g_pub, g_loc)
    v_pub, v_loc = relation.v(relation.local), relation.v(relation.public)
    both = []
    for pub, loc in blocks(g_pub, g_loc):
        wide_pub, wide_loc = pub.double(), loc.double()
        both.append(((wide_pub + v_pub * wide_loc) + (wide_loc + v_loc * wide_pub)).to(g_pub.dtype))
    return relation.projection(_whole(both))


def unprojected(g_pub: Tensor, g_loc: Tensor) -> Projection:
    """Return g_pub unchanged, with the relation of the two gradients."""
    return _Relation.of(g_pub, g_loc).projection(g_pub)


PROJECTIONS = {"qp": project, "pcgrad": pcgrad, "none": unprojected}


class _Relation(NamedTuple):
    """Inner products of two gradients, and their conflict and angle, `(…)` each, in float64."""

    inner: Tensor
    public: Tensor
    """⟨g_pub, g_pub⟩"""
    local: Tensor
    """⟨g_loc, g_loc⟩"""
    conflict: Tensor
    angle: Tensor

    @staticmethod
    def of(g_pub: Tensor, g_loc: Tensor) -> _Relation:
        for own in (on_cpu, on_cuda):
            if own.can_project(g_pub, g_loc):
                return _Relation(*own.related(g_pub, g_loc))
        sums: list[Tensor] = []
        for pub, loc in blocks(g_pub, g_loc):
            pub, loc = pub.double(), loc.double()
            parts = [torch.linalg.vecdot(a, b) for a, b in ((pub, loc), (pub, pub), (loc, loc))]
            sums = [total + part for total, part in zip(sums, parts, strict=True)] if sums else parts
        inner, public, local = sums
        cosine = inner / (_nonzero(public).sqrt() * _nonzero(local).sqrt())
        angle = torch.rad2deg(torch.acos(cosine.clamp(-1, 1)))
        return _Relation(inner, public, local, (inner < 0).double(), angle)

    def v(self, fixed: Tensor) -> Tensor:
        """Return v* `(…, 1)`, which is 0 without conflict. `fixed` is the square of the gradient that stays."""
        return ((-self.inner).clamp_min(0) / _nonzero(fixed)).unsqueeze(-1)

    def projection(self, gradient: Tensor) -> Projection:
        return Projection(gradient, self.conflict, self.angle)


def _whole(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)


def _nonzero(square: Tensor) -> Tensor:
    """Return a square, or a tiny number in place of 0, to divide by."""
    return square.clamp_min(torch.finfo(square.dtype).tiny)
