"""Nodes side by side in threads: where they are used, and what goes wrong in one of them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from conftest import LENETS, NOISY
from fedh2l.errors import RunError
from fedh2l.hardware import CORES, available_cores
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.runs.trainer import Trainer


class Watched(FedH2L):
    """Notes which threads nodes work in."""

    def local_step(self, node, round):
        SEEN.setdefault(round, set()).add(threading.get_ident())
        super().local_step(node, round)


SEEN: dict[int, set[int]] = {}


def run(federation, monkeypatch, cores: int, *changes: str) -> None:
    monkeypatch.setenv(CORES, str(cores))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    SEEN.clear()
    fed = federation("run.eval_every=5", *changes)
    if type(fed.method) is FedH2L:
        object.__setattr__(fed, "method", Watched(**fed.method.model_dump()))
    Trainer(fed).run()


def test_threads_are_used_where_nobody_draws(federation, monkeypatch):
    run(federation, monkeypatch, 1, *LENETS)
    assert all(len(threads) == 1 for threads in SEEN.values())
    run(federation, monkeypatch, 4, *LENETS)
    assert len(SEEN[1]) == 1  # to see whether anybody draws
    assert max(len(threads) for round, threads in SEEN.items() if round > 1) > 1
    run(federation, monkeypatch, 4, *NOISY)
    assert all(len(threads) == 1 for threads in SEEN.values())


class Moody(nn.Module):
    """Draws in some rounds only."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(784, num_classes)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = x.flatten(1)
        return self.layer(x + 0.01 * torch.rand_like(x) if self.calls > 30 else x)


def test_a_model_that_draws_now_and_then_is_noticed(federation, monkeypatch):
    changes = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=test_thread_pool:Moody", "model_args={}")]
    with pytest.raises(RunError, match=r"draws from torch's generator in some rounds only.*FEDH2L_CORES=1"):
        run(federation, monkeypatch, 4, *changes)
    run(federation, monkeypatch, 1, *changes)


def test_an_error_in_one_node_is_the_runs(federation, monkeypatch):
    class Failing(FedH2L):
        def local_step(self, node, round):
            if round == 4 and node.name == "M40":
                raise ZeroDivisionError("here")
            super().local_step(node, round)

    monkeypatch.setenv(CORES, "4")
    fed = federation()
    object.__setattr__(fed, "method", Failing())
    with pytest.raises(ZeroDivisionError, match="here"):
        Trainer(fed).run()


def test_cores_are_those_that_are_allowed(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.delenv(CORES, raising=False)
    assert available_cores() == 3
    for value, cores in (("2", 2), ("9", 3), ("0", 1), ("many", 3), ("", 3)):
        monkeypatch.setenv(CORES, value)
        assert available_cores() == cores
