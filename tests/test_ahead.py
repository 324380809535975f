"""What is computed while messages are on their way is what would have been computed when they are there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedh2l.engines.residents import Residents
from fedh2l.trainer import Trainer
from test_engine import NOISY


def residents(federation, *changes: str) -> list[Residents]:
    """One for each node, as in processes or organisations of their own."""
    fed = federation(*changes)
    return [Residents([learner], fed.method) for learner in fed.learners()]


def a_round(all_nodes: list[Residents], expects=None) -> list[torch.Tensor]:
    """The parameters of all after one round."""
    everybody = [nodes.learners[0].name for nodes in all_nodes]
    sent = {}
    for nodes in all_nodes:
        nodes.local_steps(1)
        sent |= nodes.emit(1)
    for nodes in all_nodes:
        (own,) = nodes.learners
        others = [name for name in everybody if name != own.name]
        if expects is not None:
            nodes.anticipate({own.name: expects(others)}, 1)
        nodes.receive({own.name: [sent[name] for name in others]}, 1)
        assert own.ready is None
    return [nodes.learners[0].parameters for nodes in all_nodes]


@pytest.mark.parametrize("changes", [[], NOISY, ["run.micro_batch=7"]])
@pytest.mark.parametrize("expects", [list, tuple, lambda others: others[:1], lambda others: ()])
def test_the_same_bits(federation, changes, expects):
    plain = a_round(residents(federation, *changes))
    ahead = a_round(residents(federation, *changes), expects)
    assert all(torch.equal(a, b) for a, b in zip(plain, ahead, strict=True))


def test_the_pass_is_not_done_again(federation, monkeypatch):
    nodes, *others = residents(federation)
    passes = []
    learner = nodes.learners[0]
    logits = type(learner).logits
    monkeypatch.setattr(type(learner), "logits", lambda self, *a, **how: passes.append(1) or logits(self, *a, **how))
    a_round([nodes, *others], list)
    assert len(passes) == 2 * (1 + len(others))  # a local and a mutual one each


class Normed(nn.Sequential):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))


@pytest.mark.parametrize("choice", ["frozen", "joint", "per-domain"])
def test_statistics_are_learned_once(federation, choice):
    models = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=test_ahead:Normed", "model_args={}")]
    changes = [*models, f"method.batch_norm={choice}"]
    plain, ahead = residents(federation, *changes), residents(federation, *changes)
    a_round(plain)
    a_round(ahead, lambda others: others[:1])  # in vain
    for a, b in zip(plain, ahead, strict=True):
        for one, other in zip(a.learners[0].module.buffers(), b.learners[0].module.buffers(), strict=True):
            assert torch.equal(one, other)


def test_what_goes_wrong_is_told_when_it_matters(federation):
    nodes, *_ = residents(federation)
    nodes.local_steps(1)
    name = nodes.learners[0].name
    nodes.anticipate({name: ("nobody",)}, 1)
    assert nodes.learners[0].ready is None


def test_nothing_is_kept_over_a_return(federation):
    nodes, other, *_ = residents(federation)
    learner = nodes.learners[0]
    nodes.local_steps(1)
    state = learner.state()
    nodes.anticipate({learner.name: (other.learners[0].name,)}, 1)
    assert learner.ready is not None
    learner.restore(state)
    assert learner.ready is None


def test_in_processes(federation):
    """A process a node, which is where it pays."""
    results = [Trainer(federation("run.rounds=6", f"run.processes={count}")).run().to_dict() for count in (1, 4)]
    assert results[0]["matrix"] == results[1]["matrix"]
