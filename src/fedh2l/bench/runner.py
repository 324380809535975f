"""Parallel execution of a benchmark's cells, until all are done or the time limit is reached."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Protocol

from fedh2l.bench.cells import Cell, Place, run_cells
from fedh2l.hardware import CORES, available_cores
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.interrupts import on_interrupt
from fedh2l.runs.trainer import Interrupted

POLL = 0.25
"""Seconds between checks of the clock and the workers."""


class Display(Protocol):
    """Shows the progress of a benchmark."""

    def update(self, rounds: int, cells: int) -> None:
        """Show the number of finished rounds and cells."""


@dataclass
class Outcome:
    """The end of a benchmark."""

    failed: dict[Cell, str] = field(default_factory=dict)
    """Failed cells and their errors."""
    out_of_time: bool = False
    interrupted: bool = False

    @property
    def stopped(self) -> bool:
        return self.out_of_time or self.interrupted


class Workers(ABC):
    """Workers that run cells: processes of this machine, or tasks on a cluster."""

    device: str
    jobs: int
    """Number of units that run at a time."""

    @abstractmethod
    def submit(self, unit: Sequence[Cell]) -> Any:
        """Start a unit of cells. Return its task."""

    @abstractmethod
    def wait(self, tasks: Sequence[Any], seconds: float) -> list[Any]:
        """Return the tasks that are done, after at most `seconds`."""

    @abstractmethod
    def outcome(self, task: Any, unit: Sequence[Cell]) -> dict[Cell, str]:
        """Return the failed cells of a finished task, with their errors."""

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Return the number of rounds that all workers have done."""

    @abstractmethod
    def stop(self) -> None:
        """Ask running cells to save and stop."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers."""


class Runner:
    """Runs units of cells. Cells that are unfinished after `seconds` continue at the next call."""

    def __init__(self, workers: Workers, seconds: float | None, display: Display) -> None:
        self.workers = workers
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.display = display

    def run(self, work: Sequence[Sequence[Cell]]) -> Outcome:
        """Run units of unfinished cells."""
        outcome = Outcome()
        todo, count = list(reversed(work)), 0
        running: dict[Any, Sequence[Cell]] = {}
        asked: list[bool] = []  # the signal handler only sets this flag, since it may run at any point
        try:
            with on_interrupt(lambda: asked.append(True)):
                while todo or running:
                    while todo and len(running) < self.workers.jobs:
                        unit = todo.pop()
                        running[self.workers.submit(unit)] = unit
                    for task in self.workers.wait(list(running), POLL):
                        unit = running.pop(task)
                        count += len(unit)
                        outcome.failed |= self.workers.outcome(task, unit)
                    self.display.update(self.workers.rounds, count)
                    late = self.deadline is not None and time.monotonic() > self.deadline
                    if (asked or late) and not outcome.stopped:
                        outcome.interrupted, outcome.out_of_time = bool(asked), late and not asked
                        todo.clear()
                        self.workers.stop()
        finally:
            self.workers.close()
        return outcome


class Counter(Callback):
    """Reports the finished rounds of one run."""

    def __init__(self, add: Callable[[int], None]) -> None:
        self._add = add
        self._counted = 0

    def on_start(self, names: list[str], first_round: int, rounds: int) -> None:
        self._reach(first_round - 1)

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        self._reach(metrics["round"])

    def _reach(self, round: int) -> None:
        self._add(round - self._counted)
        self._counted = round


class Processes(Workers):
    def __init__(self, out: Path, device: str, jobs: int, keep_models: bool = False) -> None:
        self.out, self.device, self.jobs, self.keep_models = out, device, jobs, keep_models
        context = multiprocessing.get_context("spawn")  # a forked process would share torch's threads and CUDA state
        self._stop: Event = context.Event()
        self._rounds: Synchronized[int] = context.Value("q", 0)
        shared = (self._stop, self._rounds, os.getpid(), jobs)
        self._pool = ProcessPoolExecutor(jobs, context, _start_worker, shared)

    def submit(self, unit: Sequence[Cell]) -> Future[dict[Cell, str]]:
        try:
            return self._pool.submit(_run_unit, unit, self.out, self.device, self.keep_models)
        except BrokenProcessPool as error:
            failed: Future[dict[Cell, str]] = Future()
            failed.set_exception(error)
            return failed

    def wait(self, tasks: Sequence[Any], seconds: float) -> list[Any]:
        return list(wait(tasks, seconds, FIRST_COMPLETED)[0])

    def outcome(self, task: Future[dict[Cell, str]], unit: Sequence[Cell]) -> dict[Cell, str]:
        """Return the process's result, or an error if it died."""
        try:
            return task.result()
        except BrokenProcessPool:
            why = "its process or a parallel one died. Is there enough memory? Repeat the command to continue"
            return {unit[0]: why}

    @property
    def rounds(self) -> int:
        return self._rounds.value

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


_worker: dict[str, Any] = {}


def _start_worker(stop: Event, rounds: Synchronized[int], parent: int, jobs: int) -> None:
    """Prepare a worker: ignore signals, end with the parent, and use its share of the cores."""
    os.environ[CORES] = str(max(1, available_cores() // jobs))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _worker.update(stop=stop, rounds=rounds)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_unit(cells: Sequence[Cell], out: Path, device: str, keep_models: bool) -> dict[Cell, str]:
    """Run cells in a worker. Return the errors of failed cells."""
    stop: Event = _worker["stop"]
    if stop.is_set():
        return {}
    try:
        return run_cells(cells, Place(out, device, lambda: Counter(_add), stop.is_set, keep_models))
    except Interrupted:
        return {}


def _add(rounds: int) -> None:
    done: Synchronized[int] = _worker["rounds"]
    with done.get_lock():
        done.value += rounds
