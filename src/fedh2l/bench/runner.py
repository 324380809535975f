"""Running the cells of a benchmark side by side, each in a process of its own, until all are done or time is up."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Protocol

from fedh2l.bench.cells import Cell, Place, run_cells, units
from fedh2l.callbacks import Callback
from fedh2l.settings import CORES, available_cores
from fedh2l.signals import on_interrupt
from fedh2l.trainer import Interrupted

POLL = 0.25
"""Seconds between two looks at the clock and the workers."""


class Display(Protocol):
    """Shows how a benchmark goes."""

    def update(self, rounds: int, cells: int) -> None:
        """Rounds and cells that are done so far."""


@dataclass
class Outcome:
    """How a benchmark ended."""

    failed: dict[Cell, str] = field(default_factory=dict)
    """Cells that could not be run, and why."""
    out_of_time: bool = False
    interrupted: bool = False


class Runner:
    """Runs cells. `seconds` is how long it may take; what is unfinished then goes on at the next call."""

    def __init__(self, out: Path, device: str, jobs: int, seconds: float | None, display: Display) -> None:
        self.out = out
        self.device = device
        self.jobs = jobs
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.display = display
        context = multiprocessing.get_context("spawn")  # a forked process would share torch's threads and CUDA state
        self._context = context
        self._stop: Event = context.Event()
        self._rounds: Synchronized[int] = context.Value("q", 0)

    def run(self, cells: Sequence[Cell]) -> Outcome:
        """Runs those that are not done yet."""
        outcome = Outcome()
        with (
            ProcessPoolExecutor(
                self.jobs, self._context, _start_worker, (self._stop, self._rounds, os.getpid(), self.jobs)
            ) as pool,
            on_interrupt(lambda: self._interrupt(outcome)),
        ):
            waiting: dict[Future[dict[Cell, str]], list[Cell]] = {
                pool.submit(_run_unit, unit, self.out, self.device): unit for unit in units(cells, self.device)
            }
            count = 0
            while waiting:
                done, _ = wait(waiting, POLL, FIRST_COMPLETED)
                for future in done:
                    unit = waiting.pop(future)
                    count += len(unit)
                    if not future.cancelled():
                        outcome.failed |= _outcome(future, unit)
                self.display.update(self._rounds.value, count)
                if self.deadline is not None and time.monotonic() > self.deadline and not self._stop.is_set():
                    outcome.out_of_time = True
                    self._stop.set()
                if self._stop.is_set():
                    for future in waiting:
                        future.cancel()
        return outcome

    def _interrupt(self, outcome: Outcome) -> None:
        """Lets running cells save themselves."""
        outcome.interrupted = True
        self._stop.set()


_worker: dict[str, Any] = {}


def _start_worker(stop: Event, rounds: Synchronized[int], parent: int, jobs: int) -> None:
    """Leaves signals to the parent, does not outlive it, and keeps to its share of the cores."""
    os.environ[CORES] = str(max(1, available_cores() // jobs))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _worker.update(stop=stop, rounds=rounds)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Counter(Callback):
    """Adds to the rounds that all workers have done."""

    def __init__(self, rounds: Synchronized[int]) -> None:
        self._rounds = rounds
        self._counted = 0

    def on_start(self, names: list[str], first_round: int, rounds: int) -> None:
        self._add(first_round - 1)

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        self._add(metrics["round"])

    def _add(self, round: int) -> None:
        with self._rounds.get_lock():
            self._rounds.value += round - self._counted
        self._counted = round


def _run_unit(cells: Sequence[Cell], out: Path, device: str) -> dict[Cell, str]:
    """In a worker: runs cells; returns what went wrong with those that failed."""
    stop: Event = _worker["stop"]
    if stop.is_set():
        return {}
    try:
        return run_cells(cells, Place(out, device, lambda: _Counter(_worker["rounds"]), stop.is_set))
    except Interrupted:
        return {}


def _outcome(future: Future[dict[Cell, str]], unit: Sequence[Cell]) -> dict[Cell, str]:
    try:
        return future.result()
    except BrokenProcessPool:
        return {unit[0]: "the process that ran it, or one beside it, died; is there enough memory? Run again to go on"}
