"""The nearest teaching gradient that does not conflict with the local one: eqs. (7) to (14) of the paper.

The paper's dual problem has one variable and one bound, so its solution has a closed form. It is g̃ = g_pub + v*·g_loc
with v* = max(0, −⟨g_pub, g_loc⟩ / ⟨g_loc, g_loc⟩). Gradients are whole flattened models `(…, parameters)`. Everything
runs on the device: there are no branches on values and no reads by the host.

Inner products use float64. For models with hundreds of thousands of parameters, float32 loses the digits that decide
the constraint. Squares of large or small gradients would overflow or underflow.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fedh2l.kernels.blocks import blocks
from fedh2l.kernels.projection import factor, move, relate, whole


class Projection(NamedTuple):
    """A projected gradient `(…, parameters)`, and the relation of the two original gradients, `(…)` each."""

    gradient: Tensor
    conflict: Tensor
    """1 where ⟨g_pub, g_loc⟩ < 0, else 0."""
    angle: Tensor
    """Angle between the two gradients, in degrees."""


def project(g_pub: Tensor, g_loc: Tensor, compiled: bool = True) -> Projection:
    """Return g̃ of eq. (8): g_pub where ⟨g_pub, g_loc⟩ ≥ 0, else its projection on the plane normal to g_loc."""
    relation = relate(g_pub, g_loc, compiled)
    return Projection(move(g_pub, g_loc, relation, compiled), relation.conflict, relation.angle)


def pcgrad(g_pub: Tensor, g_loc: Tensor, compiled: bool = True) -> Projection:
    """Return PCGrad (Yu et al., 2020) of two gradients: each is projected on the other's normal plane, then summed."""
    relation = relate(g_pub, g_loc, compiled)
    v_pub, v_loc = factor(relation.inner, relation.second), factor(relation.inner, relation.first)
    both = []
    for pub, loc in blocks(g_pub, g_loc):
        wide_pub, wide_loc = pub.double(), loc.double()
        both.append(((wide_pub + v_pub * wide_loc) + (wide_loc + v_loc * wide_pub)).to(g_pub.dtype))
    return Projection(whole(both), relation.conflict, relation.angle)


def unprojected(g_pub: Tensor, g_loc: Tensor, compiled: bool = True) -> Projection:
    """Return g_pub unchanged, with the relation of the two gradients."""
    relation = relate(g_pub, g_loc, compiled)
    return Projection(g_pub, relation.conflict, relation.angle)


PROJECTIONS = {"qp": project, "pcgrad": pcgrad, "none": unprojected}
