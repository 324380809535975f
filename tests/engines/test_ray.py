"""The engine `ray`: the same bits as `local`, wherever nodes are, and also if they die on the way."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import ray
import torch
from torch import nn

import fedh2l
from conftest import MLPS, TINY, Killer, blobs, left_behind, train
from fedh2l.bench.cells import Cell, Place, run_cells
from fedh2l.bench.cluster import OnRay
from fedh2l.engines.actor_group import patiently
from fedh2l.errors import ConfigError, DivergedError, RunError
from fedh2l.experiment.config import load_config
from fedh2l.experiment.settings import RaySettings
from fedh2l.methods.registry import METHODS
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.trainer import Interrupted, Trainer

FEW = "ray.actors=2"
LENETS = [f"nodes.{i}.{change}" for i in range(4) for change in ("model=lenet", "model_args={}")]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One cluster for all tests; the engine uses what is there."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    some = {"num_cpus": 8, "object_store_memory": 500_000_000}
    patiently(lambda: ray.init(address="local", include_dashboard=False, log_to_driver=False, **some))
    yield
    ray.shutdown()


def pid(engine, place: int) -> int:
    return ray.get(engine._actors.actors[place].__ray_call__.remote(lambda _: os.getpid()))


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[] if name in ("fedh2l", "fedavg") else pytest.mark.slow) for name in METHODS],
)
def test_the_same_bits_as_in_one_process(federation, tmp_path, method):
    changes = [f"method.name={method}", "run.rounds=25"]
    if method == "fedgkt":
        changes += LENETS
    if "interval" in METHODS[method].model_fields and method != "fedh2l":
        changes.append("method.interval=4")
    here = train(federation(*changes, "run.engine=local"), tmp_path / "here")
    there = train(federation(*changes, "run.engine=ray", FEW), tmp_path / "there")
    assert here == there


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(["method.interval=7", "method.topology=line", "run.dtype=float64"], marks=pytest.mark.slow),
        pytest.param(
            ["method.pairing=pairs", "data.angles=[0,20,40,60,80]", "ray.actors=3", "run.threads=2"],
            marks=pytest.mark.slow,
        ),
        ["method.peers_per_round=1"],
    ],
)
def test_whoever_hears_whom_and_however_nodes_are_dealt(tmp_path, changes):
    tiny = ["data.per_class=20", "run.eval_every=10", "run.batch_size=8", "run.rounds=24"]

    def made(engine):
        return load_config(None, [*tiny, *changes, "run.device=auto", f"run.engine={engine}"])[0].experiment()

    assert train(made("local"), tmp_path / "here") == train(made("ray"), tmp_path / "there")


class Noisy(nn.Sequential):
    """Everything that is stateful or random: batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 3))


def test_modules_that_are_given_have_learned_the_same():
    learned = []
    for engine in ("local", "ray"):
        torch.manual_seed(3)
        modules = [Noisy(), Noisy(), nn.Linear(2, 3)]
        nodes = [
            fedh2l.Node(n, m, blobs(n, i / 3, seed=i)) for i, (n, m) in enumerate(zip("abc", modules, strict=True))
        ]
        result = fedh2l.train(nodes, rounds=12, device="cpu" if engine == "local" else "auto", engine=engine)
        learned.append((result.matrix, [m.state_dict() for m in modules]))
    (matrix, here), (other, there) = learned
    assert matrix == other
    assert all(torch.equal(a[key], b[key]) for a, b in zip(here, there, strict=True) for key in a)


@pytest.mark.parametrize(
    "when",
    [
        pytest.param([(3, 0)], id="at once", marks=pytest.mark.slow),
        pytest.param([(23, 1)], id="late"),
        pytest.param([(12, 0), (31, 1)], id="twice", marks=pytest.mark.slow),
    ],
)
def test_a_node_that_dies_changes_nothing(federation, tmp_path, caplog, when):
    changes = ["run.rounds=40", "run.checkpoint_every=20"]
    undisturbed = train(federation(*changes, "run.engine=local"), tmp_path / "here")
    trainer = Killer(pid, *when).on(federation(*changes, "run.engine=ray", FEW))
    trainer.directory = RunDirectory.claim(tmp_path / "there", "x")
    with caplog.at_level(logging.WARNING):
        trainer.run()
    assert left_behind(tmp_path / "there") == undisturbed
    told = re.findall(
        r"node '(M\d+)' and node '(M\d+)' died after round \d+; all nodes go on from round (\d+)", caplog.text
    )
    assert len(told) == len(when)
    assert all(int(start) <= round // 10 * 10 for (_, _, start), (round, _) in zip(told, when, strict=True))


@pytest.mark.slow
def test_a_server_and_its_memory_go_back_too(federation, tmp_path):
    changes = ["method.name=agnostic", "method.interval=3", "run.rounds=30", "run.checkpoint_every=20"]
    undisturbed = train(federation(*changes, "run.engine=local"), tmp_path / "here")
    trainer = Killer(pid, (24, 1)).on(federation(*changes, "run.engine=ray", FEW))
    trainer.directory = RunDirectory.claim(tmp_path / "there", "x")
    trainer.run()
    assert left_behind(tmp_path / "there") == undisturbed


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


def test_from_python_a_run_goes_on_on_another_engine(tmp_path):
    def go(engine, rounds_until=None, **more):
        nodes = [fedh2l.Node(n, nn.Linear(2, 3), blobs(n, i)) for i, n in enumerate("ab")]
        torch.manual_seed(0)
        for node in nodes:
            node.model.reset_parameters()
        stop = KeyboardInterrupter(rounds_until) if rounds_until else ()
        return fedh2l.train(nodes, rounds=20, engine=engine, eval_every=5, checkpoint_every=5, callbacks=stop, **more)

    whole = go("local")
    with pytest.raises(KeyboardInterrupt):
        go("ray", 12, out=tmp_path / "run", ray=fedh2l.RaySettings(actors=1))
    assert go("local", out=tmp_path / "run", resume=True).matrix == whole.matrix


class KeyboardInterrupter(Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_round(self, round: int) -> None:
        if round == self.round:
            raise KeyboardInterrupt


def test_a_node_that_keeps_dying_ends_the_run(federation):
    trainer = Killer(pid, (3, 0), (15, 0)).on(federation("run.engine=ray", FEW, "ray.restarts=1"))
    with pytest.raises(RunError, match=r"node 'M0', node 'M20' died, and nodes were restarted 1 times before"):
        trainer.run()


@pytest.mark.slow
@pytest.mark.parametrize("engines", [("ray", "local"), ("local", "ray")])
def test_either_engine_goes_on_from_the_others_checkpoint(federation, tmp_path, engines):
    changes = ["run.rounds=30", "run.checkpoint_every=20"]
    whole = train(federation(*changes, "run.engine=local"), tmp_path / "whole")
    first, second = (federation(*changes, f"run.engine={engine}", FEW) for engine in engines)
    trainer = Trainer(first, RunDirectory.claim(tmp_path / "parts", "x"))
    trainer.stop = lambda: trainer.round >= 10
    with pytest.raises(Interrupted):
        trainer.run()
    again = Trainer(second, RunDirectory.open(tmp_path / "parts"))
    assert again.resume()
    again.run()
    assert left_behind(tmp_path / "parts") == whole


def test_an_extended_run_is_the_longer_run(federation, tmp_path):
    whole = train(federation("run.rounds=18", "run.engine=local"), tmp_path / "whole")
    train(federation("run.rounds=13", "run.engine=ray", FEW), tmp_path / "parts")
    longer = Trainer(federation("run.rounds=18", "run.engine=ray", FEW), RunDirectory.open(tmp_path / "parts"))
    assert longer.resume()
    longer.run()
    assert left_behind(tmp_path / "parts") == whole


def test_what_goes_wrong_at_a_node_is_told_as_ever(federation):
    said = []
    for engine in ("local", "ray"):
        with pytest.raises(DivergedError) as caught:
            Trainer(federation("optimizer.name=sgd", "optimizer.lr=1e30", f"run.engine={engine}", FEW)).run()
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "node 'M0', round 1: it sent values that are not finite" in said[0]


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
def test_from_the_command_line_stopped_and_resumed(process, tmp_path):
    """As a user would: Ray started for the run, Ctrl-C for the whole process group, resumed on another engine."""
    settings = ["--rounds", "400", "--set", "data.per_class=20", "--set", "run.eval_every=20"]
    whole = process("run", *settings, "--out", "whole", "--json")
    command = [sys.executable, "-m", "fedh2l", "run", "--engine", "ray", *settings, "--out", "parts"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as run:
        for line in run.stderr:
            if "round 40:" in line:
                os.killpg(run.pid, signal.SIGINT)
                break
        rest = run.stderr.read()
    assert run.returncode == 130, rest
    assert "which is saved" in rest
    done = process("run", "--resume", "parts", "--json")
    assert done.returncode == 0, done.stderr
    one, two = json.loads(whole.stdout), json.loads(done.stdout)
    assert one["matrix"] == two["matrix"]
    assert one["bytes"] == two["bytes"]


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
    cell = Cell("fedh2l", (*TINY, *MLPS, "run.rounds=40"), 0)
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
