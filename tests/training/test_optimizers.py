from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fedh2l.training.optimizers import OptimizerSettings


@pytest.mark.parametrize(
    ("settings", "torchs"),
    [
        ({"name": "amsgrad"}, lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, amsgrad=True)),
        ({"name": "adam"}, lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1)),
        ({"name": "sgd"}, lambda p: torch.optim.SGD(p, 1e-2, weight_decay=0.1)),
        ({"name": "sgd", "momentum": 0.9}, lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, weight_decay=0.1)),
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_follows_torch(settings, torchs, compiled):
    ours = OptimizerSettings(lr=1e-2, weight_decay=0.1, **settings)
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(20, generator=generator)
    parameter = torch.nn.Parameter(vector.clone())
    optimizer, state = torchs([parameter]), ours.initial_state(vector)
    for step in range(30):
        # Gradients that shrink, so that AMSGrad's maximum matters.
        gradient = torch.randn(20, generator=generator) / (1 + step)
        ours.step(vector, gradient, state, ours.rate("local"), compiled=compiled)
        parameter.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(vector, parameter.detach(), rtol=1e-6, atol=1e-7)
    assert int(state["steps"]) == 30


@pytest.mark.parametrize("name", ["amsgrad", "adam", "sgd"])
def test_stacked_nodes_step_each_at_their_own_count(name):
    settings = OptimizerSettings(name=name)
    single = torch.randn(3, 5)
    stacked = single.clone()
    together, apart = settings.initial_state(stacked), [settings.initial_state(row) for row in single]
    counts = torch.tensor([0, 7, 100])
    together["steps"] += counts
    for state, count in zip(apart, counts, strict=True):
        state["steps"] += count
    gradient = torch.randn(3, 5)
    settings.step(stacked, gradient, together, 0.1)
    for row, state, part in zip(single, apart, gradient, strict=True):
        settings.step(row, part, state, 0.1)
    torch.testing.assert_close(stacked, single)


@pytest.mark.parametrize("name", ["amsgrad", "adam", "sgd"])
def test_nothing_is_read_by_the_host(name):
    settings = OptimizerSettings(name=name)
    with FakeTensorMode():
        vector = torch.randn(6)
        settings.step(vector, torch.randn(6), settings.initial_state(vector), 0.1)


def test_mutual_rate():
    assert OptimizerSettings(lr=0.1).rate("mutual") == 0.1
    assert OptimizerSettings(lr=0.1, mutual_lr_scale=2.0).rate("mutual") == 0.2
    assert OptimizerSettings(lr=0.1, mutual_lr_scale=2.0).rate("local") == 0.1
