"""A run that is stopped or killed, and goes on, ends as one that was left alone, on every engine and on another."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedh2l
from conftest import MLPS, TINY, Killer, blobs, close_results, left_behind, outcome, seeded, tiny_net, train
from fedh2l.engines.choice import engines_for
from fedh2l.experiment.config import load_config
from fedh2l.experiment.experiment import Experiment
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.loop import run_together
from fedh2l.runs.trainer import Interrupted, Trainer

PLUS = "method.name=fedh2l-plus"
DEEP = [f"nodes.{i}.model_args.hidden=[12,9]" for i in range(4)]
SMALL = [part for change in [*TINY, *MLPS] for part in ("--set", change)]


def made(*changes: str) -> Experiment:
    return load_config(None, [*TINY, *MLPS, "run.rounds=20", *changes])[0].experiment()


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["method.interval=4"],
        ["run.ema_decay=0.9", "run.selection=last"],
        ["method.interval=4", "method.local_gradient=difference"],
        ["method.name=fedh2l-plus", "method.interval=5", "method.replay=2"],
        ["method.project=pcgrad", "method.pairing=pairs"],
        ["optimizer.name=sgd", "optimizer.momentum=0.9", "run.dtype=float64"],
        ["method.name=independent"],
        ["method.name=fedmd", "method.subset=20"],
        ["method.name=fedmd", "method.public_epochs=1", "run.selection=last"],
        ["method.name=fedavg"],
        ["method.name=fedavg", "method.interval=16"],
        ["method.name=fedprox", "method.interval=4"],
        ["method.name=agnostic"],
        ["method.name=agnostic", "method.interval=4"],
        ["method.name=fml", "method.interval=4", "method.meme_state=reset"],
        ["method.name=fedgkt", "method.interval=4", "method.server_epochs=1"],
    ],
)
def test_an_interrupted_run_ends_as_an_undisturbed_one(tmp_path, changes):
    changes = [*changes, "run.checkpoint_every=7", "run.rounds=30"]
    whole = train(made(*changes), tmp_path / "whole")
    broken = Trainer(made(*changes), RunDirectory.claim(tmp_path / "broken", "x"))
    broken.engine.advance = stop_after(broken, 23)
    with pytest.raises(CrashError):
        broken.run()
    resumed = Trainer(made(*changes), RunDirectory.open(tmp_path / "broken"))
    assert resumed.resume()
    assert resumed.round == 21
    resumed.run()
    assert left_behind(tmp_path / "broken") == whole


class CrashError(Exception):
    pass


def stop_after(trainer: Trainer, last: int):
    advance = trainer.engine.advance

    def crashing(first, until, keep_going):
        if until > last:
            advance(first, last, keep_going)
            raise CrashError
        return advance(first, until, keep_going)

    return crashing


def test_stopping_saves_the_round(tmp_path):
    whole = train(made(), tmp_path / "whole")
    trainer = Trainer(made(), RunDirectory.claim(tmp_path / "run", "x"))
    trainer.stop = lambda: (trainer.round == 10 and bool(trainer.engine.learners[0].records)) or trainer.round == 11
    with pytest.raises(Interrupted) as stopped:
        trainer.run()
    assert stopped.value.round == 11  # one round after the evaluation at 10
    resumed = Trainer(made(), RunDirectory.open(tmp_path / "run"))
    assert resumed.resume()
    assert resumed.round == 11
    resumed.run()
    assert left_behind(tmp_path / "run") == whole


class Rounds(Callback):
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def on_round(self, round):
        self.seen.append(round)


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
def test_one_engine_goes_on_from_the_others_checkpoint_in_stacks(tmp_path, first, changes):
    second = {"local": "batched", "batched": "local"}[first]
    expected = outcome(Trainer(seeded(0, *changes, "run.engine=local")))
    directory = RunDirectory.claim(tmp_path / "run", "x")
    begun = Trainer(seeded(0, *changes, f"run.engine={first}"), directory)
    seen: list[int] = []
    begun.callbacks = [Rounds(seen)]
    begun.stop = lambda: bool(seen) and seen[-1] >= 13
    with pytest.raises(Interrupted):
        begun.run()
    resumed = Trainer(seeded(0, *changes, f"run.engine={second}"), RunDirectory.open(tmp_path / "run"))
    assert resumed.resume()
    assert resumed.round == 13
    close_results(outcome(resumed), expected)


@pytest.mark.parametrize(
    "engines",
    [
        pytest.param(("ray", "local"), marks=pytest.mark.slow),
        pytest.param(("local", "ray"), marks=pytest.mark.slow),
        ("processes", "local"),
        ("local", "processes"),
    ],
)
def test_one_engine_goes_on_from_the_others_checkpoint(request, tmp_path, engines):
    if "ray" in engines:
        request.getfixturevalue("ray_cluster")
    changes = ["run.rounds=30", "run.checkpoint_every=20", "ray.actors=2"]
    whole = train(made(*changes, "run.engine=local"), tmp_path / "whole")
    first, second = (made(*changes, f"run.engine={engine}") for engine in engines)
    trainer = Trainer(first, RunDirectory.claim(tmp_path / "parts", "x"))
    trainer.stop = lambda: trainer.round >= 10
    with pytest.raises(Interrupted):
        trainer.run()
    again = Trainer(second, RunDirectory.open(tmp_path / "parts"))
    assert again.resume()
    again.run()
    assert left_behind(tmp_path / "parts") == whole


def test_interrupting_several_saves_all_of_them(tmp_path):
    federations = [seeded(seed, "run.engine=batched") for seed in (0, 1, 2)]
    trainers = [
        Trainer(f, RunDirectory.claim(tmp_path / str(i), "x"), engine=engine, stop=lambda: True)
        for i, (f, engine) in enumerate(zip(federations, engines_for(federations), strict=True))
    ]
    with pytest.raises(Interrupted):
        run_together(trainers)
    assert all(trainer.directory.checkpoints.newest() is not None for trainer in trainers)
    again = [seeded(seed, "run.engine=batched") for seed in (0, 1, 2)]
    resumed = [
        Trainer(f, RunDirectory.open(tmp_path / str(i)), engine=engine)
        for i, (f, engine) in enumerate(zip(again, engines_for(again), strict=True))
    ]
    assert all(trainer.resume() for trainer in resumed)
    assert {trainer.round for trainer in resumed} == {1}
    for seed, result in enumerate(run_together(resumed)):
        got = result.to_dict()
        got.pop("seconds")
        close_results(got, outcome(Trainer(seeded(seed, "run.engine=local"))))


def pid(engine: Any, place: int) -> int:
    """Of the process of some nodes."""
    if hasattr(engine, "_workers"):
        return engine._workers[place].pid
    import ray

    return ray.get(engine._actors.actors[place].__ray_call__.remote(lambda _: os.getpid()))


@pytest.mark.parametrize(
    ("engine", "when", "changes"),
    [
        ("processes", [(3, 0)], []),
        ("processes", [(12, 0), (31, 1)], []),
        ("ray", [(23, 1)], []),
        pytest.param("ray", [(3, 0)], [], marks=pytest.mark.slow),
        pytest.param("ray", [(12, 0), (31, 1)], [], marks=pytest.mark.slow),
        pytest.param("ray", [(24, 1)], ["method.name=agnostic", "method.interval=3"], marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_changes_nothing(request, tmp_path, caplog, engine, when, changes):
    if engine == "ray":
        request.getfixturevalue("ray_cluster")
    settings = ["run.rounds=40", "run.checkpoint_every=20", *changes]
    whole = train(made(*settings, "run.engine=local"), tmp_path / "here")
    directory = RunDirectory.claim(tmp_path / "there", "x")
    with caplog.at_level(logging.WARNING):
        Killer(pid, *when).on(made(*settings, f"run.engine={engine}", "ray.actors=2"), directory).run()
    assert left_behind(tmp_path / "there") == whole
    assert caplog.text.count("died after round") == len(when)
    if engine == "ray":
        told = re.findall(
            r"node '(M\d+)' and node '(M\d+)' died after round \d+; all nodes go on from round (\d+)", caplog.text
        )
        assert len(told) == len(when)
        assert all(int(start) <= round // 10 * 10 for (_, _, start), (round, _) in zip(told, when, strict=True))


def test_from_python_a_run_goes_on_on_another_engine(ray_cluster, tmp_path):
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


def test_resume_from_python(tmp_path):
    class CrashError(Exception):
        pass

    class Bomb(fedh2l.Callback):
        def on_round(self, round):
            if round == 17:
                raise CrashError

    options = {"rounds": 30, "eval_every": 10, "checkpoint_every": 5}
    expected = fedh2l.train(given(), **options).to_dict()
    with pytest.raises(CrashError):
        fedh2l.train(given(), **options, out=tmp_path / "run", callbacks=[Bomb()])
    result = fedh2l.train(given(), **options, out=tmp_path / "run", resume=True).to_dict()
    assert {**result, "seconds": 0} == {**expected, "seconds": 0}


class Net(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, num_classes))

    def forward(self, x):
        return self.layers(x)


def given() -> list[fedh2l.Node]:
    return [fedh2l.Node(f"n{i}", Net, blobs(f"n{i}", 0.3 * i, seed=i)) for i in range(3)]


def test_frozen_weights_are_part_of_a_checkpoint(tmp_path):
    class Stop(fedh2l.Callback):
        def on_round(self, round):
            if round == 7:
                raise KeyboardInterrupt

    def given(seed):
        torch.manual_seed(seed)
        nets = [tiny_net() for _ in range(2)]
        for net in nets:
            net[0].requires_grad_(False)
        return [fedh2l.Node(f"n{i}", net, blobs(f"n{i}", seed=i)) for i, net in enumerate(nets)]

    options = {"rounds": 12, "eval_every": 4, "checkpoint_every": 3}
    expected = fedh2l.train(given(0), **options)
    with pytest.raises(KeyboardInterrupt):
        fedh2l.train(given(0), **options, out=tmp_path / "run", callbacks=[Stop()])
    assert fedh2l.train(given(1), **options, out=tmp_path / "run", resume=True).matrix == expected.matrix


def equal(a: dict, b: dict) -> bool:
    return {**a, "seconds": 0} == {**b, "seconds": 0}


def result_of(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def start(tmp_path: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedh2l", "run", *arguments]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def wait_for(condition, process: subprocess.Popen[str], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


LONG = ["--rounds", "400", *SMALL]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    process = start(folder, *LONG, "--set", "run.checkpoint_every=25", "--out", "run", "--json")
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1]), folder / "run"


def same_models(one: Path, two: Path) -> bool:
    names = sorted(p.name for p in (one / "models").iterdir())
    return len(names) == 8 and all(
        (one / "models" / n).read_bytes() == (two / "models" / n).read_bytes() for n in names
    )


def test_kill_9_and_resume(cli, tmp_path, undisturbed):
    process = start(tmp_path, *LONG, "--set", "run.checkpoint_every=25", "--out", "run")
    wait_for(lambda: len(list(tmp_path.glob("run/checkpoints/round-*.ckpt"))) == 2, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "run/result.json").exists()
    done = cli("run", "--resume", "run", "--json")
    assert re.search(r"going on after round \d+", done.stderr)
    assert equal(result_of(done), undisturbed[0])
    assert same_models(tmp_path / "run", undisturbed[1])
    rounds = [json.loads(line)["round"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(10, 401, 10))
    again = cli("run", "--resume", "run", "--json")
    assert "already ended" in again.stderr
    assert equal(result_of(again), undisturbed[0])


def test_a_damaged_newest_checkpoint_falls_back(cli, tmp_path, undisturbed):
    process = start(tmp_path, *LONG, "--set", "run.checkpoint_every=25", "--out", "run")
    wait_for(lambda: len(list(tmp_path.glob("run/checkpoints/round-*.ckpt"))) == 2, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    newest = sorted(tmp_path.glob("run/checkpoints/round-*.ckpt"))[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    done = cli("run", "--resume", "run", "--json")
    assert f"{newest.name} is damaged" in done.stderr
    assert equal(result_of(done), undisturbed[0])


def test_killed_before_the_first_checkpoint(cli, tmp_path, undisturbed):
    process = start(tmp_path, *LONG, "--set", "run.checkpoint_every=0", "--out", "run")
    wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists(), process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    done = cli("run", "--resume", "run", "--json")
    assert "starting from round 0" in done.stderr
    assert equal(result_of(done), undisturbed[0])


def test_two_processes_do_not_run_the_same_run(cli, tmp_path):
    process = start(tmp_path, "--rounds", "100000", *SMALL, "--set", "run.checkpoint_every=25", "--out", "run")
    wait_for(lambda: list(tmp_path.glob("run/checkpoints/round-*.ckpt")), process)
    second = cli("run", "--resume", "run")
    process.kill()
    process.communicate()
    assert second.returncode == 2
    assert "another process is running 'run'" in second.stderr


@pytest.mark.parametrize(
    ("engine", "number"),
    [
        ("local", signal.SIGINT),
        ("local", signal.SIGTERM),
        ("processes", signal.SIGINT),
        pytest.param("ray", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_saves_and_says_how_to_go_on(cli, tmp_path, undisturbed, engine, number):
    """As in a terminal, all processes get the signal; the run goes on with the engine of its config."""
    process = start(tmp_path, *LONG, "--engine", engine, "--out", "run", start_new_session=True)
    wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists(), process)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    command = re.search(r"Go on with:\s+\S*(?: -m fedh2l)? (run --resume run)", errors.replace("\n", " "))
    assert command, errors
    if engine == "ray":
        config = tmp_path / "run/config.toml"
        config.write_text(config.read_text().replace('engine = "ray"', 'engine = "local"'))
    assert equal(result_of(cli(*command.group(1).split(), "--json")), undisturbed[0])
    assert same_models(tmp_path / "run", undisturbed[1])
