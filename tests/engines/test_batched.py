"""Nodes run as one computation: which nodes are stacked, what is refused, and several experiments at once."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from test_conformance import AS_ONE, BRANCHING, MIXED

from conftest import TINY, close_results, outcome, seeded
from fedh2l.engines.batched.engine import BatchedEngine
from fedh2l.engines.choice import engines_for
from fedh2l.errors import ConfigError
from fedh2l.experiment.config import load_config
from fedh2l.runs.loop import run_together
from fedh2l.runs.trainer import Trainer
from imitation import ImitatingRecorder


def test_splits_of_a_seed_share_views():
    changes = [["data.augment=all", f"data.splits={splits}"] for splits in ("independent", "aligned")]
    alone = [Trainer(seeded(3, *own, "run.engine=batched")) for own in changes]
    expected = [outcome(trainer) for trainer in alone]
    federations = [seeded(3, *own, "run.engine=batched") for own in changes]
    together = [Trainer(f, engine=engine) for f, engine in zip(federations, engines_for(federations), strict=True)]
    for result, want, one, two in zip(run_together(together), expected, together, alone, strict=True):
        close_results({**result.to_dict(), "seconds": 0.0}, {**want, "seconds": 0.0})
        for a, b in zip(one.engine.learners, two.engine.learners, strict=True):
            torch.testing.assert_close(a.parameters, b.parameters, rtol=0, atol=1e-9)
    matrices = [want["matrix"] for want in expected]
    assert matrices[0] != matrices[1]


def test_models_that_cannot_be_stacked_are_named_with_the_reason(caplog):
    with caplog.at_level(logging.INFO, "fedh2l"):
        engines_for([seeded(0, *BRANCHING, "run.engine=batched")])
    assert re.search(r"4 models of class Branching are run one after the other: \w+Error: .*item", caplog.text)


def test_layers_that_cannot_be_run_as_one_are_run_in_turn():
    engine = engines_for([seeded(0, *BRANCHING, "run.engine=batched")])[0]
    assert [group.network.stackable for group in engine.stacked.groups] == [False]
    engine = engines_for([seeded(0, "run.engine=batched")])[0]
    assert [group.network.stackable for group in engine.stacked.groups] == [True]
    engine = engines_for([seeded(0, *MIXED, "run.engine=batched")])[0]
    assert [len(group.members) for group in engine.stacked.groups] == [2, 1, 1]


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
    engines = engines_for([seeded(seed, "run.engine=batched") for seed in (3, 4)])
    assert all(isinstance(engine, BatchedEngine) for engine in engines)
    assert engines[0].stacked is engines[1].stacked
    assert [len(group.members) for group in engines[0].stacked.groups] == [8]


@pytest.mark.parametrize("variant", ["peers", "fedavg-4", "mixed"])
@pytest.mark.parametrize("seeds", [[0], [0, 1]])
def test_more_nodes_than_are_stacked_at_once(variant, seeds, monkeypatch):
    """Nodes of one architecture in several stacks, asked about a few samples at a time, recorded as on a GPU."""
    monkeypatch.setattr("fedh2l.engines.batched.nodes.TOGETHER", 3)
    monkeypatch.setattr("fedh2l.engines.batched.groups.EVALUATED", 21)
    changes = [*AS_ONE[variant], "run.rounds=16", "run.eval_every=8"]
    expected = [outcome(Trainer(seeded(seed, *changes, "run.engine=local"))) for seed in seeds]
    monkeypatch.setattr("fedh2l.engines.batched.nodes.GraphRecorder", ImitatingRecorder)
    federations = [seeded(seed, *changes, "run.engine=batched") for seed in seeds]
    batched = [Trainer(f, engine=engine) for f, engine in zip(federations, engines_for(federations), strict=True)]
    stacks = [len(group.members) for group in batched[0].engine.stacked.groups]
    assert variant == "mixed" or stacks == {1: [3, 1], 2: [3, 3, 2]}[len(seeds)]
    for got, want in zip(run_together(batched), expected, strict=True):
        result = got.to_dict()
        result.pop("seconds")
        close_results(result, want)


@pytest.mark.parametrize("engine", ["local", "batched"])
def test_federations_that_were_made_apart_are_not_run_as_one(engine):
    apart = [Trainer(seeded(seed, f"run.engine={engine}")) for seed in (0, 1)]
    with pytest.raises(ValueError, match="separate engines"):
        run_together(apart)
