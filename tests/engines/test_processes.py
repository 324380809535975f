"""Nodes in processes of one machine: when they are used, and that no process outlives a run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch import nn

import fedh2l
from conftest import MLPS, ROOT, TINY, Killer, blobs
from fedh2l.engines import choice, processes
from fedh2l.engines.local import LocalEngine
from fedh2l.engines.processes import ProcessEngine
from fedh2l.errors import ConfigError, RunError
from fedh2l.runs.trainer import Trainer

APART, TOGETHER = "run.engine=processes", "run.engine=local"


def pid(engine: ProcessEngine, place: int) -> int:
    return engine._workers[place].pid


def test_a_process_that_keeps_dying_ends_the_run(federation, monkeypatch):
    monkeypatch.setattr(processes, "RESTARTS", 1)
    trainer = Killer(pid, (3, 0), (4, 1)).on(federation(APART))
    with pytest.raises(RunError, match="died 2 times; is there enough memory"):
        trainer.run()


class Failing(nn.Linear):
    """A user's model with a mistake in it that only training shows."""

    def forward(self, x):
        if self.training and x.shape[0] == 32:
            raise ValueError("no thirty-two")
        return super().forward(x)


def test_what_a_users_model_raises_is_told_with_its_traceback():
    nodes = [fedh2l.Node(name, Failing(2, 3), blobs(name)) for name in "ab"]
    with pytest.raises(RunError, match=r"ValueError: no thirty-two[\s\S]*test_processes.py"):
        fedh2l.train(nodes, rounds=3, engine="processes")


def on_many_cores(monkeypatch) -> None:
    monkeypatch.setattr(choice, "available_cores", lambda: 8)
    monkeypatch.setattr(choice, "LONG", 20)


def test_where_there_are_cores_and_work_processes_are_used(federation, monkeypatch):
    on_many_cores(monkeypatch)
    for changes, kind in (
        ([], ProcessEngine),
        (["run.threads=2"], ProcessEngine),
        (["run.threads=4"], LocalEngine),
        (["run.rounds=19"], LocalEngine),
        ([TOGETHER], LocalEngine),
    ):
        engine = Trainer(federation(*changes)).engine
        assert type(engine) is kind, changes
        engine.close()


class Locked(nn.Linear):
    """A model with something in it that has no meaning in another process."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.lock = threading.Lock()


def test_what_cannot_be_sent_stays_here(monkeypatch, caplog):
    on_many_cores(monkeypatch)
    nodes = [fedh2l.Node(name, Locked(), blobs(name)) for name in "abc"]
    with pytest.raises(
        ConfigError, match=r"run.engine = 'processes': nodes cannot be sent to a process: cannot pickle"
    ):
        fedh2l.train(nodes, rounds=20, engine="processes")
    with caplog.at_level(logging.INFO, "fedh2l"):
        fedh2l.train(nodes, rounds=20, device="cpu")
    assert "nodes run in threads, because they cannot be sent to a process: cannot pickle" in caplog.text


def test_what_a_process_cannot_read_stays_here(monkeypatch, tmp_path):
    """A class of the script itself, which another process does not know."""
    (tmp_path / "script.py").write_text(SCRIPT)
    search = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search)}
    for engine, said in (("auto", "LocalEngine"), ("processes", "nodes cannot be sent to a process: AttributeError")):
        run = subprocess.run(
            [sys.executable, "script.py", engine], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert said in run.stdout + run.stderr, run.stderr


SCRIPT = """
import sys
import fedh2l
from conftest import blobs
from torch import nn
from fedh2l.engines import choice
choice.available_cores, choice.LONG = lambda: 8, 1
class Own(nn.Linear):
    pass
nodes = [fedh2l.Node(name, Own(2, 3), blobs(name)) for name in "abc"]
from fedh2l.engines import local
before = local.LocalEngine.__init__
def told(self, *arguments):
    print("LocalEngine")
    before(self, *arguments)
local.LocalEngine.__init__ = told
fedh2l.train(nodes, rounds=5, device="cpu", engine=sys.argv[1])
"""


def test_a_run_that_is_killed_leaves_no_process_behind(tmp_path):
    command = [sys.executable, "-m", "fedh2l", "run", "--rounds", "100000"]
    for change in (*TINY, *MLPS, APART, "run.checkpoint_every=0"):
        command += ["--set", change]
    run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    if not children.parent.parent.exists():
        pytest.skip("processes are listed under /proc on Linux only")
    workers: list[str] = []
    while len(workers) < 2 or not list(tmp_path.glob("runs/*/metrics.jsonl")):
        assert run.poll() is None
        workers = children.read_text().split()
        time.sleep(0.1)
    run.kill()
    run.wait()
    for _ in range(100):
        left = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
        if not left:
            return
        time.sleep(0.1)
    pytest.fail(f"processes {left} outlived the run")


@pytest.mark.parametrize("how", ["python", "shell"])
def test_a_refused_directory_leaves_no_process_behind(how, tmp_path, invoke):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    if not children.exists():
        pytest.skip("processes are listed under /proc on Linux only")
    before = children.read_text()
    if how == "python":
        nodes = [fedh2l.Node(name, nn.Linear(2, 3), blobs(name)) for name in "ab"]
        with pytest.raises(RunError, match="is not empty"):
            fedh2l.train(nodes, rounds=3, engine="processes", out=tmp_path / "taken")
    else:
        settings = [word for change in (*TINY, *MLPS, APART) for word in ("--set", change)]
        code, _, errors = invoke("run", *settings, "--out", tmp_path / "taken")
        assert (code, "is not empty" in errors) == (2, True)
    assert children.read_text() == before
