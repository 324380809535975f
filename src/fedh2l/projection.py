"""The nearest teaching gradient that does not conflict with the local one: eqs. (7) to (14) of the paper.

The paper's dual problem has one variable and one bound, so its solution is closed,
v* = max(0, −⟨g_pub, g_loc⟩ / ⟨g_loc, g_loc⟩), and g̃ = g_pub + v*·g_loc. Gradients are whole flattened models
`(…, parameters)`; there is no branch on a value and nothing is read by the host, so all of it runs on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Projection(NamedTuple):
    """A projected gradient `(…, parameters)`, and how the two gradients stood to each other, `(…)` each."""

    gradient: Tensor
    conflict: Tensor
    """1 where ⟨g_pub, g_loc⟩ < 0, else 0, in the gradient's type."""
    cosine: Tensor

    @property
    def angle(self) -> Tensor:
        """Between the two gradients, in degrees."""
        return torch.rad2deg(torch.acos(self.cosine))


def project(g_pub: Tensor, g_loc: Tensor) -> Projection:
    """g̃ of eq. (8): g_pub itself where ⟨g_pub, g_loc⟩ ≥ 0, else its projection on the plane normal to g_loc."""
    pub_unit, loc_unit, pub_scale, _ = _rescaled(g_pub, g_loc)
    relation = _Relation.of(pub_unit, loc_unit)
    v = relation.conflict * -relation.inner / _nonzero(relation.loc_square)  # v*, for the rescaled gradients
    # Away from a conflict v is 0 and pub_unit·pub_scale need not be g_pub to the last bit, so g_pub itself is added to.
    gradient = g_pub + (v * pub_scale).unsqueeze(-1) * loc_unit
    return Projection(gradient, relation.conflict, relation.cosine)


def pcgrad(g_pub: Tensor, g_loc: Tensor) -> Projection:
    """PCGrad (Yu et al., 2020) for two gradients: each projected on the other's normal plane, then summed."""
    pub_unit, loc_unit, pub_scale, loc_scale = _rescaled(g_pub, g_loc)
    relation = _Relation.of(pub_unit, loc_unit)
    push = relation.conflict * -relation.inner
    to_pub = (push / _nonzero(relation.loc_square) * pub_scale).unsqueeze(-1) * loc_unit
    to_loc = (push / _nonzero(relation.pub_square) * loc_scale).unsqueeze(-1) * pub_unit
    return Projection((g_pub + to_pub) + (g_loc + to_loc), relation.conflict, relation.cosine)


def unprojected(g_pub: Tensor, g_loc: Tensor) -> Projection:
    """g_pub as it is, with the relation of the two gradients still measured."""
    pub_unit, loc_unit, _, _ = _rescaled(g_pub, g_loc)
    relation = _Relation.of(pub_unit, loc_unit)
    return Projection(g_pub, relation.conflict, relation.cosine)


class _Relation(NamedTuple):
    inner: Tensor
    pub_square: Tensor
    loc_square: Tensor
    conflict: Tensor
    cosine: Tensor

    @staticmethod
    def of(pub: Tensor, loc: Tensor) -> _Relation:
        inner = torch.linalg.vecdot(pub, loc)
        pub_square, loc_square = torch.linalg.vecdot(pub, pub), torch.linalg.vecdot(loc, loc)
        cosine = inner / _nonzero(pub_square * loc_square).sqrt()
        return _Relation(inner, pub_square, loc_square, (inner < 0).to(inner.dtype), cosine.clamp(-1, 1))


def _rescaled(g_pub: Tensor, g_loc: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both gradients over their largest magnitudes, so that no square over- or underflows, and those magnitudes."""
    pub_scale, loc_scale = (torch.linalg.vector_norm(g, ord=float("inf"), dim=-1) for g in (g_pub, g_loc))
    pub_unit = g_pub / _nonzero(pub_scale).unsqueeze(-1)
    loc_unit = g_loc / _nonzero(loc_scale).unsqueeze(-1)
    return pub_unit, loc_unit, pub_scale, loc_scale


def _nonzero(value: Tensor) -> Tensor:
    """The value, or 1 where it is 0: what it divides is then 0 as well."""
    return torch.where(value == 0, torch.ones_like(value), value)
