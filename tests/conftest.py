"""What the tests share: small federations that train in a blink."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from torch import nn

with contextlib.suppress(ImportError):
    import grpc  # noqa: F401 - before fedh2l.peer, which silences it: tests read why a handshake failed

import fedh2l
from fedh2l.experiment.config import load_config
from fedh2l.experiment.experiment import Experiment
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.trainer import Trainer

torch.set_num_threads(1)
hypothesis.settings.register_profile("any machine", deadline=None)  # slow is not wrong
hypothesis.settings.load_profile("any machine")

ROOT = Path(__file__).parents[1]
TINY = ["run.device=cpu", "data.per_class=20", "run.eval_every=10", "run.batch_size=8"]
LENETS = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=lenet", "model_args={}")]
MLPS = [f"nodes.{i}.model=mlp" for i in range(4)] + [f"nodes.{i}.model_args.hidden=[12]" for i in range(4)]


@pytest.fixture(autouse=True, scope="module")
def memory_is_given_back() -> Iterator[None]:
    """What tests have freed goes back to the system: the C library would keep gigabytes, which other processes need."""
    yield
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture
def federation() -> Callable[..., Experiment]:
    """Four small MLPs on a little Rotated MNIST; arguments are `section.key=value`."""

    def make(*changes: str) -> Experiment:
        return load_config(None, [*TINY, *MLPS, "run.rounds=20", *changes])[0].experiment()

    return make


@pytest.fixture
def process(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line as a process of its own, in an empty directory: what a test of the process needs."""

    def call(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fedh2l", *map(str, arguments)]
        search = [str(ROOT / "tests"), str(request.path.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "PYTHONPATH": os.pathsep.join(search)}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, **options)

    return call


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: its exit code, standard output and standard error."""
    from fedh2l.cli import main
    from fedh2l.cli.console import err

    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedh2l", *map(str, arguments)])
        monkeypatch.setattr(err, "_width", 400)  # no text is split over lines
        with pytest.raises(SystemExit) as left:
            main()
        streams = capsys.readouterr()
        return int(left.value.code or 0), streams.out, streams.err

    return call


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., tuple[int, str, str]]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line in this process as if alone in an empty directory: with logs, and modules read anew."""

    def call(*arguments: Any, input: str = "") -> subprocess.CompletedProcess[str]:
        root, modules = logging.getLogger(), set(sys.modules)
        level, handlers, root.handlers = root.level, root.handlers, []
        try:
            with monkeypatch.context() as here:
                here.chdir(tmp_path)
                here.syspath_prepend(str(tmp_path))
                here.setattr(sys, "dont_write_bytecode", True)  # modules change within a second
                here.setattr(sys, "stdin", io.StringIO(input))
                return subprocess.CompletedProcess(arguments, *invoke(*arguments))
        finally:
            root.handlers = handlers
            root.setLevel(level)
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
                    del sys.modules[name]

    return call


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A cluster in this machine, for the tests of a file; the engine uses what is there."""
    import ray

    from fedh2l.engines.actor_group import patiently

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    some = {"num_cpus": 8, "object_store_memory": 500_000_000}
    patiently(lambda: ray.init(address="local", include_dashboard=False, log_to_driver=False, **some))
    yield
    ray.shutdown()


@pytest.fixture
def bench_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench that this process is asked for trains in this process: no others are started, each to import PyTorch."""
    from fedh2l.bench import runner

    def pool(jobs: int, context: Any, start: Any, shared: tuple[Any, ...]) -> ThreadPoolExecutor:
        runner._worker.update(stop=shared[0], rounds=shared[1])
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(runner, "ProcessPoolExecutor", pool)


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a federation of real peers, as processes; `town.py`."""
    from fedh2l.peer.membership.roster_sections import Timing
    from town import Town, rehearsal

    made: list[Town] = []

    def make(*changes: str, nodes: int = 4, **timing: Any) -> Town:
        folder = tmp_path / f"town{len(made)}"
        made.append(Town(rehearsal(folder, *changes, timing=Timing(**timing), nodes=nodes)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def train(federation: Experiment, folder: Path, callbacks: Sequence[Callback] = ()) -> Any:
    """A run with everything that it leaves behind, without what time it took."""
    Trainer(federation, RunDirectory.claim(folder, "x"), callbacks).run()
    return left_behind(folder)


def left_behind(folder: Path) -> Any:
    files = {path.name: path.read_bytes() for path in sorted((folder / "models").iterdir())}
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    for entry in (*metrics, result):
        del entry["seconds"]
    return files, metrics, result


class Killer(Callback):
    """Kills the process of some nodes, with no chance to say goodbye, when a round is done: `(round, place)`."""

    def __init__(self, pid: Callable[[Any, int], int], *when: tuple[int, int]) -> None:
        self.pid, self.when = pid, list(when)
        self.trainer: Trainer | None = None

    def on_round(self, round: int) -> None:
        if self.when and self.when[0][0] == round:
            assert self.trainer is not None
            os.kill(self.pid(self.trainer.engine, self.when.pop(0)[1]), signal.SIGKILL)
            time.sleep(0.5)

    def on(self, federation: Experiment, directory: RunDirectory | None = None) -> Trainer:
        """A trainer whose nodes are killed."""
        self.trainer = Trainer(federation, directory, [self])
        return self.trainer


def blobs(name: str, shift: float = 0.0, size: int = 120, classes: int = 3, seed: int = 0) -> fedh2l.Domain:
    """A toy domain: Gaussian clouds in the plane, one a class, moved by `shift`."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % classes
    angle = labels * (2 * torch.pi / classes) + shift
    centres = 2 * torch.stack([angle.cos(), angle.sin()], 1)
    inputs = centres + 0.6 * torch.randn(size, 2, generator=generator)
    return fedh2l.Domain.split((inputs, labels), name, [f"c{i}" for i in range(classes)])


def tiny_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))


def two_domains() -> list[fedh2l.Domain]:
    return [blobs("x"), blobs("y")]


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {learner.name: learner.parameters.clone() for learner in trainer.engine.learners}


def advance(fed, order=None, rounds=12) -> tuple[Trainer, dict[str, torch.Tensor]]:
    trainer = Trainer(fed)
    if order:
        trainer.engine.learners = [trainer.engine.learners[i] for i in order]
    trainer.engine.advance(1, rounds, lambda _: True)
    return trainer, parameters(trainer)


def noisy_net(num_classes: int, input_shape: tuple[int, ...]) -> nn.Sequential:
    """Everything that is stateful or random: batch norm and dropout."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.5), nn.Linear(10, num_classes)
    )


NOISY = [f"nodes.{i}.model=conftest:noisy_net" for i in range(4)] + [f"nodes.{i}.model_args={{}}" for i in range(4)]


def seeded(seed: int, *changes: str) -> Experiment:
    """Four small MLPs in float64, where the order of a sum shows in the last digits only."""
    base = [*TINY, *MLPS, "run.dtype=float64", "run.rounds=20", "run.eval_every=10"]
    return load_config(None, [*base, *changes, f"run.seed={seed}"])[0].experiment()


def outcome(trainer: Trainer) -> dict[str, Any]:
    result = trainer.run().to_dict()
    result.pop("seconds")
    return result


def close_results(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Equal in everything, but for the last digits of means."""
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert value == pytest.approx(two[key]) if isinstance(value, float) else value == two[key], key
