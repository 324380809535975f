"""The runs of a benchmark: their configurations, directories and execution."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fedh2l.bench.suite import Row, Suite, TableSpec
from fedh2l.engines.choice import engines_for
from fedh2l.errors import FedH2LError, RunError
from fedh2l.experiment.config import Config, load_config
from fedh2l.experiment.presets import Changes
from fedh2l.experiment.toml import to_toml
from fedh2l.methods.registry import find_method
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.directory import CONFIG, RunDirectory
from fedh2l.runs.loop import run_together
from fedh2l.runs.result import Result
from fedh2l.runs.trainer import Interrupted, Trainer


@dataclass(frozen=True)
class Cell:
    """A method with its settings and one seed. Tables with equal settings share a cell."""

    method: str
    changes: Changes
    seed: int

    def path(self, out: Path) -> Path:
        """Return the directory of its run. Other settings, or other defaults, give another directory."""
        return out / "cells" / f"{_plain(self.method)}-s{self.seed}-{_fingerprint(self)}"

    def result(self, out: Path) -> dict[str, Any] | None:
        found = RunDirectory(self.path(out)).result()
        return Result.from_dict(found).to_dict() if found is not None else None

    def config(self, device: str) -> Config:
        return _resolved(self).on(device)

    def directory(self, out: Path, device: str) -> RunDirectory:
        """Return the directory of its run. Create it if there is none."""
        folder = self.path(out)
        if (folder / CONFIG).exists():
            return RunDirectory.open(folder)
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed at once
        return RunDirectory.claim(folder, to_toml(self.config(device)))

    def reached(self, out: Path) -> int:
        """Return the round of its newest checkpoint, or 0."""
        return RunDirectory(self.path(out)).checkpoints.round


@dataclass(frozen=True)
class Place:
    """Directory, device and callbacks for running cells."""

    out: Path
    device: str
    callback: Callable[[], Callback]
    stop: Callable[[], bool]
    keep_models: bool = False
    """Whether to keep the models of a run."""


def run_cells(cells: Sequence[Cell], place: Place) -> dict[Cell, str]:
    """Run cells to their end, from their last checkpoints. Return the errors of failed cells.

    Cells at the same round run as one computation if the engine supports it. If one of them fails, they run one by one,
    so the others can finish. Raises `Interrupted` after a request to stop.
    """
    starts: dict[int, list[Cell]] = {}
    for cell in cells:
        starts.setdefault(cell.reached(place.out), []).append(cell)
    failed: dict[Cell, str] = {}
    for together in starts.values():
        try:
            _run_as_one(together, place)
        except Interrupted:
            raise
        except FedH2LError as error:
            if len(together) == 1:
                failed[together[0]] = str(error)
            else:
                for cell in together:
                    failed |= run_cells([cell], place) if cell.result(place.out) is None else {}
        except Exception:  # other runs continue after a failure
            failed |= dict.fromkeys(together, traceback.format_exc())
    return failed


def _run_as_one(cells: Sequence[Cell], place: Place) -> None:
    experiments = [cell.config(place.device).experiment() for cell in cells]
    trainers = []
    with ExitStack() as stack:
        for cell, experiment, engine in zip(cells, experiments, engines_for(experiments), strict=True):
            directory = cell.directory(place.out, place.device)
            trainer = Trainer(experiment, directory, [place.callback()], place.stop, engine)
            trainer.save_models = place.keep_models
            trainer.extensible = False
            stack.enter_context(trainer.preparing())
            trainer.resume()
            trainers.append(trainer)
        if len({trainer.round for trainer in trainers}) > 1:
            raise RunError("these runs cannot go on together, since a checkpoint of one is damaged")
    _resolved.cache_clear()  # a user's dataset may hold its samples
    first = trainers[0].engine
    if all(first.moves(trainer.engine) for trainer in trainers):
        run_together(trainers)
    else:
        for trainer in trainers:
            trainer.run()


def units(cells: Sequence[Cell], device: str) -> list[list[Cell]]:
    """Group cells that run together. On a GPU, these are cells that differ only in seed and split.

    Cells with their own dataset, such as images, are large and run one at a time.
    """
    found: dict[object, list[Cell]] = {}
    for cell in cells:
        alone = device == "cpu" or any(change.startswith("data.name=") for change in cell.changes)
        alike = tuple(change for change in cell.changes if not change.startswith("data.splits="))
        found.setdefault(cell if alone else (cell.method, alike), []).append(cell)
    return list(found.values())


@cache
def _resolved(cell: Cell) -> Config:
    return load_config(None, cell.changes, cell.method, {"seed": cell.seed, "device": "cpu"})[0]


@cache
def _fingerprint(cell: Cell) -> str:
    """Return a hash of its configuration and of the selection rule. A result is valid only for both."""
    config = _resolved(cell)
    values = replace(config, data=config.data.resolved()).sections()
    text = json.dumps([config.run.selection_rule, values], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def takes_part(row: Row, table: TableSpec) -> bool:
    """Return whether a row's method can run with the table's models. Some methods need equal models."""
    models: dict[str, dict[str, str]] = {}
    for change in table.changes:
        found = re.fullmatch(r"nodes\.([^.]+)\.(model|model_args)=(.*)", change)
        if found:
            models.setdefault(found[1], {})[found[2]] = found[3]
    return len({str(own) for own in models.values()}) < 2 or bool(find_method(row.method).heterogeneous)


def cells_of(row: Row, table: TableSpec, choice: str, seeds: int, common: Changes) -> list[Cell]:
    """Return the runs of one choice of a row."""
    changes = (*table.defaults, *common, *table.changes, *row.choices[choice])  # last: a row's settings take precedence
    return [Cell(row.method, changes, seed) for seed in range(seeds)]


def all_cells(suite: Suite, seeds: int, common: Changes, methods: Sequence[str] | None) -> list[Cell]:
    """Return every run of a suite once, in order of seeds."""
    found: dict[Path, Cell] = {}
    for table in suite.tables:
        for row in chosen_rows(table, methods):
            if takes_part(row, table):
                for choice in row.choices:
                    found |= {cell.path(Path()): cell for cell in cells_of(row, table, choice, seeds, common)}
    return sorted(found.values(), key=lambda cell: cell.seed)


def chosen_rows(table: TableSpec, methods: Sequence[str] | None) -> list[Row]:
    """Return the rows of these methods, or all rows. A method without a row gets a new one."""
    if methods is None:
        return list(table.rows)
    known = {row.method for row in table.rows}
    rows = [row for row in table.rows if row.method in methods]
    return rows + [Row.of(name, name) for name in methods if name not in known]


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name)
