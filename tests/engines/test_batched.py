"""Nodes run as one computation end where nodes run one after the other do, for every method."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn

from conftest import MLPS, TINY
from fedh2l.engines.batched.engine import BatchedEngine
from fedh2l.engines.choice import engines_for
from fedh2l.errors import ConfigError, DivergedError
from fedh2l.experiment.config import load_config
from fedh2l.experiment.experiment import Experiment
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.trainer import Interrupted, Trainer, run_together
from imitation import COUNTS, ImitatingRecorder

LENETS = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=lenet", "model_args={}")]
MIXED = [
    *(f"nodes.{i}.model_args={{}}" for i in range(4)),
    "nodes.0.model=cnn",
    "nodes.2.model=cnn",
    "nodes.3.model=lenet",
]
NORMED = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=test_batched:normed", "model_args={}")]
BRANCHING = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=test_batched:Branching", "model_args={}")]
DEEP = [f"nodes.{i}.model_args.hidden=[12,9]" for i in range(4)]
PLUS = "method.name=fedh2l-plus"

VARIANTS = {
    "fedh2l": [],
    "interval": ["method.interval=3"],
    "difference": ["method.interval=3", "method.local_gradient=difference"],
    "pcgrad": ["method.project=pcgrad"],
    "replay": [PLUS, "method.interval=4", "method.replay=2"],
    "replay-norm": [PLUS, "method.interval=3", "method.replay=3", *NORMED],
    "unlabelled": [PLUS, "data.public_labels=false", "method.encoding=int4"],
    "soft": ["method.temperature=4", "method.kl_weight=0.5"],
    "int4": ["method.encoding=int4"],
    "topk": ["method.encoding=topk-2", "method.peers_per_round=2"],
    "views": ["data.augment=all"],
    "views-lenet": ["data.augment=all", "method.peers_per_round=2", *LENETS],
    "views-mixed": ["data.augment=local", *MIXED],
    "views-public": ["data.augment=public"],
    "ema": ["run.ema_decay=0.9"],
    "plus": [PLUS, "run.ema_decay=0.9"],
    "plus-norm": [PLUS, "run.ema_decay=0.9", "method.interval=3", *NORMED],
    "ema-fedavg": ["method.name=fedavg", "method.interval=4", "run.ema_decay=0.8"],
    "ema-fedmd": ["method.name=fedmd", "run.ema_decay=0.8"],
    "ring": ["method.topology=ring"],
    "peers": ["method.peers_per_round=2"],
    "pairs": ["method.pairing=pairs"],
    "small-public": ["run.batch_size=24"],
    "lenet": LENETS,
    "mixed": MIXED,
    "batch-norm": NORMED,
    "branching": BRANCHING,
    "sgd": ["optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9"],
    "independent": ["method.name=independent"],
    "aggregation": ["method.name=aggregation"],
    "fedmd": ["method.name=fedmd"],
    "fedmd-subset": ["method.name=fedmd", "method.subset=20", "method.digest_batch_size=8", "method.digest_epochs=2"],
    "fedmd-mixed": ["method.name=fedmd", *MIXED],
    "fedavg": ["method.name=fedavg"],
    "fedavg-4": ["method.name=fedavg", "method.interval=4"],
    "fedavg-reset": ["method.name=fedavg", "method.interval=4", "method.optimizer_state=reset"],
    "fedavg-norm": ["method.name=fedavg", "method.interval=4", *NORMED],
    "fedavg-norm-1": ["method.name=fedavg", *NORMED],
    "fedprox": ["method.name=fedprox", "method.interval=4", "method.mu=0.5"],
    "agnostic": ["method.name=agnostic", "method.lambda_lr=0.3"],
    "agnostic-4": ["method.name=agnostic", "method.lambda_lr=0.3", "method.interval=4"],
    "fml": ["method.name=fml", "method.interval=4"],
    "fml-mixed": ["method.name=fml", "method.interval=4", "method.meme=mlp", *MIXED],
    "fedgkt": ["method.name=fedgkt", "method.interval=4", "method.server_epochs=2", *DEEP],
    "fedgkt-lenet": ["method.name=fedgkt", "method.interval=4", "method.server_epochs=1", *LENETS],
}


def normed(num_classes: int, input_shape: tuple[int, ...]) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, num_classes))


class Branching(nn.Module):
    """Looks at values in Python, which cannot be run as one."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(784, num_classes)

    def forward(self, x):
        x = x.flatten(1)
        return self.layer(-x if float(x.detach().sum()) < 0 else x)


def federation_of(seed: int, *changes: str) -> Experiment:
    base = [*TINY, *MLPS, "run.dtype=float64", "run.rounds=20", "run.eval_every=10"]
    return load_config(None, [*base, *changes, f"run.seed={seed}"])[0].experiment()


def outcome(trainer: Trainer) -> dict:
    result = trainer.run().to_dict()
    result.pop("seconds")
    return result


def assert_close_results(one: dict, two: dict) -> None:
    """Equal in everything, but for the last digits of means."""
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert value == pytest.approx(two[key]) if isinstance(value, float) else value == two[key], key


@pytest.mark.parametrize("variant", VARIANTS)
def test_as_one_is_as_one_by_one(variant):
    changes = VARIANTS[variant]
    local = [Trainer(federation_of(seed, *changes, "run.engine=local")) for seed in (0, 1)]
    federations = [federation_of(seed, *changes, "run.engine=batched") for seed in (0, 1)]
    batched = [Trainer(f, engine=engine) for f, engine in zip(federations, engines_for(federations), strict=True)]
    seen: list[list[dict]] = [[], []]
    for trainers, entries in zip((local, batched), seen, strict=True):
        for trainer in trainers:
            trainer.callbacks = [Listener(entries)]
    expected = [trainer.run().to_dict() for trainer in local]
    results = [result.to_dict() for result in run_together(batched)]
    for got, want in zip(results, expected, strict=True):
        got.pop("seconds"), want.pop("seconds")
        assert_close_results(got, want)
    for one, two in zip(local, batched, strict=True):
        for a, b in zip(one.engine.learners, two.engine.learners, strict=True):
            torch.testing.assert_close(a.parameters, b.parameters, rtol=0, atol=1e-9)
    order = lambda entry: (entry["nodes"]["M0"]["validation_ACC"], entry["round"])  # noqa: E731
    for one, two in zip(sorted(seen[0], key=order), sorted(seen[1], key=order), strict=True):
        assert one["round"] == two["round"]
        for name, values in one["nodes"].items():
            assert values == pytest.approx(two["nodes"][name], rel=1e-6, abs=1e-9)


def test_splits_of_a_seed_share_views():
    changes = [["data.augment=all", f"data.splits={splits}"] for splits in ("independent", "aligned")]
    alone = [Trainer(federation_of(3, *own, "run.engine=batched")) for own in changes]
    expected = [outcome(trainer) for trainer in alone]
    federations = [federation_of(3, *own, "run.engine=batched") for own in changes]
    together = [Trainer(f, engine=engine) for f, engine in zip(federations, engines_for(federations), strict=True)]
    for result, want, one, two in zip(run_together(together), expected, together, alone, strict=True):
        assert_close_results({**result.to_dict(), "seconds": 0.0}, {**want, "seconds": 0.0})
        for a, b in zip(one.engine.learners, two.engine.learners, strict=True):
            torch.testing.assert_close(a.parameters, b.parameters, rtol=0, atol=1e-9)
    matrices = [want["matrix"] for want in expected]
    assert matrices[0] != matrices[1]


def test_models_that_cannot_be_stacked_are_named_with_the_reason(caplog):
    with caplog.at_level(logging.INFO, "fedh2l"):
        engines_for([federation_of(0, *BRANCHING, "run.engine=batched")])
    assert re.search(r"4 models of class Branching are run one after the other: \w+Error: .*item", caplog.text)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "branching"])
def test_recorded_rounds_are_as_rounds_that_are_run(variant, monkeypatch):
    """As on a GPU: rounds repeat what was recorded, and nothing that was made while recording is relied on."""
    changes = [*VARIANTS[variant], "run.rounds=24", "run.eval_every=8"]
    expected = [Trainer(federation_of(seed, *changes, "run.engine=local")) for seed in (0, 1)]
    monkeypatch.setattr("fedh2l.engines.batched.nodes.GraphRecorder", ImitatingRecorder)
    monkeypatch.setitem(COUNTS, "repeated", 0)
    federations = [federation_of(seed, *changes, "run.engine=batched") for seed in (0, 1)]
    recorded = [Trainer(f, engine=engine) for f, engine in zip(federations, engines_for(federations), strict=True)]
    for got, trainer in zip(run_together(recorded), expected, strict=True):
        result = got.to_dict()
        result.pop("seconds")
        assert_close_results(result, outcome(trainer))
    for one, two in zip(expected, recorded, strict=True):
        for a, b in zip(one.engine.learners, two.engine.learners, strict=True):
            torch.testing.assert_close(a.parameters, b.parameters, rtol=0, atol=1e-9)
    assert COUNTS["repeated"] >= 10


class Listener(Callback):
    def __init__(self, entries: list[dict]) -> None:
        self.entries = entries

    def on_evaluation(self, metrics):
        self.entries.append(metrics)


class Rounds(Callback):
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def on_round(self, round):
        self.seen.append(round)


def test_layers_that_cannot_be_run_as_one_are_run_in_turn():
    engine = engines_for([federation_of(0, *BRANCHING, "run.engine=batched")])[0]
    assert [group.network.stackable for group in engine.stacked.groups] == [False]
    engine = engines_for([federation_of(0, "run.engine=batched")])[0]
    assert [group.network.stackable for group in engine.stacked.groups] == [True]
    engine = engines_for([federation_of(0, *MIXED, "run.engine=batched")])[0]
    assert [len(group.members) for group in engine.stacked.groups] == [2, 1, 1]


@pytest.mark.parametrize("first", ["local", "batched"])
@pytest.mark.parametrize(
    "changes",
    [
        ["method.interval=3"],
        [PLUS, "method.interval=4", "method.replay=2"],
        ["method.name=fedavg", "method.interval=8"],
        ["method.name=fml", "method.interval=4"],
        ["method.name=fedgkt", "method.interval=4", "method.server_epochs=1", *DEEP],
    ],
)
def test_one_engine_goes_on_from_the_others_checkpoint(tmp_path, first, changes):
    second = {"local": "batched", "batched": "local"}[first]
    expected = outcome(Trainer(federation_of(0, *changes, "run.engine=local")))
    directory = RunDirectory.claim(tmp_path / "run", "x")
    begun = Trainer(federation_of(0, *changes, f"run.engine={first}"), directory)
    seen: list[int] = []
    begun.callbacks = [Rounds(seen)]
    begun.stop = lambda: bool(seen) and seen[-1] >= 13
    with pytest.raises(Interrupted):
        begun.run()
    resumed = Trainer(federation_of(0, *changes, f"run.engine={second}"), RunDirectory.open(tmp_path / "run"))
    assert resumed.resume()
    assert resumed.round == 13
    assert_close_results(outcome(resumed), expected)


def test_interrupting_several_saves_all_of_them(tmp_path):
    federations = [federation_of(seed, "run.engine=batched") for seed in (0, 1, 2)]
    trainers = [
        Trainer(f, RunDirectory.claim(tmp_path / str(i), "x"), engine=engine, stop=lambda: True)
        for i, (f, engine) in enumerate(zip(federations, engines_for(federations), strict=True))
    ]
    with pytest.raises(Interrupted):
        run_together(trainers)
    assert all(trainer.directory.checkpoints.newest() is not None for trainer in trainers)
    again = [federation_of(seed, "run.engine=batched") for seed in (0, 1, 2)]
    resumed = [
        Trainer(f, RunDirectory.open(tmp_path / str(i)), engine=engine)
        for i, (f, engine) in enumerate(zip(again, engines_for(again), strict=True))
    ]
    assert all(trainer.resume() for trainer in resumed)
    assert {trainer.round for trainer in resumed} == {1}
    for seed, result in enumerate(run_together(resumed)):
        got = result.to_dict()
        got.pop("seconds")
        assert_close_results(got, outcome(Trainer(federation_of(seed, "run.engine=local"))))


def test_a_node_that_diverges_is_named(federation):
    class Exploding(FedH2L):
        def local_step(self, node, round):
            if round == 7:
                node.parameters[2].fill_(float("nan"))
            super().local_step(node, round)

    fed = federation("run.engine=batched")
    object.__setattr__(fed, "method", Exploding())
    with pytest.raises(DivergedError, match="node 'M40', round 7: its local_loss is not finite"):
        Trainer(fed).run()


def test_an_unsound_message_is_named(federation):
    class Broken(FedH2L):
        def emit(self, node, round):
            message = super().emit(node, round)
            message.values[1] *= 2 if round == 3 else 1
            return message

    fed = federation("run.engine=batched")
    object.__setattr__(fed, "method", Broken())
    with pytest.raises(DivergedError, match="node 'M20', round 3: it sent rows that do not sum to 1"):
        Trainer(fed).run()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["method.topology=line"], "different numbers of teachers"),
        (["method.pairing=pairs", "data.angles=[0,20,40]", "nodes.0.model=mlp"], "different numbers of teachers"),
        (["run.batch_size=200"], "less private data than a batch"),
    ],
)
def test_what_cannot_be_run_as_one_is_refused_or_run_in_turn(changes, reason):
    changes = [c for c in changes if "nodes" not in c]
    base = [*TINY, "run.rounds=20"]
    with pytest.raises(ConfigError, match=reason):
        engines_for([load_config(None, [*base, *changes, "run.engine=batched"])[0].experiment()])


def test_experiments_share_one_stack():
    engines = engines_for([federation_of(seed, "run.engine=batched") for seed in (3, 4)])
    assert all(isinstance(engine, BatchedEngine) for engine in engines)
    assert engines[0].stacked is engines[1].stacked
    assert [len(group.members) for group in engines[0].stacked.groups] == [8]


@pytest.mark.parametrize("variant", ["peers", "fedavg-4", "mixed"])
@pytest.mark.parametrize("seeds", [[0], [0, 1]])
def test_more_nodes_than_are_stacked_at_once(variant, seeds, monkeypatch):
    """Nodes of one architecture in several stacks, asked about a few samples at a time, recorded as on a GPU."""
    monkeypatch.setattr("fedh2l.engines.batched.nodes.TOGETHER", 3)
    monkeypatch.setattr("fedh2l.engines.batched.nodes.EVALUATED", 21)
    changes = [*VARIANTS[variant], "run.rounds=16", "run.eval_every=8"]
    expected = [outcome(Trainer(federation_of(seed, *changes, "run.engine=local"))) for seed in seeds]
    monkeypatch.setattr("fedh2l.engines.batched.nodes.GraphRecorder", ImitatingRecorder)
    federations = [federation_of(seed, *changes, "run.engine=batched") for seed in seeds]
    batched = [Trainer(f, engine=engine) for f, engine in zip(federations, engines_for(federations), strict=True)]
    stacks = [len(group.members) for group in batched[0].engine.stacked.groups]
    assert variant == "mixed" or stacks == {1: [3, 1], 2: [3, 3, 2]}[len(seeds)]
    for got, want in zip(run_together(batched), expected, strict=True):
        result = got.to_dict()
        result.pop("seconds")
        assert_close_results(result, want)


@pytest.mark.parametrize("engine", ["local", "batched"])
def test_federations_that_were_made_apart_are_not_run_as_one(engine):
    apart = [Trainer(federation_of(seed, f"run.engine={engine}")) for seed in (0, 1)]
    with pytest.raises(ValueError, match="separate engines"):
        run_together(apart)
