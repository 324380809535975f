"""How long a run has taken, and what of that went into checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

CHECKPOINT_SHARE = 0.02
"""How much of the run time automatic checkpoints may take."""


class Clock:
    """Seconds of training, over all the processes that a run took."""

    def __init__(self) -> None:
        self.before = 0.0
        """Seconds that earlier processes of this run took."""
        self._started = time.perf_counter()
        self._spent = 0.0
        self._last_cost: float | None = None

    def start(self) -> None:
        """Begins to count."""
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return self.before + time.perf_counter() - self._started

    def affords_checkpoint(self, size: int) -> bool:
        """Whether another checkpoint, of about `size` bytes, keeps all of them within their share of the time."""
        guess = 0.02 + size / 100e6  # before the first one has shown what it costs
        cost = guess if self._last_cost is None else self._last_cost
        return self._spent + cost <= CHECKPOINT_SHARE * (time.perf_counter() - self._started)

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Measures the writing of a checkpoint."""
        began = time.perf_counter()
        yield
        self._last_cost = time.perf_counter() - began
        self._spent += self._last_cost
