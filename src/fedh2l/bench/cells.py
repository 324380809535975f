"""One run of a benchmark: its configuration, where its result is kept, and running it."""

from __future__ import annotations

import hashlib
import re
import shutil
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedh2l.bench.suite import Row, Suite, TableSpec
from fedh2l.callbacks import Callback
from fedh2l.config import Config, load_config
from fedh2l.engines.batched import BatchedEngine
from fedh2l.engines.choice import engines_for
from fedh2l.errors import FedH2LError
from fedh2l.methods.registry import find_method
from fedh2l.presets import Changes
from fedh2l.rundir import CONFIG, RESULT, RunDirectory
from fedh2l.toml import to_toml
from fedh2l.trainer import Interrupted, Trainer, run_together


@dataclass(frozen=True)
class Cell:
    """A method with its settings at one seed. Cells with equal settings are one, whatever table they are in."""

    method: str
    changes: Changes
    seed: int

    def path(self, out: Path) -> Path:
        """The directory of its run; another setting, also by another default, is another directory."""
        return out / "cells" / f"{_plain(self.method)}-s{self.seed}-{_fingerprint(self)}"

    def result(self, out: Path) -> dict[str, Any] | None:
        """Its result, if it has ended."""
        return RunDirectory(self.path(out)).result() if (self.path(out) / RESULT).exists() else None

    def config(self, device: str) -> Config:
        """Its complete configuration."""
        return load_config(None, self.changes, self.method, {"seed": self.seed, "device": device})[0]

    def directory(self, out: Path, device: str) -> RunDirectory:
        """The directory of its run, made if it is not there."""
        folder = self.path(out)
        if (folder / CONFIG).exists():
            return RunDirectory.open(folder)
        shutil.rmtree(folder, ignore_errors=True)  # what a process that was killed at once left behind
        return RunDirectory.claim(folder, to_toml(self.config(device)))

    def reached(self, out: Path) -> int:
        """The round from which it goes on."""
        newest = RunDirectory(self.path(out)).checkpoints.newest()
        return newest[1].round if newest else 0


@dataclass(frozen=True)
class Place:
    """Where and under whose eyes cells are run."""

    out: Path
    device: str
    callback: Callable[[], Callback]
    stop: Callable[[], bool]
    keep_models: bool = False
    """Whether the models of a run are kept, beside its result."""


def run_cells(cells: Sequence[Cell], place: Place) -> dict[Cell, str]:
    """Runs cells to their end, from where they were left; returns what went wrong with those that failed.

    Those that start at one round are run as one computation, where an engine can. If one of them fails, they are run
    one by one, so that it fails alone. Raises `Interrupted` when asked to stop.
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
        except Exception:  # one run that fails must not take the others with it
            failed |= dict.fromkeys(together, traceback.format_exc())
    return failed


def _run_as_one(cells: Sequence[Cell], place: Place) -> None:
    federations = [cell.config(place.device).federation() for cell in cells]
    trainers = []
    for cell, federation, engine in zip(cells, federations, engines_for(federations), strict=True):
        directory = cell.directory(place.out, place.device)
        trainers.append(Trainer(federation, directory, [place.callback()], place.stop, engine))
        trainers[-1].save_models = place.keep_models
        trainers[-1].resume()
    if isinstance(trainers[0].engine, BatchedEngine):
        run_together(trainers)
    else:
        for trainer in trainers:
            trainer.run()


def units(cells: Sequence[Cell], device: str) -> list[list[Cell]]:
    """What is run at a time: on a GPU, cells that differ by seed and split alone go together.

    Those with data of their own, images say, are large, and run one at a time.
    """
    found: dict[object, list[Cell]] = {}
    for cell in cells:
        alone = device == "cpu" or any(change.startswith("data.name=") for change in cell.changes)
        alike = tuple(change for change in cell.changes if not change.startswith("data.splits="))
        found.setdefault(cell if alone else (cell.method, alike), []).append(cell)
    return list(found.values())


@cache
def _fingerprint(cell: Cell) -> str:
    """Of its configuration and of the rule by which models are selected: results by another one are not its own."""
    config = cell.config("cpu")
    return hashlib.sha256((config.run.selection_rule + to_toml(config)).encode()).hexdigest()[:12]


def takes_part(row: Row, table: TableSpec) -> bool:
    """Whether a row's method can run its table at all: with different models, some cannot."""
    models: dict[str, dict[str, str]] = {}
    for change in table.changes:
        found = re.fullmatch(r"nodes\.([^.]+)\.(model|model_args)=(.*)", change)
        if found:
            models.setdefault(found[1], {})[found[2]] = found[3]
    return len({str(own) for own in models.values()}) < 2 or bool(find_method(row.method).heterogeneous)


def cells_of(row: Row, table: TableSpec, choice: str, seeds: int, common: Changes) -> list[Cell]:
    """The runs behind one choice of a row."""
    changes = (*table.defaults, *common, *table.changes, *row.choices[choice])  # the last: a row is what it says
    return [Cell(row.method, changes, seed) for seed in range(seeds)]


def all_cells(suite: Suite, seeds: int, common: Changes, methods: Sequence[str] | None) -> list[Cell]:
    """Every run of a suite, once, first seeds first."""
    found: dict[Path, Cell] = {}
    for table in suite.tables:
        for row in chosen_rows(table, methods):
            if takes_part(row, table):
                for choice in row.choices:
                    found |= {cell.path(Path()): cell for cell in cells_of(row, table, choice, seeds, common)}
    return sorted(found.values(), key=lambda cell: cell.seed)


def chosen_rows(table: TableSpec, methods: Sequence[str] | None) -> list[Row]:
    """The rows of these methods, and a new one for a method that has none; all rows if no methods are named."""
    if methods is None:
        return list(table.rows)
    known = {row.method for row in table.rows}
    rows = [row for row in table.rows if row.method in methods]
    return rows + [Row.of(name, name) for name in methods if name not in known]


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name)
