"""What is computed while messages are on their way is what would have been computed when they are there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedh2l.engines.residents import Residents
from fedh2l.messages import Posteriors
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.trainer import Trainer
from test_engine import NOISY


def residents(federation, *changes: str) -> list[Residents]:
    """One for each node, as in processes or organisations of their own."""
    fed = federation(*changes)
    return [Residents([learner], fed.method) for learner in fed.learners()]


def a_round(all_nodes: list[Residents], expects=None, late: bool = False) -> list[torch.Tensor]:
    """The parameters of all after one round; if they are late, messages come when the next one is under way."""
    everybody = [nodes.learners[0].name for nodes in all_nodes]
    sent = {}
    for nodes in all_nodes:
        nodes.local_steps(1)
        sent |= nodes.emit(1)
    now = 2 if late else 1
    for nodes in all_nodes:
        (own,) = nodes.learners
        if late:
            nodes.local_steps(2)
        others = [name for name in everybody if name != own.name]
        if expects is not None:
            nodes.anticipate({own.name: expects(others)}, now)
        nodes.receive({own.name: [sent[name] for name in others]}, now)
        assert own.ready is None
    return [nodes.learners[0].parameters for nodes in all_nodes]


@pytest.mark.parametrize("changes", [[], NOISY, ["run.micro_batch=7"]])
@pytest.mark.parametrize("expects", [list, tuple, lambda others: others[:1], lambda others: ()])
def test_the_same_bits(federation, changes, expects):
    plain = a_round(residents(federation, *changes))
    ahead = a_round(residents(federation, *changes), expects)
    assert all(torch.equal(a, b) for a, b in zip(plain, ahead, strict=True))


def test_messages_of_another_round(federation):
    """What was computed ahead is of other batches than they speak of."""
    plain, ahead = (a_round(residents(federation), expects, late=True) for expects in (None, tuple))
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


class Instances(nn.Sequential):
    """Learns statistics in another kind of layer."""

    def __init__(self, num_classes: int = 10) -> None:
        norm = nn.InstanceNorm2d(2, track_running_stats=True)
        super().__init__(nn.Conv2d(1, 2, 5, 5), norm, nn.Flatten(), nn.Linear(50, num_classes))


@pytest.mark.parametrize("choice", ["frozen", "joint", "per-domain"])
@pytest.mark.parametrize("model", [Normed, Instances])
def test_statistics_are_learned_once(federation, choice, model):
    models = [f"nodes.{i}.{k}" for i in range(4) for k in (f"model=test_ahead:{model.__name__}", "model_args={}")]
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
    stray = Posteriors.of("nobody", 1, torch.full((8, 10), 0.1), torch.zeros(8, dtype=torch.long))
    with pytest.raises(KeyError, match="nobody"):
        nodes.receive({name: [stray]}, 1)


def test_nothing_is_kept_over_a_return(federation):
    nodes, other, *_ = residents(federation)
    learner = nodes.learners[0]
    nodes.local_steps(1)
    state = learner.state()
    nodes.anticipate({learner.name: (other.learners[0].name,)}, 1)
    assert learner.ready is not None
    learner.restore(state)
    assert learner.ready is None


class Counting(FedH2L):
    """Counts how often something was done ahead, where it can be seen from outside."""

    def anticipate(self, node, senders, round):
        """Counts."""
        super().anticipate(node, senders, round)
        node.memory["ahead"] = node.memory.get("ahead", torch.zeros(())) + (node.ready is not None)


@pytest.mark.parametrize(("processes", "times"), [(4, 6), (2, 0), (1, 0)])
def test_where_it_is_done(federation, processes, times):
    trainer = Trainer(federation("run.rounds=6", f"run.processes={processes}", "method.name=test_ahead:Counting"))
    trainer.advance()
    counted = [int(value) for key, value in trainer.engine.state().items() if key.endswith("memory.ahead")]
    assert counted == [times] * 4 if times else not counted
    trainer.engine.close()


def test_in_processes(federation):
    """A process a node, which is where it pays."""
    results = [Trainer(federation("run.rounds=6", f"run.processes={count}")).run().to_dict() for count in (1, 4)]
    assert results[0]["matrix"] == results[1]["matrix"]
