"""Running the cells of a benchmark on a Ray cluster, one task each.

Machines need not share a file system: what a run leaves behind travels back with its result, also if it was stopped,
and a run that goes on is sent what it had saved.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedh2l.bench.cells import Cell, Place, run_cells
from fedh2l.bench.runner import Counter, Workers
from fedh2l.checkpoints import write_atomically
from fedh2l.engines.ray_fleet import connect
from fedh2l.errors import ConfigError
from fedh2l.plugins import search
from fedh2l.rundir import RESULT
from fedh2l.settings import CORES, RaySettings
from fedh2l.trainer import Interrupted

Files = dict[str, bytes]
"""What is in a folder, by path."""


class OnRay(Workers):
    """Tasks of a Ray cluster, with one CPU each, or one GPU where the cluster has some."""

    def __init__(self, out: Path, device: str, settings: RaySettings, keep_models: bool = False) -> None:
        self.out = out
        self.keep_models = keep_models
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"--device {device}: on a cluster it is cpu, cuda or auto")
        self._started = connect(settings)
        has = ray.cluster_resources()
        if device == "cuda" and has.get("GPU", 0) < 1:
            raise ConfigError("--device cuda: the Ray cluster has no GPU")
        self.device = ("cuda" if has.get("GPU", 0) >= 1 else "cpu") if device == "auto" else device
        self.places = max(1, int(has.get("GPU" if self.device == "cuda" else "CPU", 1)))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._desk: Any = ray.remote(Desk).options(num_cpus=0, scheduling_strategy=here).remote()
        self._rounds = 0
        needs = {"num_gpus": 1} if self.device == "cuda" else {"num_cpus": 1}
        self._task = ray.remote(_run_unit).options(**needs, max_retries=3)

    def submit(self, unit: Sequence[Cell]) -> Any:
        """To wherever there is room."""
        saved = {name: data for cell in unit for name, data in _read(self.out, cell.path(Path())).items()}
        return self._task.remote(list(unit), saved, self.device, self._desk, sys.path, self.keep_models)

    def wait(self, tasks: Sequence[Any], seconds: float) -> list[Any]:
        """As Ray does it."""
        return list(ray.wait(list(tasks), timeout=seconds, fetch_local=False)[0])

    def outcome(self, task: Any, unit: Sequence[Cell]) -> dict[Cell, str]:
        """Keeps what the runs left behind."""
        try:
            failed, files = ray.get(task)
        except RayTaskError as error:
            return dict.fromkeys(unit, str(error))
        except RayError as error:
            return dict.fromkeys(unit, f"the process that ran it died: {str(error).strip().splitlines()[-1]}")
        for cell in unit if files else ():  # what it left behind replaces what it was sent
            shutil.rmtree(cell.path(self.out) / "checkpoints", ignore_errors=True)
        _write(self.out, files)
        return dict(failed)

    @property
    def rounds(self) -> int:
        """As they were reported."""
        with suppress(RayActorError):  # how far they are is worth no run
            self._rounds = int(ray.get(self._desk.look.remote())[0])
        return self._rounds

    def stop(self) -> None:
        """By a flag at the desk."""
        self._desk.stop.remote()

    def close(self) -> None:
        """Leaves the cluster."""
        ray.kill(self._desk)
        if self._started:
            ray.shutdown()


class Desk:
    """Where runs report, and learn that they should stop."""

    def __init__(self) -> None:
        self._rounds, self._stopped = 0, False

    def add(self, rounds: int) -> None:
        """Rounds that a run has done."""
        self._rounds += rounds

    def stop(self) -> None:
        """All are to stop."""
        self._stopped = True

    def look(self) -> tuple[int, bool]:
        """How many rounds are done, and whether to stop."""
        return self._rounds, self._stopped


def _run_unit(
    cells: Sequence[Cell], saved: Files, device: str, desk: Any, paths: Sequence[str], keep_models: bool
) -> tuple[dict[Cell, str], Files]:
    """In a worker: runs cells in a folder of its own; returns what went wrong, and what is in the folder then."""
    for path in paths:
        search(path)
    os.environ[CORES] = "1"
    stop = threading.Event()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1):
            try:
                if ray.get(desk.look.remote())[1]:
                    stop.set()
            except RayActorError:
                stop.set()

    if ray.get(desk.look.remote())[1]:
        return {}, {}  # what was sent is what there is
    threading.Thread(target=watch, daemon=True).start()
    try:
        with TemporaryDirectory() as folder:
            out = Path(folder)
            _write(out, saved)
            try:
                place = Place(out, device, lambda: Counter(desk.add.remote), stop.is_set, keep_models)
                failed = run_cells(cells, place)
            except Interrupted:
                failed = {}
            return failed, {name: data for cell in cells for name, data in _read(out, cell.path(Path())).items()}
    finally:
        ended.set()


def _read(root: Path, folder: Path) -> Files:
    """All files of a folder below `root`."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted((root / folder).rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def _write(root: Path, files: Mapping[str, bytes]) -> None:
    """Writes files below `root`; a result last, since it says that a run has ended."""
    for name in sorted(files, key=lambda name: Path(name).name == RESULT):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, files[name])
