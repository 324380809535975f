"""Output of tables as Markdown, LaTeX, CSV and JSON, and on the terminal, from one grid of text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from fedh2l.bench.plot import frontier_svg
from fedh2l.bench.statistics import Difference, Summary
from fedh2l.bench.suite import Suite
from fedh2l.bench.tables import Line, Table
from fedh2l.files import write_atomically
from fedh2l.methods.base import Method
from fedh2l.methods.registry import find_method
from fedh2l.report.tables import human_bytes
from fedh2l.training.metrics import METRICS

NOTHING = "–"
LEFT_OUT = ("CDP −", "paper", "in all", "sends")
"""Columns that are not shown on the terminal."""
WIDE = 100
"""Terminal width in characters that has room for one more column."""


@dataclass(frozen=True)
class Entry:
    """One cell of a printed table."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """A printed table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]


@dataclass(frozen=True)
class Report:
    """All tables of a benchmark."""

    suite: str
    caption: str
    tables: Sequence[Table]
    grids: Sequence[Grid]
    plot: bool = False
    """Whether to draw accuracy against bytes."""

    @staticmethod
    def of(suite: Suite, tables: Sequence[Table], caption: str) -> Report:
        """Return the tables of averages, of nodes and, if the suite has it, of the methods' properties."""
        grids = [_averages(table, suite.frontier) for table in tables] + [_per_node(table) for table in tables]
        if suite.capabilities and tables:
            grids.insert(0, _capabilities(tables[0]))
        return Report(suite.name, caption, tables, grids, suite.frontier)

    def write(self, folder: Path) -> list[Path]:
        formats: dict[str, Callable[[], str]] = {
            "md": self.markdown, "tex": self.latex, "csv": self.csv, "json": self.json,
        }  # fmt: skip
        if self.plot:
            formats["svg"] = lambda: frontier_svg(self.tables)
        paths = []
        for suffix, render in formats.items():
            path = folder / f"{self.suite}.{suffix}"
            write_atomically(path, render().encode())
            paths.append(path)
        return paths

    def rich(self, width: int) -> list[RichTable]:
        """Return tables of the averages for a terminal, with the columns that fit. Files have all columns."""
        left_out = LEFT_OUT if width >= WIDE else (*LEFT_OUT, "bytes")
        shown = []
        for grid in self.grids[: len(self.grids) - len(self.tables)]:
            table = RichTable(title=grid.title)
            places = [place for place, column in enumerate(grid.columns) if not column.startswith(left_out)]
            for place in places:
                table.add_column(
                    grid.columns[place],
                    justify="right" if place else "left",
                    no_wrap=place > 0,
                    min_width=0 if place else 12,
                )
            for row in grid.rows:
                table.add_row(*(Text(row[p].text, style="bold" if row[p].best else "") for p in places))
            shown.append(table)
        shown[-1].caption = self.caption
        return shown

    def markdown(self) -> str:
        parts = []
        for grid in self.grids:
            lines = [f"### {grid.title}", "", _pipe(grid.columns), _pipe(["---"] * len(grid.columns))]
            lines += [_pipe([f"**{e.text}**" if e.best else e.text for e in row]) for row in grid.rows]
            parts.append("\n".join(lines))
        return "\n\n".join([*parts, self.caption]) + "\n"

    def latex(self) -> str:
        """Return tables for booktabs. Marked rows need amssymb."""
        parts = []
        for grid in self.grids:
            rows = [" & ".join(_tex(e.text, e.best) for e in row) + r" \\" for row in grid.rows]
            parts.append(
                "\n".join(
                    [
                        r"\begin{table}",
                        r"\centering",
                        rf"\caption{{{_tex(grid.title)}. {_tex(self.caption)}}}",
                        rf"\begin{{tabular}}{{l{'r' * (len(grid.columns) - 1)}}}",
                        r"\toprule",
                        " & ".join(_tex(column) for column in grid.columns) + r" \\",
                        r"\midrule",
                        *rows,
                        r"\bottomrule",
                        r"\end{tabular}",
                        r"\end{table}",
                    ]
                )
            )
        return "\n\n".join(parts) + "\n"

    def csv(self) -> str:
        """Return one line per number, in long form for other programs."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            ["suite", "table", "row", "method", "node", "metric", "seeds", "mean", "deviation", "difference",
             "interval_low", "interval_high", "paper", "bytes_per_round", "bytes_total", "bytes_multicast"]
        )  # fmt: skip
        for table in self.tables:
            for line in table.lines:
                for node, metrics in {"average": line.average, **line.nodes}.items():
                    for metric, summary in metrics.items():
                        difference = line.difference.get(metric) if node == "average" else None
                        paper = (line.paper or {}).get(metric, "") if node == "average" else ""
                        writer.writerow(
                            [self.suite, table.title, line.label, line.method, node, metric, len(line.seeds),
                             summary.mean, _blank(summary.deviation), *_interval(difference), paper,
                             line.bytes_per_round, line.bytes_total, line.bytes_multicast]
                        )  # fmt: skip
        return text.getvalue()

    def json(self) -> str:
        tables = [{"title": table.title, "rows": [_line_json(line) for line in table.lines]} for table in self.tables]
        return json.dumps({"suite": self.suite, "caption": self.caption, "tables": tables}, indent=1) + "\n"


def _averages(table: Table, frontier: bool) -> Grid:
    """Return the table of averages. With `frontier`, mark rows that no other row beats with fewer bytes."""
    first, front = table.lines[0].label, table.front() if frontier else set()
    columns = ["", *METRICS, f"ACC − {first}", f"CDP − {first}", "paper: ACC / WDP / CDP", "bytes a round", "in all"]
    rows = []
    for line in table.lines:
        scores = [Entry(_mean(line.average.get(metric)), _is_best(table, line, metric)) for metric in METRICS]
        paper = " / ".join(f"{line.paper[metric]:.2f}" for metric in METRICS) if line.paper else ""
        traffic = [human_bytes(line.bytes_per_round), human_bytes(line.bytes_total)] if line.seeds else ["", ""]
        differences = [_difference(line.difference.get(metric)) for metric in ("ACC", "CDP")]
        mark = " ◆" if line.label in front else ""
        rows.append([Entry(_label(line, table) + mark), *scores, *map(Entry, [*differences, paper, *traffic])])
        for view, metrics in line.views.items():
            values = [Entry(_mean(metrics[metric])) for metric in METRICS]
            rows.append([Entry(f"{line.label}: its {view}"), *values, *map(Entry, [""] * 5)])
    return Grid(f"{table.title}: averages over the nodes", columns, rows)


def _per_node(table: Table) -> Grid:
    names = list(dict.fromkeys(name for line in table.lines for name in line.nodes))
    rows = []
    for line in table.lines:
        entries = [Entry(line.label)]
        for name in names:
            metrics = line.nodes.get(name)
            entries.append(Entry(" / ".join(f"{metrics[m].mean:.2f}" for m in METRICS) if metrics else NOTHING))
        rows.append(entries)
    return Grid(f"{table.title}: each node's ACC / WDP / CDP", ["", *names], rows)


def _capabilities(table: Table) -> Grid:
    """Return the declared properties of each method and its bytes."""
    columns = [
        "", "any models", "no server", "no weights", "no samples", "sends",
        "bytes a round", "in all", "ACC",
    ]  # fmt: skip
    rows = []
    for line in table.lines:
        method: type[Method] = find_method(line.method)
        declared = (
            method.heterogeneous, method.decentralised, method.parameter_free(), method.keeps_private_data(),
        )  # fmt: skip
        marks = [holds if isinstance(holds, str) else "yes" if holds else "no" for holds in declared]
        traffic = [human_bytes(line.bytes_per_round), human_bytes(line.bytes_total)] if line.seeds else ["", ""]
        sends = ", ".join(method.sends) or "nothing"
        rows.append([Entry(text) for text in (line.label, *marks, sends, *traffic, _mean(line.average.get("ACC")))])
    return Grid("What each method is", columns, rows)


def _label(line: Line, table: Table) -> str:
    if not line.takes_part or len(line.seeds) == table.wanted:
        return line.label
    return f"{line.label} ({len(line.seeds)} of {table.wanted} seeds)"


def _is_best(table: Table, line: Line, metric: str) -> bool:
    return bool(line.average) and round(line.average[metric].mean, 2) == table.best(metric)


def _mean(summary: Summary | None) -> str:
    if summary is None:
        return NOTHING
    spread = "" if summary.deviation is None else f" ± {summary.deviation:.2f}"
    return f"{summary.mean:.2f}{spread}"


def _difference(difference: Difference | None) -> str:
    if difference is None:
        return ""
    width = "" if difference.half_width is None else f" ± {difference.half_width:.2f}"
    return f"{difference.mean:+.2f}{width}".replace("-", "−")


def _interval(difference: Difference | None) -> list[float | str]:
    if difference is None:
        return ["", "", ""]
    if difference.half_width is None:
        return [difference.mean, "", ""]
    return [difference.mean, difference.mean - difference.half_width, difference.mean + difference.half_width]


def _blank(value: float | None) -> float | str:
    return "" if value is None else value


def _line_json(line: Line) -> dict[str, Any]:
    def plain(metrics: dict[str, Summary]) -> dict[str, Any]:
        return {name: list(summary.values) for name, summary in metrics.items()}

    return {
        "row": line.label,
        "method": line.method,
        "takes_part": line.takes_part,
        "seeds": list(line.seeds),
        "average": plain(line.average),
        "last": plain(line.last),
        "nodes": {name: plain(metrics) for name, metrics in line.nodes.items()},
        "views": {name: plain(metrics) for name, metrics in line.views.items()},
        "validation": list(line.validation.values) if line.validation else [],
        "difference": {metric: {"mean": d.mean, "half_width": d.half_width} for metric, d in line.difference.items()},
        "paper": dict(line.paper) if line.paper else None,
        "bytes_per_round": line.bytes_per_round,
        "bytes_multicast": line.bytes_multicast,
        "bytes_total": line.bytes_total,
        "conflict_rate": line.conflict_rate,
        "seconds": line.seconds,
    }


def _pipe(fields: Sequence[str]) -> str:
    return "| " + " | ".join(fields) + " |"


_TEX = {
    **{character: rf"\{character}" for character in "{}$%&_#"},
    **{"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}"},
    **{"◆": r"$\blacklozenge$", "±": r"$\pm$", "−": r"$-$", "–": "--", "α": r"$\alpha$", "μ": r"$\mu$"},
}


def _tex(text: str, bold: bool = False) -> str:
    escaped = "".join(_TEX.get(character, character) for character in text)
    return rf"\textbf{{{escaped}}}" if bold else escaped
