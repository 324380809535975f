"""The projection is the paper's quadratic programme, solved in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import quadprog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fedh2l.training.projection import pcgrad, project, unprojected


def solve_qp(g_pub: np.ndarray, g_loc: np.ndarray) -> np.ndarray:
    """min ½‖z − g_pub‖² subject to ⟨z, g_loc⟩ ≥ 0, by a QP solver.

    The problem is homogeneous in both vectors, so it is solved at unit scale, where the solver is at home.
    """
    pub_scale, loc_scale = np.abs(g_pub).max() or 1.0, np.abs(g_loc).max() or 1.0
    solution = quadprog.solve_qp(np.eye(len(g_pub)), g_pub / pub_scale, (g_loc / loc_scale)[:, None], np.zeros(1))
    return solution[0] * pub_scale


def relative(a: torch.Tensor, b: np.ndarray, scale: float) -> float:
    return float(np.abs(a.double().numpy() - b).max()) / (scale or 1.0)


@pytest.mark.parametrize("scale_pub", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("scale_loc", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_a_qp_solver_at_any_scale(scale_pub, scale_loc, dtype):
    rng = np.random.default_rng(7)
    conflicts = 0
    for _ in range(50):
        size = int(rng.integers(1, 60))
        pub = torch.tensor(rng.normal(size=size) * scale_pub, dtype=dtype)
        loc = torch.tensor(rng.normal(size=size) * scale_loc, dtype=dtype)
        got = project(pub, loc)
        want = solve_qp(pub.double().numpy(), loc.double().numpy())
        conflicts += int(got.conflict)
        assert relative(got.gradient, want, float(pub.abs().max())) < (1e-5 if dtype is torch.float32 else 1e-12)
    assert 10 < conflicts < 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("pub", "loc"),
    [
        ([1.0, 2.0], [0.0, 0.0]),
        ([0.0, 0.0], [1.0, 2.0]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([1.0, 2.0], [2.0, 4.0]),
        ([1.0, 2.0], [-1.0, -2.0]),
        ([1e20, -1e20], [-1e-20, 1e-20]),
        ([1.0, 0.0], [0.0, 1.0]),
        ([1e-20, 1e20], [-1e20, 1e-20]),
    ],
)
def test_equals_a_qp_solver_on_special_gradients(pub, loc, dtype):
    pub, loc = torch.tensor(pub, dtype=dtype), torch.tensor(loc, dtype=dtype)
    got = project(pub, loc).gradient
    assert torch.isfinite(got).all()
    if loc.any():  # a constraint of zeros says nothing, and the solver does not take it
        want = solve_qp(pub.double().numpy(), loc.double().numpy())
        assert relative(got, want, float(pub.abs().max())) < 1e-6
    else:
        assert torch.equal(got, pub)


def gradients(width: int):
    """Two gradients of one length, each value zero or of a magnitude anywhere between 2⁻⁶⁰ and 2⁶⁰."""
    value = st.floats(-(2.0**60), 2.0**60, width=width, allow_subnormal=False)
    value = value.filter(lambda x: x == 0 or abs(x) > 2.0**-60)
    return st.integers(1, 12).flatmap(lambda n: st.tuples(*(st.lists(value, min_size=n, max_size=n) for _ in range(2))))


@pytest.mark.parametrize(("dtype", "tolerance", "width"), [(torch.float32, 1e-6, 32), (torch.float64, 1e-12, 64)])
def test_properties(dtype, tolerance, width):
    @given(gradients(width))
    @settings(max_examples=400, deadline=None)
    def holds(pair):
        pub, loc = (torch.tensor(part, dtype=dtype) for part in pair)
        result = project(pub, loc)
        pub64, loc64, new = pub.double(), loc.double(), result.gradient.double()
        size = float(pub64.norm() * loc64.norm())
        # feasible
        assert float(new @ loc64) >= -tolerance * size
        # unchanged without a conflict
        if float(pub64 @ loc64) >= tolerance * size:
            assert torch.equal(result.gradient, pub)
        # no farther from g_pub than the boundary of the feasible set, which is as near as anything feasible can be
        distance = max(0.0, -float(pub64 @ loc64)) / (float(loc64.norm()) or 1.0)
        assert float((new - pub64).norm()) <= distance + 10 * tolerance * float(pub64.norm())

    holds()


@pytest.mark.parametrize("size", [61_706, 431_080, 2_000_000])
def test_the_constraint_holds_at_the_size_of_real_models(size):
    generator = torch.Generator().manual_seed(size)
    for mix in (0.02, 0.3, 0.9):
        loc = torch.randn(size, generator=generator)
        pub = torch.randn(size, generator=generator) - mix * loc
        result = project(pub, loc)
        inner = float(result.gradient.double() @ loc.double())
        assert result.conflict
        assert inner >= -1e-6 * float(pub.double().norm() * loc.double().norm())


def test_nothing_feasible_is_nearer():
    generator = torch.Generator().manual_seed(1)
    pub = torch.randn(20, generator=generator, dtype=torch.float64)
    loc = -pub + 0.5 * torch.randn(20, generator=generator, dtype=torch.float64)
    best = project(pub, loc).gradient
    for _ in range(500):
        other = best + 0.1 * torch.randn(20, generator=generator, dtype=torch.float64)
        if other @ loc >= 0:
            assert (other - pub).norm() >= (best - pub).norm()


def test_pcgrad_contains_the_projection():
    generator = torch.Generator().manual_seed(2)
    seen = set()
    for _ in range(40):
        pub, loc = torch.randn(2, 30, generator=generator, dtype=torch.float64)
        got = pcgrad(pub, loc)
        inner = pub @ loc
        seen.add(bool(inner < 0))
        other = loc - inner / (pub @ pub) * pub if inner < 0 else loc
        torch.testing.assert_close(got.gradient, project(pub, loc).gradient + other)
        assert bool(got.conflict) == bool(inner < 0)
    assert seen == {True, False}


def test_reports_the_angle():
    pub, loc = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
    result = unprojected(pub, loc)
    assert torch.equal(result.gradient, pub)
    assert result.angle.item() == pytest.approx(135, abs=1e-3)
    assert result.conflict.item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [project, pcgrad, unprojected])
def test_stacked_nodes_give_what_single_ones_do(function, dtype):
    pub, loc = torch.randn(2, 5, 40, dtype=dtype, generator=torch.Generator().manual_seed(3))
    single = torch.stack([function(p, q).gradient for p, q in zip(pub, loc, strict=True)])
    torch.testing.assert_close(function(pub, loc).gradient, single)
    torch.testing.assert_close(torch.func.vmap(function)(pub, loc).gradient, single)


@pytest.mark.parametrize("function", [project, pcgrad, unprojected])
def test_nothing_is_read_by_the_host(function):
    with FakeTensorMode():  # tensors without values: a branch on one, or reading one, raises
        assert function(torch.randn(30), torch.randn(30)).angle.shape == ()
