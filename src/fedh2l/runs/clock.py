"""The time of a run, and the part of it that is spent on checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

CHECKPOINT_SHARE = 0.02
"""Largest share of the run time for automatic checkpoints."""


class Clock:
    """Measures the seconds of training, including earlier processes of a resumed run."""

    def __init__(self) -> None:
        self.before = 0.0
        """Seconds in earlier processes of this run."""
        self._started = time.perf_counter()
        self._spent = 0.0
        self._last_cost: float | None = None

    def start(self) -> None:
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return self.before + time.perf_counter() - self._started

    def affords_checkpoint(self, size: int) -> bool:
        """Return whether one more checkpoint of about `size` bytes stays within `CHECKPOINT_SHARE`."""
        guess = 0.02 + size / 100e6  # until the first checkpoint has been timed
        cost = guess if self._last_cost is None else self._last_cost
        return self._spent + cost <= CHECKPOINT_SHARE * (time.perf_counter() - self._started)

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Time the writing of a checkpoint."""
        began = time.perf_counter()
        yield
        self._last_cost = time.perf_counter() - began
        self._spent += self._last_cost
