"""Tables of numbers from the results of cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedh2l.bench.cells import cells_of, chosen_rows, takes_part
from fedh2l.bench.statistics import Difference, Summary
from fedh2l.bench.suite import Row, Scores, Suite, TableSpec
from fedh2l.experiment.presets import Changes
from fedh2l.training.metrics import METRICS

Metrics = dict[str, Summary]


@dataclass(frozen=True)
class Line:
    """The results of one row. Empty if its runs have not finished or its method cannot run."""

    label: str
    method: str
    takes_part: bool
    seeds: tuple[int, ...] = ()
    average: Metrics = field(default_factory=dict)
    """ACC, WDP and CDP, averaged over nodes."""
    nodes: dict[str, Metrics] = field(default_factory=dict)
    last: Metrics = field(default_factory=dict)
    """Like `average`, for the last models."""
    validation: Summary | None = None
    views: dict[str, Metrics] = field(default_factory=dict)
    bytes_per_round: float = 0.0
    bytes_total: float = 0.0
    """Each receiver's copy counts."""
    bytes_multicast: float = 0.0
    """Each message counts once, for any number of receivers."""
    conflict_rate: float = 0.0
    seconds: float = 0.0
    difference: dict[str, Difference] = field(default_factory=dict)
    """Difference to the table's first row, over the seeds of both."""
    paper: Scores | None = None


@dataclass(frozen=True)
class Table:
    """The rows of one table."""

    title: str
    lines: Sequence[Line]
    wanted: int
    """Number of seeds that each row should have."""

    def best(self, metric: str) -> float | None:
        """Return the highest mean, rounded as printed."""
        means = [round(line.average[metric].mean, 2) for line in self.lines if line.average]
        return max(means, default=None)

    def front(self) -> set[str]:
        """Return the rows that no other row beats, by higher ACC at no more bytes or by equal ACC at fewer bytes."""
        known = [(line.label, line.bytes_total, line.average["ACC"].mean) for line in self.lines if line.average]
        return {
            label
            for label, sent, score in known
            if not any((s <= sent and a > score) or (s < sent and a >= score) for _, s, a in known)
        }


def tables_of(suite: Suite, out: Path, seeds: int, common: Changes, methods: Sequence[str] | None) -> list[Table]:
    tables = []
    for spec in suite.tables:
        rows = chosen_rows(spec, methods)
        if rows:
            lines = [_line(row, spec, out, seeds, common) for row in rows]
            tables.append(Table(spec.title, _compared(lines), seeds))
    return tables


def _line(row: Row, table: TableSpec, out: Path, seeds: int, common: Changes) -> Line:
    if not takes_part(row, table):
        return Line(row.label, row.method, takes_part=False, paper=row.paper)
    found = {
        choice: [r for cell in cells_of(row, table, choice, seeds, common) if (r := cell.result(out)) is not None]
        for choice in row.choices
    }
    seeds_of = {tuple(result["seed"] for result in results) for results in found.values()}
    if len(seeds_of) > 1 or () in seeds_of:  # choices can be compared only on the same seeds
        return Line(row.label, row.method, takes_part=True, paper=row.paper)
    choice = max(found, key=lambda name: _validation(found[name]).mean)
    label = f"{row.label}: {choice}" if choice else row.label
    return _summed_up(label, row, found[choice])


def _summed_up(label: str, row: Row, results: list[dict[str, Any]]) -> Line:
    names = [node["name"] for node in results[0]["nodes"]]
    views = results[0].get("views", {})
    return Line(
        label,
        row.method,
        takes_part=True,
        seeds=tuple(result["seed"] for result in results),
        average=_metrics([result["average"] for result in results]),
        nodes={name: _metrics([result["nodes"][i] for result in results]) for i, name in enumerate(names)},
        last=_metrics([result["last"] for result in results]),
        validation=_validation(results),
        views={view: _metrics([result["views"][view] for result in results]) for view in views},
        bytes_per_round=fmean(result["bytes"]["per_round"] for result in results),
        bytes_total=fmean(result["bytes"]["total"] for result in results),
        bytes_multicast=fmean(result["bytes"]["multicast"] for result in results),
        conflict_rate=fmean(result["conflict_rate"] for result in results),
        seconds=fmean(result["seconds"] for result in results),
        paper=row.paper,
    )


def _compared(lines: Sequence[Line]) -> list[Line]:
    """Return the rows with their differences to the first one."""
    first = lines[0]
    compared = []
    for line in lines:
        both = [seed for seed in line.seeds if seed in first.seeds]
        if line is not first and both:
            differences = {
                metric: Difference.of(_at(line, metric, both), _at(first, metric, both)) for metric in METRICS
            }
            line = replace(line, difference=differences)
        compared.append(line)
    return compared


def _at(line: Line, metric: str, seeds: Sequence[int]) -> list[float]:
    values = dict(zip(line.seeds, line.average[metric].values, strict=True))
    return [values[seed] for seed in seeds]


def _metrics(entries: Sequence[dict[str, Any]]) -> Metrics:
    return {metric: Summary(tuple(entry[metric] for entry in entries)) for metric in METRICS}


def _validation(results: Sequence[dict[str, Any]]) -> Summary:
    """Return ACC on pooled validation data, averaged over nodes."""
    return Summary(tuple(fmean(node["validation"] for node in result["nodes"]) for result in results))
