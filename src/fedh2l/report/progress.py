"""A live view of a run on the terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedh2l.runs.callbacks import Callback
from fedh2l.runs.result import Result

SHOWN_NODES = 8
"""With more nodes than this, their range is shown."""


class _Rate(ProgressColumn):
    """Rounds per second, as estimated by rich."""

    def render(self, task: Task) -> Text:
        """Return the rate, or nothing before there is one."""
        return Text(f"{task.speed:.1f} rounds/s" if task.speed else "", style="dim")


class LiveProgress(Callback):
    """Shows round, rounds per second, time left and each node's validation ACC. Without a terminal, prints lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("left", style="dim"),
            console=console,
        )
        self._validation = Text("", no_wrap=True, overflow="ellipsis")
        self._task = self._progress.add_task("", total=1)
        self._live = Live(Group(self._progress, self._validation), console=console, refresh_per_second=8)
        self._shown = 0.0

    def on_start(self, names: list[str], first_round: int, rounds: int) -> None:
        """Show the bar at the first round."""
        self._progress.update(self._task, total=rounds, completed=first_round - 1)
        if self.console.is_terminal:
            self._live.start()

    def on_round(self, round: int) -> None:
        """Move the bar, at most ten times per second."""
        now = time.monotonic()
        if now - self._shown > 0.1:
            self._shown = now
            self._progress.update(self._task, completed=round)

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        """Show the ACC of each node on pooled validation data."""
        text = f"validation ACC  {_summary({n: node['validation_ACC'] for n, node in metrics['nodes'].items()})}"
        self._progress.update(self._task, completed=metrics["round"])
        self._validation.plain = text
        if not self.console.is_terminal:
            self.console.print(f"round {metrics['round']}: {text}", highlight=False, soft_wrap=True)

    def on_end(self, result: Result) -> None:
        """Stop the live view."""
        self.close()

    def close(self) -> None:
        """Stop the live view, also after an error."""
        self._live.stop()


def _summary(accuracies: dict[str, float]) -> str:
    if len(accuracies) <= SHOWN_NODES:
        return "  ".join(f"{name} {accuracy:.1f}" for name, accuracy in accuracies.items())
    values = sorted(accuracies.values())
    return f"{values[0]:.1f} to {values[-1]:.1f}, median {values[len(values) // 2]:.1f} of {len(values)} nodes"
