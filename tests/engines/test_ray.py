"""The engine `ray`: what becomes of nodes that die, of clusters that are not there, and of benches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import ray
import torch
from torch import nn

import fedh2l
from conftest import LENETS, MLPS, TINY, Killer, blobs, left_behind, train
from fedh2l.bench.cells import Cell, Place, run_cells
from fedh2l.bench.cluster import OnRay
from fedh2l.engines.actor_group import patiently
from fedh2l.errors import ConfigError, RunError
from fedh2l.experiment.config import load_config
from fedh2l.experiment.settings import RaySettings
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.trainer import Interrupted, Trainer

FEW = "ray.actors=2"
pytestmark = pytest.mark.usefixtures("ray_cluster")


def pid(engine, place: int) -> int:
    return ray.get(engine._actors.actors[place].__ray_call__.remote(lambda _: os.getpid()))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(["optimizer.lr=0.02"], id="best models are from undone rounds"),
        pytest.param(
            ["method.name=fedgkt", "method.interval=4", *LENETS], id="a server has a network", marks=pytest.mark.slow
        ),
    ],
)
def test_without_a_directory_the_way_back_is_kept_in_memory(federation, changes):
    settings = ["run.rounds=50", "run.eval_every=5", "run.checkpoint_every=20", *changes]
    undisturbed = Trainer(federation(*settings, "run.engine=local")).run()
    trainer = Killer(pid, (38, 0), (46, 1)).on(federation(*settings, "run.engine=ray", FEW))
    result = trainer.run()
    assert not trainer.callbacks[0].when
    one, two = result.to_dict(), undisturbed.to_dict()
    one.pop("seconds"), two.pop("seconds")
    assert one == two


def test_a_node_that_is_gone_before_the_first_round(federation):
    undisturbed = Trainer(federation("run.engine=local")).run()
    trainer = Trainer(federation("run.engine=ray", FEW))
    os.kill(pid(trainer.engine, 1), signal.SIGKILL)
    assert trainer.run().matrix == undisturbed.matrix


def test_a_model_that_cannot_be_sent():
    lock = threading.Lock()
    nodes = [fedh2l.Node(n, lambda: nn.Linear(2, 3 + 0 * bool(lock)), blobs(n)) for n in "ab"]
    with pytest.raises(ConfigError, match=r"node 'a' cannot be sent to another process: .*lock"):
        fedh2l.train(nodes, rounds=2, engine="ray")


def test_a_node_that_keeps_dying_ends_the_run(federation):
    trainer = Killer(pid, (3, 0), (15, 0)).on(federation("run.engine=ray", FEW, "ray.restarts=1"))
    with pytest.raises(RunError, match=r"node 'M0', node 'M20' died, and nodes were restarted 1 times before"):
        trainer.run()


def test_an_extended_run_is_the_longer_run(federation, tmp_path):
    whole = train(federation("run.rounds=18", "run.engine=local"), tmp_path / "whole")
    train(federation("run.rounds=13", "run.engine=ray", FEW), tmp_path / "parts")
    longer = Trainer(federation("run.rounds=18", "run.engine=ray", FEW), RunDirectory.open(tmp_path / "parts"))
    assert longer.resume()
    longer.run()
    assert left_behind(tmp_path / "parts") == whole


def test_threads_are_what_the_run_says(federation):
    trainer = Trainer(federation("run.engine=ray", "ray.actors=1", "ray.num_cpus=1.5"))
    (actor,) = trainer.engine._actors.actors
    assert ray.get(actor.__ray_call__.remote(lambda _: torch.get_num_threads())) == 1
    assert ray.get(actor.__ray_call__.remote(lambda _: os.environ["FEDH2L_CORES"])) == "6"
    trainer.engine.close()


def test_more_than_the_cluster_has(federation):
    with pytest.raises(RunError, match=r"[1-4] of 4 actors found no place .* 8 CPU, 0 GPU.*nodes\.\*\.resources"):
        Trainer(federation("run.engine=ray", "nodes.2.resources={num_gpus=0.5}", "ray.patience=6"))
    with pytest.raises(ConfigError, match=r"resources of node 'M0': .*whole numbers"):
        Trainer(federation("run.engine=ray", "nodes.0.resources={num_gpus=1.5}"))


def test_a_cluster_that_is_not_there(process):
    done = process("run", "--engine", "ray", "--set", "ray.address=127.0.0.1:1", "--out", "x", timeout=60)
    assert done.returncode == 2
    assert "cannot reach Ray at '127.0.0.1:1': " in done.stderr


def test_a_machine_too_busy_for_ray(caplog):
    late = iter([Exception("timed out during startup"), Exception("timed out during startup")])

    def start() -> str:
        for error in late:
            raise error
        return "started"

    assert patiently(start) == "started"
    assert caplog.text.count("it is tried again") == 2


def test_a_machine_where_ray_cannot_start(process, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "no" / "such"))
    done = process("run", "--engine", "ray", "--out", "x", timeout=120)
    assert done.returncode == 2, done.stderr
    assert "cannot reach Ray on this machine: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_device_is_asked_for_by_node():
    with pytest.raises(ConfigError, match=r"run\.device = 'cuda'.*num_gpus"):
        load_config(None, ["run.engine=ray", "run.device=cuda"])


def test_without_ray_the_message_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None; from fedh2l.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "run", "--engine", "ray"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'fedh2l[ray]'" in done.stderr


@pytest.mark.slow
def test_a_bench_on_the_cluster_is_the_bench_here(process, tmp_path):
    settings = ["bench", "heterogeneous-mnist", "--methods", "fedh2l,aggregation", "--seeds", "2", "--rounds", "60"]
    settings += ["--set", "data.per_class=20"]
    assert process(*settings, "--device", "cpu", "--out", "here").returncode == 0
    done = process(*settings, "--engine", "ray", "--out", "there")
    assert done.returncode == 0, done.stderr
    one, two = ((tmp_path / folder / "heterogeneous-mnist.csv").read_text() for folder in ("here", "there"))
    assert one == two


def test_a_run_of_a_bench_that_is_stopped_keeps_what_it_saved_and_goes_on(tmp_path):
    """Stopped here, sent to the cluster after all were asked to stop, sent again: it ends as if nothing had been."""
    cell = Cell("fedh2l", (*TINY, *MLPS, "run.rounds=1000", "run.checkpoint_every=0"), 0)
    rounds = iter(range(100))
    with pytest.raises(Interrupted):
        run_cells([cell], Place(tmp_path, "cpu", Callback, lambda: next(rounds) > 11))
    saved = {path: path.read_bytes() for path in cell.path(tmp_path).glob("checkpoints/*")}
    assert saved
    for stop in (True, False):
        workers = OnRay(tmp_path, "cpu", RaySettings())
        if stop:
            workers.stop()
        task = workers.submit([cell])
        assert workers.wait([task], 180) == [task]
        assert workers.outcome(task, [cell]) == {}
        workers.close()
        assert (cell.result(tmp_path) is None) == stop
        found = {path: path.read_bytes() for path in cell.path(tmp_path).glob("checkpoints/*")}
        assert not stop or saved.items() <= found.items()  # word to stop may come after another round
    run_cells([cell], Place(tmp_path / "whole", "cpu", Callback, lambda: False))
    assert cell.result(tmp_path)["matrix"] == cell.result(tmp_path / "whole")["matrix"]
    assert not (cell.path(tmp_path) / "checkpoints").exists()
