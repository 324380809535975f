"""Every engine ends where nodes that run one after the other do.

Processes, threads, a Ray cluster and real peers give the same bits. Nodes that are run as one computation add numbers
in another order: in float64 they differ from the others in the last digits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fedh2l
from conftest import LENETS, MLPS, NOISY, TINY, blobs, close_results, outcome, seeded, train
from fedh2l.engines.choice import engines_for
from fedh2l.experiment.config import load_config
from fedh2l.experiment.experiment import Experiment
from fedh2l.hardware import CORES
from fedh2l.methods.registry import METHODS
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.loop import run_together
from fedh2l.runs.trainer import Trainer
from imitation import COUNTS, ImitatingRecorder

MIXED = [
    *(f"nodes.{i}.model_args={{}}" for i in range(4)),
    "nodes.0.model=cnn",
    "nodes.2.model=cnn",
    "nodes.3.model=lenet",
]
NORMED = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=test_conformance:normed", "model_args={}")]
BRANCHING = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=test_conformance:Branching", "model_args={}")]
DEEP = [f"nodes.{i}.model_args.hidden=[12,9]" for i in range(4)]
PLUS = "method.name=fedh2l-plus"
UNLABELLED = ["data.public_labels=false", "method.ce_weight=0", "method.local_data=private"]

AS_ONE = {
    "fedh2l": [],
    "interval": ["method.interval=3"],
    "difference": ["method.interval=3", "method.local_gradient=difference"],
    "pcgrad": ["method.project=pcgrad"],
    "replay": [PLUS, "method.interval=4", "method.replay=2"],
    "replay-norm": [PLUS, "method.interval=3", "method.replay=3", *NORMED],
    "unlabelled": [PLUS, "data.public_labels=false", "method.encoding=int4"],
    "unlabelled-alone": UNLABELLED,
    "unlabelled-int8": [*UNLABELLED, "method.encoding=int8"],
    "unlabelled-3": [*UNLABELLED, "method.interval=3"],
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


FIVE = ["data.angles=[0,20,40,60,80]", "nodes.4.model=mlp", "nodes.4.model_args.hidden=[12]"]
VARIANTS = {
    "fedh2l": [],
    "line": ["method.interval=7", "method.topology=line", "run.dtype=float64"],
    "ring": ["method.interval=3", "method.topology=ring"],
    "pairs": ["method.pairing=pairs"],
    "pairs-5": ["method.pairing=pairs", "run.threads=2", *FIVE],
    "peers": ["method.peers_per_round=1"],
    "peers-lenet": ["method.peers_per_round=1", "nodes.0.model=lenet", "nodes.0.model_args={}"],
    "lenet": LENETS,
    "noisy": NOISY,
    "int8": ["method.encoding=int8", "method.temperature=2", "run.ema_decay=0.9"],
    "unlabelled": UNLABELLED,
    "unlabelled-int8": [*UNLABELLED, "method.encoding=int8"],
    "unlabelled-3": [*UNLABELLED, "method.interval=3"],
    "plus": [PLUS],
    "plus-unlabelled": [PLUS, "data.public_labels=false"],
    "plus-peers": [PLUS, "method.peers_per_round=1", "method.interval=2", "run.ema_decay=0.9"],
    "plus-replay": [PLUS, "method.public_batch_size=8", "method.interval=4", "method.replay=2"],
    "fedavg": ["method.name=fedavg", "method.interval=4"],
    "fedprox": ["method.name=fedprox", "method.interval=4"],
    "fedmd": ["method.name=fedmd"],
    "fedmd-5": ["method.name=fedmd", *FIVE],
    "agnostic": ["method.name=agnostic", "method.interval=3", "run.threads=2"],
    "agnostic-4": ["method.name=agnostic", "method.interval=4"],
    "fml": ["method.name=fml", "method.interval=4"],
    "fedgkt": ["method.name=fedgkt", "method.interval=4", "method.server_epochs=1", *LENETS],
    "aggregation": ["method.name=aggregation"],
    "independent": ["method.name=independent"],
}
CASES = {
    "threads": ["fedh2l", "lenet", "ring", "pairs", "fedavg", "fedmd", "fml", "fedgkt", "noisy"],
    "processes": [
        "fedh2l", "plus-peers", "fedavg", "fedmd-5", "agnostic", "unlabelled", "unlabelled-int8", "unlabelled-3",
    ],
    "ray": [
        "fedh2l", "fedavg", "peers",
        "line", "pairs-5", "plus", "fedprox", "fedmd", "agnostic-4", "fml", "fedgkt", "aggregation", "independent",
    ],
    "rehearsal": ["fedh2l", "plus-unlabelled", "plus", "line", "peers-lenet", "plus-replay", "int8"],
}  # fmt: skip
FAST = {"threads": 9, "processes": 8, "ray": 3, "rehearsal": 2}
"""How many of the cases of each engine are not slow."""


def made(*changes: str) -> Experiment:
    return load_config(None, [*TINY, *MLPS, "run.rounds=25", *changes])[0].experiment()


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory) -> Callable[[str], Any]:
    """What nodes leave behind that run one after the other; each variant is trained once."""
    found: dict[str, Any] = {}

    def of(variant: str) -> Any:
        if variant not in found:
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv(CORES, "1")
                folder = tmp_path_factory.mktemp(variant) / "run"
                found[variant] = train(made(*VARIANTS[variant], "run.engine=local"), folder)
        return found[variant]

    return of


@pytest.fixture
def on_engine(request, monkeypatch, tmp_path) -> Callable[..., Any]:
    """What nodes leave behind on an engine."""

    def run(engine: str, *changes: str) -> Any:
        if engine == "rehearsal":
            return rehearsed(tmp_path / "there", *changes)
        if engine == "ray":
            request.getfixturevalue("ray_cluster")
            changes = (*changes, f"ray.actors={3 if '[0,20,40,60,80]' in str(changes) else 2}")
        if engine == "threads":
            monkeypatch.setenv(CORES, "4")
            monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
        name = "local" if engine == "threads" else engine
        return train(made(*changes, f"run.engine={name}"), tmp_path / "there")

    return run


def rehearsed(folder, *changes: str) -> Any:
    """The models of last rounds and the result; when its metrics are written is up to a peer."""
    from town import rehearsal

    there = rehearsal(folder, "run.rounds=25", *changes)
    result = json.loads(json.dumps(there.run().to_dict()))
    del result["seconds"]
    runs = {node["name"]: RunDirectory(folder / node["name"] / "run") for node in result["nodes"]}
    return {f"{name}-last.safetensors": run.model_path(name, "last").read_bytes() for name, run in runs.items()}, result


@pytest.mark.parametrize(
    ("engine", "variant"),
    [
        pytest.param(engine, variant, marks=[] if place < FAST[engine] else pytest.mark.slow)
        for engine, variants in CASES.items()
        for place, variant in enumerate(variants)
    ],
)
def test_the_same_bits(engine, variant, in_turn, on_engine):
    models, metrics, result = in_turn(variant)
    there = on_engine(engine, *VARIANTS[variant])
    if engine == "rehearsal":
        assert there == ({name: data for name, data in models.items() if "-last" in name}, result)
    else:
        assert there == (models, metrics, result)
    if variant.startswith("unlabelled"):
        assert "ce" not in metrics[0]["nodes"]["M0"]


def test_every_method_is_compared():
    compared = {name for engine in ("processes", "ray") for name in CASES[engine]}
    assert {variant.partition("-")[0].replace("plus", "fedh2l-plus") for variant in compared} >= set(METHODS)


class Noisy(nn.Sequential):
    """Everything that is stateful or random: batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 3))


@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_modules_that_are_given_have_learned_the_same(engine, request):
    if engine == "ray":
        request.getfixturevalue("ray_cluster")
    learned = []
    for name in ("local", engine):
        torch.manual_seed(3)
        modules = [Noisy(), Noisy(), nn.Linear(2, 3)]
        nodes = [
            fedh2l.Node(n, m, blobs(n, i / 3, seed=i)) for i, (n, m) in enumerate(zip("abc", modules, strict=True))
        ]
        result = fedh2l.train(nodes, rounds=12, device="auto" if name == "ray" else "cpu", engine=name)
        learned.append((result.matrix, [m.state_dict() for m in modules]))
    (matrix, here), (other, there) = learned
    assert matrix == other
    assert all(torch.equal(a[key], b[key]) for a, b in zip(here, there, strict=True) for key in a)


class Listener(Callback):
    def __init__(self) -> None:
        self.entries: list[dict] = []

    def on_evaluation(self, metrics):
        self.entries.append(metrics)


SHORT = ["run.rounds=24", "run.eval_every=8"]


@pytest.fixture(scope="module")
def seeds_in_turn() -> Callable[[str], list[tuple[dict, list[torch.Tensor], list[dict]]]]:
    """For two seeds: the result, the parameters and the evaluations of nodes one after the other; trained once."""
    found: dict[str, list[tuple[dict, list[torch.Tensor], list[dict]]]] = {}

    def of(variant: str):
        if variant not in found:
            found[variant] = []
            for seed in (0, 1):
                listener = Listener()
                trainer = Trainer(seeded(seed, *AS_ONE[variant], *SHORT, "run.engine=local"), None, [listener])
                result = outcome(trainer)
                vectors = [learner.parameters.clone() for learner in trainer.engine.learners]
                found[variant].append((result, vectors, listener.entries))
        return found[variant]

    return of


def check_as_one(variant: str, expected) -> None:
    experiments = [seeded(seed, *AS_ONE[variant], *SHORT, "run.engine=batched") for seed in (0, 1)]
    listeners = [Listener(), Listener()]
    trainers = [
        Trainer(experiment, None, [listener], engine=engine)
        for experiment, listener, engine in zip(experiments, listeners, engines_for(experiments), strict=True)
    ]
    results = [result.to_dict() for result in run_together(trainers)]
    for trainer, listener, got, (want, vectors, entries) in zip(trainers, listeners, results, expected, strict=True):
        got.pop("seconds")
        close_results(got, want)
        for learner, vector in zip(trainer.engine.learners, vectors, strict=True):
            torch.testing.assert_close(learner.parameters, vector, rtol=0, atol=1e-9)
        for one, two in zip(listener.entries, entries, strict=True):
            assert one["round"] == two["round"]
            for name, values in one["nodes"].items():
                assert values == pytest.approx(two["nodes"][name], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("variant", AS_ONE)
def test_as_one_is_as_one_by_one(variant, seeds_in_turn):
    check_as_one(variant, seeds_in_turn(variant))


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "fedgkt-lenet" else ())
        for name in AS_ONE
        if name != "branching"
    ],
)
def test_recorded_rounds_are_as_rounds_that_are_run(variant, seeds_in_turn, monkeypatch):
    """As on a GPU: rounds repeat what was recorded, and nothing that was made while recording is relied on."""
    expected = seeds_in_turn(variant)
    monkeypatch.setattr("fedh2l.engines.batched.nodes.GraphRecorder", ImitatingRecorder)
    monkeypatch.setitem(COUNTS, "repeated", 0)
    check_as_one(variant, expected)
    assert COUNTS["repeated"] >= 10
