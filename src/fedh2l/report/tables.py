"""Tables of results for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from fedh2l.training.metrics import METRICS

if TYPE_CHECKING:
    from fedh2l.methods.base import Method
    from fedh2l.runs.result import Result


def result_table(result: Result, selection_rule: str, data: str = "") -> Table:
    """Return ACC, WDP and CDP of each node and on average, for the selected and the last models."""
    table = Table(title=f"{result.method}, {result.rounds} rounds, seed {result.seed}: test accuracy in %")
    table.add_column("node", no_wrap=True)
    table.add_column("model")
    for metric in METRICS:
        table.add_column(metric, justify="right")
    table.add_column("round", justify="right")
    for metric in METRICS:
        table.add_column(f"last {metric}", justify="right", style="dim")
    for node in result.nodes:
        selected = [f"{value:.2f}" for value in (node.ACC, node.WDP, node.CDP)]
        table.add_row(node.name, short(node.model), *selected, str(node.round), *_numbers(node.last))
    table.add_section()
    table.add_row("average", "", *_numbers(result.average), "", *_numbers(result.last), style="bold")
    for view, values in result.views.items():
        table.add_row(f"average of the {view}", "", *_numbers(values))
    table.caption = (
        f"{f'Data: {data}. ' if data else ''}Selected: {selection_rule}. The round is that of the selected model. "
        "ACC is accuracy on all domains, WDP on the node's own, CDP on the others."
    )
    return table


def matrix_table(names: Sequence[str], matrix: Sequence[Sequence[float]], columns: Sequence[str], title: str) -> Table:
    """Return the accuracy of each node's model on each domain's test data."""
    table = Table(title=title)
    table.add_column("model of")
    for column in columns:
        table.add_column(f"on {column}", justify="right")
    for name, row in zip(names, matrix, strict=True):
        table.add_row(name, *(f"{value:.2f}" for value in row))
    return table


def traffic(result: Result, method: Method) -> str:
    """Return one line about the content and size of all messages."""
    total, rounds = result.bytes["total"], result.rounds
    if total == 0:
        return "Nothing crossed between the nodes."
    where = "between the nodes" if method.decentralised else "between the nodes and the server"
    size = f"{human_bytes(total)} of {method.crossing()} crossed {where}"
    text = f"{size} ({human_bytes(total / rounds)} a round), nothing else"
    if result.conflict_rate:
        text += f"; {100 * result.conflict_rate:.0f} % of the teaching gradients conflicted with the local ones"
    return text + "."


def short(model: str) -> str:
    """Return a model's name without its package."""
    return model.rpartition(":")[2]


def human_bytes(count: float) -> str:
    """Format a number of bytes: 1.5 kB, 20.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _numbers(values: dict[str, float]) -> list[str]:
    return [f"{values[metric]:.2f}" for metric in METRICS]
