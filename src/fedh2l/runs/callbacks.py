"""Callbacks that observe a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedh2l.runs.result import Result


class Callback:
    """Base class of callbacks. Override the methods of the events to observe.

    A callback cannot change the training. It can stop the training by raising an exception. `on_round` is called in
    every round and should be fast.
    """

    def on_start(self, names: list[str], first_round: int, rounds: int) -> None:
        """Called before the first round, or before the first after a resume."""

    def on_round(self, round: int) -> None:
        """Called after each round."""

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        """Called after each evaluation. `metrics` is the content of a line of metrics.jsonl."""

    def on_checkpoint(self, round: int, path: Path) -> None:
        """Called when a checkpoint is on disk."""

    def on_end(self, result: Result) -> None:
        """Called when the run is complete."""
