"""What users' models, data and methods may do that is easily lost when nodes are run as one computation."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

import fedh2l
from conftest import blobs, tiny_net
from fedh2l.engines.batched.graphs import GraphRecorder
from fedh2l.engines.choice import engines_for
from fedh2l.errors import ConfigError, MessageError, MethodError
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.settings import RunSettings
from fedh2l.methods.fedavg import FedAvg
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.methods.independent import Independent
from fedh2l.protocol.messages import Logits
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.trainer import Interrupted, Trainer, run_together
from fedh2l.training.losses import cross_entropy
from fedh2l.training.optimizers import OptimizerSettings
from imitation import ImitatingRecorder


def federation(nodes, method, engine: str, rounds: int = 20, **settings) -> Experiment:
    values = {"rounds": rounds, "eval_every": 10, "batch_size": 8, "dtype": "float64", "device": "cpu", **settings}
    return Experiment(nodes, method, RunSettings(engine=engine, **values), OptimizerSettings())


def both(make_nodes, method, **settings) -> None:
    """One after the other, as one, and as one with rounds recorded: the same parameters, results and bytes."""
    outcomes = []
    for engine, recorder in (("local", GraphRecorder), ("batched", GraphRecorder), ("batched", ImitatingRecorder)):
        with patch("fedh2l.engines.batched.nodes.GraphRecorder", recorder):
            trainer = Trainer(federation(make_nodes(), method, engine, **settings))
            result = trainer.run().to_dict()
        outcomes.append((result, [learner.parameters.clone() for learner in trainer.engine.learners]))
    one, first = outcomes[0]
    for two, second in outcomes[1:]:
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
        assert one["matrix"] == two["matrix"]
        assert one["bytes"] == two["bytes"]
        assert one["views"] == two["views"]


def plain(count: int = 4):
    return [fedh2l.Node(f"n{i}", "test_batched_hazards:net", blobs(f"n{i}", 0.4 * i, seed=i)) for i in range(count)]


def net(num_classes: int) -> nn.Sequential:
    return tiny_net()


# Models and data


class Scaled(nn.Module):
    """Two of them look alike and compute something else."""

    def __init__(self, num_classes: int, scale: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, num_classes)
        self.scale = scale

    def forward(self, x):
        return self.scale * self.layer(x)


class Tempered(nn.Module):
    """A parameter and a buffer without dimensions."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, num_classes)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.layer(x) / self.temperature


class Replacing(nn.Module):
    """Puts a new tensor in the place of its buffer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, num_classes)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x - self.mean)


def test_models_that_only_look_alike_stay_themselves():
    def nodes():
        path = "test_batched_hazards:Scaled"
        return [fedh2l.Node(f"n{i}", path, blobs(f"n{i}", seed=i), {"scale": 1.0 + i}) for i in range(3)]

    both(nodes, FedH2L())


@pytest.mark.parametrize("method", [FedH2L(), FedAvg(interval=3)], ids=["fedh2l", "fedavg"])
def test_numbers_without_dimensions(method):
    path = "test_batched_hazards:Tempered"
    both(lambda: [fedh2l.Node(f"n{i}", path, blobs(f"n{i}", seed=i)) for i in range(3)], method)


def test_buffers_that_are_replaced_are_refused():
    nodes = [fedh2l.Node(f"n{i}", "test_batched_hazards:Replacing", blobs(f"n{i}", seed=i)) for i in range(3)]
    with pytest.raises(ConfigError, match="replace their buffers"):
        engines_for([federation(nodes, FedH2L(), "batched")])


def test_domains_that_share_their_labels_keep_their_inputs():
    labels = torch.arange(60) % 3

    def nodes():
        made = []
        for i in range(3):
            inputs = torch.randn(60, 2, generator=torch.Generator().manual_seed(i)) + labels.unsqueeze(1)
            parts = [(inputs[a:b], labels[a:b]) for a, b in ((0, 30), (30, 42), (42, 50), (50, 60))]
            made.append(fedh2l.Node(f"n{i}", "test_batched_hazards:net", fedh2l.Domain(f"n{i}", 3, *parts)))
        return made

    shared = {}
    for node in (made := nodes()):
        for split in ("private", "public"):
            samples = getattr(node.domain, split)
            object.__setattr__(samples, "labels", shared.setdefault(split, samples.labels))
    assert made[0].domain.private.labels is made[2].domain.private.labels

    def sharing():
        for node in (fresh := nodes()):
            for split in ("private", "public"):
                object.__setattr__(getattr(node.domain, split), "labels", shared[split])
        return fresh

    both(sharing, FedH2L())


def test_federations_whose_data_differ_in_size():
    def nodes(private: int, public: int = 12, validation: int = 8):
        made = []
        for i in range(2):
            ends = torch.tensor([private, public, validation, 10]).cumsum(0).tolist()
            inputs = torch.randn(ends[-1], 2, generator=torch.Generator().manual_seed(i))
            labels = torch.arange(ends[-1]) % 3
            parts = [(inputs[a:b], labels[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
            made.append(fedh2l.Node(f"n{i}", "test_batched_hazards:net", fedh2l.Domain(f"n{i}", 3, *parts)))
        return made

    def together(method, one, two):
        return engines_for([federation(one, method, "batched"), federation(two, method, "batched", seed=1)])

    assert len(together(FedH2L(), nodes(30), nodes(60))) == 2
    with pytest.raises(ConfigError, match="fits the experiments differently"):
        together(FedAvg(interval="1 epoch"), nodes(30), nodes(60))
    with pytest.raises(ConfigError, match="public data of different sizes"):
        together(FedH2L(), nodes(30), nodes(30, public=15))
    with pytest.raises(ConfigError, match="validation data of different sizes"):
        together(FedH2L(), nodes(30), nodes(30, validation=9))


# Methods


class SeveralSteps(Independent):
    """Three batches a round, at addresses of its own."""

    def local_step(self, node, round):
        for k in (0, 1, 2):
            batch = node.local_batch(round + 1000 * k, self.local_data)
            node.step(node.gradient(cross_entropy(node.logits(batch.inputs), batch.labels)), "local")


class EpochGraphs(FedH2L):
    """Another graph every five rounds, kept as one object for as long as it holds."""

    def teachers(self, roster, round):
        return GRAPHS.setdefault(
            ((round - 1) // 5, roster.digest),
            {n: (roster.names[(i + 1 + (round - 1) // 5) % len(roster.names)],) for i, n in enumerate(roster.names)}
            if ((round - 1) // 5 + 1) % len(roster.names)
            else {n: (roster.others(n)[0],) for n in roster.names},
        )


GRAPHS: dict = {}


class Odd(FedH2L):
    """Remembers things that grow, change their type, and are parts of each other."""

    def local_step(self, node, round):
        super().local_step(node, round)
        memory, now = node.memory, node.parameters[..., :4].clone()
        memory["grown"] = torch.cat([memory["grown"], now], -1) if round > 1 else now
        memory["type"] = (now * 2).long() if round < 3 else now * 2
        memory["part"] = memory["grown"][..., 1:3]
        memory["shifted"] = memory["part"] + (memory["shifted"] if round > 1 else 0)
        pull = 1e-3 * (memory["shifted"].sum(-1) + memory["type"].sum(-1)).to(now.dtype)
        node.parameters.add_(pull.unsqueeze(-1))


class TwoSizes(FedAvg):
    """Answers with a loss as well in every other exchange."""

    def kind_of_round(self, round):
        return round % 8 == 0, self.exchanges(round)

    def aggregate(self, server, messages, round):
        answers = super().aggregate(server, messages, round)
        if round % 8:
            return answers
        return {name: type(a)(a.sender, a.round, a.values, a.values[..., 0]) for name, a in answers.items()}


class Seen(FedAvg):
    """Has what it trains tested beside what it reports."""

    def views(self, node):
        return {"own": node.predict}


@pytest.mark.parametrize(
    "method",
    [SeveralSteps(), EpochGraphs(), Odd(), TwoSizes(interval=4), Seen(interval=7), FedH2L(peers_per_round=1)],
    ids=lambda method: type(method).__name__,
)
def test_methods_of_all_sorts(method):
    both(plain, method)


class Scalar(Independent):
    def local_step(self, node, round):
        batch = node.local_batch(round, self.local_data)
        node.step(node.gradient(cross_entropy(node.logits(batch.inputs), batch.labels).mean()), "local")


class Flat(Independent):
    def local_step(self, node, round):
        super().local_step(node, round)
        node.memory["round"] = torch.tensor(float(round))


class Moody(Independent):
    def local_step(self, node, round):
        super().local_step(node, round)
        if round % 2:
            node.record(round, odd=node.parameters.sum(-1))


class Wandering(Independent):
    def local_step(self, node, round):
        node.local_batch(3 * round, self.local_data)
        super().local_step(node, round)


class Undeclared(Independent):
    def exchanges(self, round):
        return True

    def emit(self, node, round):
        return Logits.of(node.name, round, node.predict(node.local_batch(round, "private").inputs))


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        (Scalar(), MethodError, r"mean\(-1\) rather than mean"),
        (Flat(), MethodError, "needs a leading dimension of nodes"),
        (Moody(), MethodError, "tell such rounds apart in kind_of_round"),
        (Wandering(), MethodError, "tell such rounds apart in kind_of_round"),
        (Undeclared(), MessageError, "does not declare"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, fedh2l.Method) else "",
)
def test_what_a_method_may_not_do_is_said(method, error, message):
    with pytest.raises(error, match=message):
        Trainer(federation(plain(), method, "batched")).run()


def test_a_ring_in_pairs_is_run_in_turn():
    """Some find no partner in some rounds."""
    with pytest.raises(ConfigError, match="different numbers of teachers"):
        engines_for([federation(plain(6), FedH2L(topology="ring", pairing="pairs"), "batched", rounds=200)])


# In step


@pytest.mark.parametrize("last", [63, 64, 65])
def test_it_stops_where_it_is_asked_to(last):
    (engine,) = engines_for([federation(plain(), Independent(), "batched", rounds=150)])
    assert engine.advance(1, 150, lambda round: round < last) == last
    assert engine.advance(last + 1, 150, lambda round: True) == 150


def test_windows_cannot_be_run_one_after_the_other():
    federations = [federation(plain(), Independent(), "batched", seed=seed) for seed in (0, 1)]
    engines = engines_for(federations)
    trainers = [Trainer(f, engine=e) for f, e in zip(federations, engines, strict=True)]
    trainers[0].run()
    with pytest.raises(RuntimeError, match="are at round 20, not 0"):
        trainers[1].run()


def test_all_are_saved_when_one_asks_to_stop(tmp_path):
    """Also if it asks while the others are being evaluated."""
    federations = [federation(plain(), Independent(), "batched", seed=seed) for seed in (0, 1, 2)]
    asked = []
    trainers = [
        Trainer(f, RunDirectory.claim(tmp_path / str(i), "x"), engine=e, stop=lambda: asked.append(1) or len(asked) > 1)
        for i, (f, e) in enumerate(zip(federations, engines_for(federations), strict=True))
    ]
    for trainer in trainers:
        trainer._after_round = lambda round: True
    with pytest.raises(Interrupted):
        run_together(trainers)
    rounds = [trainer.directory.checkpoints.newest()[1].round for trainer in trainers]
    assert rounds == [10, 10, 10]


def test_a_run_that_is_cut_short_leaves_what_was_learned():
    class Enough(fedh2l.Callback):
        def on_evaluation(self, metrics):
            raise ZeroDivisionError

    trained = []
    for engine in ("local", "batched"):
        trainer = Trainer(federation(plain(), Independent(), engine), callbacks=[Enough()])
        before = [learner.parameters.clone() for learner in trainer.engine.learners]
        with pytest.raises(ZeroDivisionError):
            trainer.run()
        trained.append([learner.parameters.clone() for learner in trainer.engine.learners])
        assert not torch.equal(before[0], trained[-1][0])
    for one, two in zip(*trained, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9)
