"""A live view of a run on the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedh2l.callbacks import Callback
from fedh2l.result import Result


class _Rate(ProgressColumn):
    """Rounds a second, from rich's own estimate."""

    def render(self, task: Task) -> Text:
        """The rate, once there is one."""
        return Text(f"{task.speed:.1f} rounds/s" if task.speed else "", style="dim")


class LiveProgress(Callback):
    """Round, rounds a second, time left, and validation ACC of each node; plain lines where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            _Rate(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[validation]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task("", total=1, validation="")
        self._shown = 0.0

    def on_start(self, names: list[str], first_round: int, rounds: int) -> None:
        """Shows the bar, where the run stands."""
        self.progress.update(self._task, total=rounds, completed=first_round - 1)
        self.progress.start()

    def on_round(self, round: int) -> None:
        """Moves the bar, at most ten times a second."""
        now = time.monotonic()
        if now - self._shown > 0.1:
            self._shown = now
            self.progress.update(self._task, completed=round)

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        """Shows how each node does on everybody's validation data."""
        accuracies = " ".join(f"{name} {node['validation_ACC']:.1f}" for name, node in metrics["nodes"].items())
        self.progress.update(self._task, completed=metrics["round"], validation=f"validation ACC  {accuracies}")
        if not self.console.is_terminal:
            self.console.print(f"round {metrics['round']}: validation ACC {accuracies}", highlight=False)

    def on_checkpoint(self, round: int, path: Path) -> None:
        """Says nothing: checkpoints are not news."""

    def on_end(self, result: Result) -> None:
        """Takes the bar away."""
        self.close()

    def close(self) -> None:
        """Takes the bar away, also after an error."""
        self.progress.stop()
