"""The nearest teaching gradient that does not conflict with the local one: eqs. (7) to (14) of the paper.

The paper's dual problem has one variable and one bound, so its solution is closed,
v* = max(0, −⟨g_pub, g_loc⟩ / ⟨g_loc, g_loc⟩), and g̃ = g_pub + v*·g_loc. Gradients are whole flattened models
`(…, parameters)`; there is no branch on a value and nothing is read by the host, so all of it runs on the device.

Inner products are taken in float64: in float32 they lose the digits that the constraint is about when a model has
hundreds of thousands of parameters, and squares of large or small gradients over- or underflow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Projection(NamedTuple):
    """A projected gradient `(…, parameters)`, and how the two gradients stood to each other, `(…)` each."""

    gradient: Tensor
    conflict: Tensor
    """1 where ⟨g_pub, g_loc⟩ < 0, else 0."""
    cosine: Tensor

    @property
    def angle(self) -> Tensor:
        """Between the two gradients, in degrees."""
        return torch.rad2deg(torch.acos(self.cosine))


def project(g_pub: Tensor, g_loc: Tensor) -> Projection:
    """g̃ of eq. (8): g_pub itself where ⟨g_pub, g_loc⟩ ≥ 0, else its projection on the plane normal to g_loc."""
    pub, loc = _Wide.of(g_pub), _Wide.of(g_loc)
    return _projection(g_pub + _correction(pub, loc).to(g_pub.dtype), pub, loc)


def pcgrad(g_pub: Tensor, g_loc: Tensor) -> Projection:
    """PCGrad (Yu et al., 2020) for two gradients: each projected on the other's normal plane, then summed."""
    pub, loc = _Wide.of(g_pub), _Wide.of(g_loc)
    both = (pub.vector + _correction(pub, loc)) + (loc.vector + _correction(loc, pub))
    return _projection(both.to(g_pub.dtype), pub, loc)


def unprojected(g_pub: Tensor, g_loc: Tensor) -> Projection:
    """g_pub as it is, with the relation of the two gradients still measured."""
    return _projection(g_pub, _Wide.of(g_pub), _Wide.of(g_loc))


class _Wide(NamedTuple):
    """A gradient in float64 and its square."""

    vector: Tensor
    square: Tensor

    @staticmethod
    def of(gradient: Tensor) -> _Wide:
        vector = gradient.double()
        return _Wide(vector, torch.linalg.vecdot(vector, vector))


def _correction(moved: _Wide, fixed: _Wide) -> Tensor:
    """v*·fixed: what takes `moved` to the nearest vector that does not conflict with `fixed`; 0 if it does not."""
    v = (-torch.linalg.vecdot(moved.vector, fixed.vector)).clamp_min(0) / _nonzero(fixed.square)
    correction: Tensor = v.unsqueeze(-1) * fixed.vector
    return correction


def _projection(gradient: Tensor, pub: _Wide, loc: _Wide) -> Projection:
    inner = torch.linalg.vecdot(pub.vector, loc.vector)
    cosine = inner / (_nonzero(pub.square).sqrt() * _nonzero(loc.square).sqrt())
    return Projection(gradient, (inner < 0).double(), cosine.clamp(-1, 1))


def _nonzero(value: Tensor) -> Tensor:
    """The value, or 1 where it is 0: what it divides is then 0 as well."""
    return torch.where(value == 0, torch.ones_like(value), value)
