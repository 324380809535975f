"""Layers that are computed in a way of our own: the same results as PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedh2l.kernels.cpu import compiler
from fedh2l.kernels.cpu.layers import ON_CPU, HalvingPool, LargestOfFour
from fedh2l.kernels.cuda.layers import Shape, plan, plan_weights
from fedh2l.kernels.overrides import FunctionOverrides
from fedh2l.kernels.pooled import pooled
from fedh2l.models.lenet import LeNet
from fedh2l.training.network import Network
from fedh2l.training.optimizers import OptimizerSettings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(32, 6, 28, 28), (3, 2, 4, 6), (1, 1, 2, 2), (2, 1, 2, 300)])
@pytest.mark.parametrize("levels", [None, 2, 0])
def test_halving_is_max_pool_bit_for_bit(shape, dtype, levels):
    """Also where several pixels are the largest, which is what a black corner of an image makes of a window."""
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    x = (x if levels is None else (x * levels).round()).requires_grad_()
    theirs = F.max_pool2d(x, 2)
    with FunctionOverrides(ON_CPU):
        ours = F.max_pool2d(x, 2)
    assert type(ours.grad_fn).__name__ == "HalvingPoolBackward"
    above = torch.randn(ours.shape, dtype=dtype)
    assert torch.equal(ours, theirs)
    assert torch.equal(torch.autograd.grad(ours, x, above)[0], torch.autograd.grad(theirs, x, above)[0])


def test_halving_has_second_derivatives():
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(HalvingPool.apply, x)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((2, 1, 5, 4), {"kernel_size": 2}),
        ((2, 1, 6, 6), {"kernel_size": 3}),
        ((2, 1, 6, 6), {"kernel_size": 2, "stride": 1}),
        ((2, 1, 6, 6), {"kernel_size": 2, "padding": 1}),
        ((2, 1, 6, 6), {"kernel_size": 2, "dilation": 2, "stride": 2}),
        ((1, 6, 6), {"kernel_size": 2}),
        ((0, 1, 6, 6), {"kernel_size": 2}),
    ],
)
def test_other_poolings_are_left_alone(size, options):
    x = torch.randn(size, requires_grad=True)
    with FunctionOverrides(ON_CPU):
        ours = F.max_pool2d(x, **options)
    assert type(ours.grad_fn).__name__ != "HalvingPoolBackward"
    assert torch.equal(ours, F.max_pool2d(x, **options))
    with FunctionOverrides(ON_CPU):
        y, where = F.max_pool2d(torch.randn(1, 1, 4, 4), 2, return_indices=True)
    assert y.shape == where.shape


def test_a_network_on_a_cpu_uses_them_and_a_compiled_one_does_not():
    x = torch.randn(3, 1, 28, 28)
    plain = Network(LeNet(), OptimizerSettings())
    said = plain.logits(x)
    if compiler._found() is not None:
        assert _steps(said.grad_fn, "PooledConvolutionBackward") == 2
    else:
        assert _steps(said.grad_fn, "LargestOfFourBackward") == _steps(said.grad_fn, "HalvingPoolBackward") == 1
    torch.testing.assert_close(plain.predict(x), plain.module(x).detach())
    compiled = Network(nn.Sequential(torch.compile(nn.Linear(2, 2))), OptimizerSettings())
    assert not compiled._quicker


@pytest.mark.parametrize(("side", "padding"), [(5, 2), (5, 0), (3, 1), (1, 0)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_by_quarters(side, padding, bias):
    """With its gradients, also where several pixels are the largest."""
    layer = nn.Conv2d(1, 6, side, padding=padding, bias=bias, dtype=torch.float64)
    x = torch.randn(4, 1, 28, 20, dtype=torch.float64)
    x[:, :, :12] = 0
    x.requires_grad_()
    theirs = F.relu(F.max_pool2d(layer(x), 2))
    with FunctionOverrides(ON_CPU):
        ours = pooled(layer, x)
    assert _steps(ours.grad_fn, "LargestOfFourBackward") == 1
    above = torch.randn_like(ours)
    wanted = [x, *layer.parameters()]
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(*(torch.autograd.grad(said, wanted, above) for said in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other)


def test_the_largest_of_four_has_second_derivatives():
    assert torch.autograd.gradgradcheck(
        LargestOfFour.apply, torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    )


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(1, 2, 4), (2, 1, 9, 9)),
        (nn.Conv2d(1, 2, 3), (2, 1, 9, 9)),
        (nn.Conv2d(3, 2, 3), (2, 3, 8, 8)),
        (nn.Conv2d(1, 2, (3, 5)), (2, 1, 8, 8)),
        (nn.Conv2d(1, 2, 3, stride=2), (2, 1, 8, 8)),
        (nn.Conv2d(1, 2, 3, padding=(0, 1)), (2, 1, 8, 8)),
        (nn.Conv2d(1, 2, 3, padding="same"), (2, 1, 8, 8)),
        (nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), (2, 1, 8, 8)),
        (nn.Conv2d(1, 2, 3, padding=1), (1, 8, 8)),
        (nn.Conv2d(1, 2, 3, padding=1), (0, 1, 8, 8)),
        (nn.Sequential(nn.Conv2d(1, 2, 3, padding=1)), (2, 1, 8, 8)),
    ],
)
def test_other_convolutions_are_left_alone(layer, shape):
    layer, x = layer.double(), torch.randn(shape, dtype=torch.float64)
    with FunctionOverrides(ON_CPU):
        ours = pooled(layer, x)
    assert _steps(ours.grad_fn, "LargestOfFourBackward") == 0
    assert torch.equal(ours, F.relu(F.max_pool2d(layer(x), 2)))


def test_a_convolution_that_somebody_listens_to_is_called():
    layer, heard = nn.Conv2d(1, 2, 3, padding=1), []
    layer.register_forward_hook(lambda *said: heard.append(said[2].shape))
    with FunctionOverrides(ON_CPU):
        pooled(layer, torch.randn(2, 1, 8, 8))
    assert heard == [(2, 2, 8, 8)]


def _steps(node, name: str) -> int:
    """How many steps of that name lead to here."""
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return sum(type(node).__name__ == name for node in seen)


def test_kernels_are_planned_within_what_a_block_has():
    limit = 96 * 1024
    for shape in (Shape(1, 28, 28, 6, 5, 5, 2, 2), Shape(20, 12, 12, 50, 5, 5, 0, 0), Shape(8, 14, 14, 24, 3, 3, 1, 1)):
        for nets, rows in ((4, 32), (40, 96), (256, 128)):
            for way in (shape, shape.backward()):
                tiles = plan(way, nets, rows, 4, 132, limit)
                assert tiles.shared <= limit
                assert tiles.T <= 1024
                assert tiles.S * way.size[0] * way.size[1] <= tiles.T * tiles.PX
                assert tiles.CC <= way.C
        split = plan_weights(shape, 4, limit)
        assert split.shared <= limit
        assert split.T <= 1024


def test_what_does_not_fit_has_no_plan():
    assert plan(Shape(1, 4, 4, 1, 5, 5, 0, 0), 4, 32, 4, 132, 1 << 16) is None  # a window larger than the image
    assert plan(Shape(1, 8, 8, 1, 3, 3, 3, 3).backward(), 4, 32, 4, 132, 1 << 16) is None  # more padding than window
    assert plan(Shape(1, 300, 300, 1, 3, 3, 1, 1), 4, 32, 4, 132, 1 << 16) is None
    assert plan_weights(Shape(3, 32, 32, 64, 3, 3, 1, 1), 4, 96 * 1024) is None  # all filters' gradients at once
    assert plan_weights(Shape(512, 8, 8, 512, 3, 3, 1, 1), 4, 1 << 16) is None
