"""Execution of cells on a Ray cluster, one task per unit.

Machines do not need a shared file system. A task returns the files of its runs with its result, even if it was stopped.
A task that continues a run receives the saved files.
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
from fedh2l.engines.actor_group import connect
from fedh2l.errors import ConfigError
from fedh2l.experiment.settings import RaySettings
from fedh2l.files import PRIVATE_FOLDER, write_atomically
from fedh2l.hardware import CORES
from fedh2l.plugins import search
from fedh2l.runs.directory import PRIVATE_FOLDERS, RESULT, refuse_links
from fedh2l.runs.trainer import Interrupted

Files = dict[str, bytes]
"""Files of a folder by path."""


class OnRay(Workers):
    """Tasks on a Ray cluster, with one GPU each if there are GPUs, else with one CPU each."""

    def __init__(
        self, out: Path, device: str, settings: RaySettings, jobs: int | None = None, keep_models: bool = False
    ) -> None:
        self.out, self.keep_models = out, keep_models
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"--device {device}: on a cluster it is cpu, cuda or auto")
        self._started = connect(settings)
        has = ray.cluster_resources()
        if device == "cuda" and has.get("GPU", 0) < 1:
            raise ConfigError("--device cuda: the Ray cluster has no GPU")
        self.device = ("cuda" if has.get("GPU", 0) >= 1 else "cpu") if device == "auto" else device
        self.jobs = jobs or max(1, int(has.get("GPU" if self.device == "cuda" else "CPU", 1)))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._desk: Any = ray.remote(Desk).options(num_cpus=0, scheduling_strategy=here).remote()
        self._rounds = 0
        needs = {"num_gpus": 1} if self.device == "cuda" else {"num_cpus": 1}
        self._task = ray.remote(_run_unit).options(**needs, max_retries=3)

    def submit(self, unit: Sequence[Cell]) -> Any:
        """Start a task on any machine with free resources."""
        saved = {name: data for cell in unit for name, data in _read(self.out, cell.path(Path())).items()}
        return self._task.remote(list(unit), saved, self.device, self._desk, sys.path, self.keep_models)

    def wait(self, tasks: Sequence[Any], seconds: float) -> list[Any]:
        return list(ray.wait(list(tasks), timeout=seconds, fetch_local=False)[0])

    def outcome(self, task: Any, unit: Sequence[Cell]) -> dict[Cell, str]:
        try:
            failed, files = ray.get(task)
        except RayTaskError as error:
            return dict.fromkeys(unit, str(error))
        except RayError as error:
            return dict.fromkeys(unit, f"the process that ran it died: {str(error).strip().splitlines()[-1]}")
        for cell in unit if files else ():  # the returned files replace the local ones
            shutil.rmtree(cell.path(self.out) / "checkpoints", ignore_errors=True)
        _write(self.out, files)
        return dict(failed)

    @property
    def rounds(self) -> int:
        with suppress(RayActorError):  # a progress display may not end a run
            self._rounds = int(ray.get(self._desk.look.remote())[0])
        return self._rounds

    def stop(self) -> None:
        self._desk.stop.remote()

    def close(self) -> None:
        ray.kill(self._desk)
        if self._started:
            ray.shutdown()


class Desk:
    """Collects the progress of runs, and has their stop flag."""

    def __init__(self) -> None:
        self._rounds, self._stopped = 0, False

    def add(self, rounds: int) -> None:
        self._rounds += rounds

    def stop(self) -> None:
        self._stopped = True

    def look(self) -> tuple[int, bool]:
        """Return the number of rounds that are done, and the stop flag."""
        return self._rounds, self._stopped


def _run_unit(
    cells: Sequence[Cell], saved: Files, device: str, desk: Any, paths: Sequence[str], keep_models: bool
) -> tuple[dict[Cell, str], Files]:
    """Run cells in a temporary folder of a worker. Return the errors of failed cells and the files of the folder."""
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
        return {}, {}  # the sent files are unchanged
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
    """Return all files of a folder below `root`."""
    refuse_links(root / folder)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted((root / folder).rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def _write(root: Path, files: Mapping[str, bytes]) -> None:
    """Write files below `root`. Results are last, since a result marks a finished run."""
    for name in sorted(files, key=lambda name: Path(name).name == RESULT):
        path = root / name
        private = path.parent.name in PRIVATE_FOLDERS
        path.parent.mkdir(PRIVATE_FOLDER if private else 0o777, parents=True, exist_ok=True)
        write_atomically(path, files[name], private=private)
