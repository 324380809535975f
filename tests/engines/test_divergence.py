"""Training that diverges ends with the node, the round and the reason, on every engine."""

from __future__ import annotations

import re

import pytest

import fedh2l
from conftest import MLPS, TINY, blobs, tiny_net
from fedh2l.errors import DivergedError
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.runs.trainer import Trainer

ENGINES = ["local", "batched", "processes", "ray"]


@pytest.fixture
def diverge(request, federation):
    """What is said of a federation that diverges on an engine."""

    def run(engine: str, *changes: str) -> str:
        if engine == "ray":
            request.getfixturevalue("ray_cluster")
            changes = (*changes, "ray.actors=2")
        with pytest.raises(DivergedError) as caught:
            Trainer(federation(*changes, f"run.engine={engine}")).run()
        return str(caught.value)

    return run


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rate_that_is_too_high(diverge, engine):
    said = diverge(engine, "optimizer.name=sgd", "optimizer.lr=1e30")
    assert "node 'M0', round 1: it sent values that are not finite" in said
    assert "A lower optimizer.lr may help" in said
    assert said == diverge("local", "optimizer.name=sgd", "optimizer.lr=1e30")


class Exploding(FedH2L):
    def local_step(self, node, round):
        if round == 7:
            if node.parameters.dim() == 2:  # of all nodes, run as one
                node.parameters[2].fill_(float("nan"))
            elif node.name == "M40":
                node.parameters.fill_(float("nan"))
        super().local_step(node, round)


@pytest.mark.parametrize("engine", ENGINES[:3])
def test_weights_that_are_not_finite(diverge, engine):
    said = diverge(engine, "method.name=test_divergence:Exploding", "run.rounds=50", "run.eval_every=25")
    assert "node 'M40', round 7: its local_loss is not finite" in said
    assert "no checkpoint" in said


class Unsound(FedH2L):
    def emit(self, node, round):
        message = super().emit(node, round)
        if round == 3:
            rows = message.values[1] if node.parameters.dim() == 2 else message.values
            if node.parameters.dim() == 2 or node.name == "M20":
                rows *= 2
        return message


@pytest.mark.parametrize("engine", ENGINES[:3])
def test_rows_that_are_no_distribution(diverge, engine):
    said = diverge(engine, "method.name=test_divergence:Unsound")
    assert "node 'M20', round 3: it sent rows that do not sum to 1" in said


def given() -> list[fedh2l.Node]:
    return [fedh2l.Node(f"n{i}", tiny_net(), blobs(f"n{i}", shift=0.3 * i, seed=i)) for i in range(3)]


def test_the_last_good_checkpoint_is_named(tmp_path):
    class Late(FedH2L):
        def local_step(self, node, round):
            if node.name == "n2" and round == 33:
                node.parameters.mul_(float("inf"))
            super().local_step(node, round)

    with pytest.raises(DivergedError, match=r"node 'n2', round 33: .*round-000000030\.ckpt"):
        fedh2l.train(given(), Late(), rounds=50, eval_every=25, checkpoint_every=10, out=tmp_path / "run")


def test_weights_that_are_spoiled_are_not_called_a_good_checkpoint(tmp_path):
    class Spoiled(FedH2L):
        def receive(self, node, inbox, round):
            super().receive(node, inbox, round)
            if node.name == "n0" and round == 20:
                node.parameters.fill_(float("nan"))  # after every loss of the round was computed

    with pytest.raises(DivergedError, match=r"node 'n0', round 20: its parameters are not finite.*round-000000010"):
        fedh2l.train(given(), Spoiled(), rounds=20, eval_every=20, checkpoint_every=10, out=tmp_path / "run")


def test_from_the_command_line(process):
    settings = [part for change in [*TINY, *MLPS] for part in ("--set", change)]
    done = process("run", "--rounds", 60, *settings, "--set", "optimizer.name=sgd", "--set", "optimizer.lr=1e30")
    assert done.returncode == 1
    assert re.search(r"node 'M\d+', round \d+", done.stderr)
    assert "Traceback" not in done.stderr
