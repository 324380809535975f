"""Looking on while a federation trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedh2l.result import Result


class Callback:
    """Override what you want to hear of. A callback looks on: it cannot change the training, only end it by raising.

    `on_round` is called in every round and should be quick.
    """

    def on_start(self, names: list[str], first_round: int, rounds: int) -> None:
        """Before the first round, or the first after a resume."""

    def on_round(self, round: int) -> None:
        """A round is done."""

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        """An evaluation is done; `metrics` is what a line of metrics.jsonl holds."""

    def on_checkpoint(self, round: int, path: Path) -> None:
        """A checkpoint is on disk."""

    def on_end(self, result: Result) -> None:
        """The run is complete."""
