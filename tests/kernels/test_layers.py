"""Which layers use compiled kernels, and how CUDA kernels are planned."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedh2l.kernels.cpu import compiler
from fedh2l.kernels.cuda.tiles import Shape, plan, plan_weights
from fedh2l.kernels.pooled import allowed, allowing, pooled
from fedh2l.models.lenet import LeNet, LeNetWide
from fedh2l.training.compute import Compute
from fedh2l.training.network import Network
from fedh2l.training.optimizers import OptimizerSettings

KERNEL = "PooledConvolutionBackward"
needs_compiler = pytest.mark.skipif(compiler._found() is None, reason="there is no C compiler")


@needs_compiler
def test_a_network_on_a_cpu_uses_kernels():
    x = torch.randn(3, 1, 28, 28)
    network = Network(LeNet(), OptimizerSettings())
    assert _steps(network.logits(x).grad_fn, KERNEL) == 2
    torch.testing.assert_close(network.predict(x), network.module(x).detach())


@pytest.mark.parametrize(
    "network",
    [
        lambda: Network(LeNet(), OptimizerSettings(), compute=Compute(kernels=False)),
        lambda: Network(torch.compile(LeNet(), backend="eager"), OptimizerSettings()),
        lambda: Network(LeNet().double(), OptimizerSettings()),
    ],
    ids=["off", "torch.compile", "float64"],
)
def test_others_use_none(network):
    network = network()
    x = torch.randn(3, 1, 28, 28, dtype=network.parameters.dtype)
    with network.exactly():
        said = network.logits(x)
    assert said.requires_grad
    assert _steps(said.grad_fn, KERNEL) == 0


def test_a_model_outside_a_network_uses_none():
    assert not allowed()
    assert _steps(LeNet()(torch.randn(3, 1, 28, 28)).grad_fn, KERNEL) == 0


@pytest.mark.parametrize("model", [LeNet, LeNetWide])
def test_without_kernels_channels_come_last(model):
    """The results are those of the usual layout."""
    net, x = model(), torch.randn(5, 1, 28, 28, requires_grad=True)
    said = pooled(net.conv1, x)
    assert said.stride(1) == 1
    usual = F.relu(F.max_pool2d(net.conv1(x), 2))
    wanted = [x, *net.conv1.parameters()]
    torch.testing.assert_close(said, usual)
    above = torch.randn_like(usual)
    for ours, theirs in zip(*(torch.autograd.grad(each, wanted, above) for each in (said, usual)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
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
def test_other_convolutions_are_left_to_pytorch(layer, shape):
    x = torch.randn(shape)
    with allowing(True):
        ours = pooled(layer, x)
    assert _steps(ours.grad_fn, KERNEL) == 0
    torch.testing.assert_close(ours, F.relu(F.max_pool2d(layer(x), 2)))


def test_a_convolution_that_somebody_listens_to_is_called():
    layer, heard = nn.Conv2d(1, 2, 3, padding=1), []
    layer.register_forward_hook(lambda *said: heard.append(said[2].shape))
    with allowing(True):
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
