"""A plot of accuracy against bytes, with one panel per table."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedh2l.bench.tables import Line, Table
from fedh2l.extras import needs
from fedh2l.report.tables import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import RendererBase
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

PANEL, LEGEND = (5.6, 4.0), 0.4
"""Size of a panel, and height of the legend, in inches."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "fedh2l", "text.parse_math": False,
    "font.size": 8.5, "axes.grid": True, "grid.color": "#eeeeee",
}  # fmt: skip
"""Text stays text, and equal tables give equal files."""
Side = Literal["left", "right", "center"]
SIDES: tuple[tuple[float, Side], ...] = ((6, "left"), (-6, "right"), (0, "center"))
"""Positions of names: horizontal offset in points, and alignment."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
"""Okabe and Ito's colours, which colour-blind people can distinguish, and grey."""
MARKERS = "osD^vPXhp<>*"
"""Marker of each method."""
TICKS = (0, 50, 70, 80, 90, 95, 97, 98, 99, 99.5, 99.8, 99.9)
"""Possible ticks of the accuracy axis."""
LEAST = 0.05
"""Smallest error that is drawn, in percent, because zero has no logarithm."""


def frontier_svg(tables: Sequence[Table]) -> str:
    """Plot ACC over total bytes: means, standard deviations over seeds, and the front as a dashed line.

    Both axes are logarithmic, so half the bytes or half the error is the same distance everywhere.
    """
    needs("bench", "matplotlib")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        count, (width, height) = max(len(tables), 1), PANEL
        figure = Figure((width * count, height + LEGEND), dpi=72)  # the resolution of SVG files
        canvas = FigureCanvasAgg(figure)
        methods = _methods(tables)
        panels = [_Panel(table, figure.add_subplot(1, count, k + 1), methods) for k, table in enumerate(tables)]
        bottom, top = (LEGEND + 0.5) / (height + LEGEND), 1 - 0.3 / (height + LEGEND)
        figure.subplots_adjust(0.55 / width / count, bottom, 1 - 0.3 / width / count, top, 0.15)
        for panel in panels:
            panel.draw(canvas.get_renderer())
        shown = {label: handle for panel in panels for handle, label in zip(*panel.legend(), strict=True)}
        figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=8, frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _methods(tables: Sequence[Table]) -> dict[str, dict[str, Any]]:
    """Return name, colour and marker by method."""
    names: dict[str, str] = {}
    for line in (line for table in tables for line in table.lines if line.average):
        names.setdefault(line.method, line.label.split(",")[0])
    return {
        method: {"label": name, "color": COLOURS[k % len(COLOURS)], "marker": MARKERS[k % len(MARKERS)]}
        for k, (method, name) in enumerate(names.items())
    }


class _Panel:
    """One table: a point per row, the front, and the names of rows."""

    def __init__(self, table: Table, axes: Axes, methods: dict[str, dict[str, Any]]) -> None:
        self.axes, self.methods = axes, methods
        self.lines = [line for line in table.lines if line.average]
        front = table.front()
        self.front = sorted((line for line in self.lines if line.label in front), key=lambda line: line.bytes_total)
        sent = [math.log10(line.bytes_total) for line in self.lines if line.bytes_total > 0] or [0.0]
        self.first, self.last = math.floor(min(sent)) - 1, max(math.ceil(max(sent)), math.floor(min(sent)) + 1)
        """Powers of ten. Rows without messages are drawn at the first."""
        axes.set_title(table.title, loc="left", fontweight="bold", fontsize="medium")

    def draw(self, renderer: RendererBase) -> None:
        """Draw axes, points, front and names. The panel's place in the figure must be final."""
        self._scales()
        for line in self.lines:
            self._point(line)
        places = [self._place(line) for line in self.front]
        self.axes.plot(*zip(*places, strict=True) if places else ([], []), "--", color="#555555", linewidth=1, zorder=1)
        names = _Names(self.axes, renderer, [self._place(line) for line in self.lines])
        named = [line for line in self.lines if line in self.front or line is self.lines[0]]
        for line in sorted(named, key=lambda line: line.bytes_total):
            name = line.label.partition(", ")[2] or line.label  # colour and marker identify the method
            names.add(name, self._place(line), self.methods[line.method]["color"])

    def legend(self) -> tuple[list[Any], list[Any]]:
        handles, labels = self.axes.get_legend_handles_labels()
        return handles, labels

    def _scales(self) -> None:
        ends = [score for line in self.lines for score in _ends(line)] or [0.0, 90.0]
        worst, best = _error(min(ends)) * 1.1, _error(max(ends)) / 1.4
        axes, powers = self.axes, range(self.first, self.last + 1)
        axes.set_xscale("log")
        axes.set_yscale("function", functions=(_height, _score))
        axes.set_xlim(10.0 ** (self.first - 0.1), 10.0**self.last)
        axes.set_ylim(100 - worst, 100 - best)
        amounts = [human_bytes(10.0**power).replace(".0 ", " ") for power in powers]
        axes.set_xticks([10.0**power for power in powers], ["nothing", *amounts[1:]])
        marks = [float(tick) for tick in TICKS if best <= _error(tick) <= worst]
        marks = marks if len(marks) > 1 else [round(100 - worst, 1), round(100 - best, 1)]
        axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
        axes.minorticks_off()
        axes.set_xlabel("bytes in all")
        axes.set_ylabel("ACC, %")

    def _point(self, line: Line) -> None:
        x, y = self._place(line)
        low, high = _ends(line)
        style = self.methods[line.method]
        label = style["label"] if style["label"] not in self.legend()[1] else None
        front = line in self.front
        self.axes.errorbar(
            x, y, [[y - low], [high - y]], **{**style, "label": label}, linestyle="none", elinewidth=1,
            markersize=6 if front else 5, markerfacecolor=style["color"] if front else "white",
        )  # fmt: skip

    def _place(self, line: Line) -> tuple[float, float]:
        return line.bytes_total if line.bytes_total > 0 else 10.0**self.first, line.average["ACC"].mean


class _Names:
    """Places the names of points close to them without overlap."""

    def __init__(self, axes: Axes, renderer: RendererBase, points: Sequence[tuple[float, float]]) -> None:
        from matplotlib.transforms import Bbox

        self.axes, self.renderer = axes, renderer
        centres = [axes.transData.transform(point) for point in points]
        self.taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in centres]

    def add(self, name: str, point: tuple[float, float], colour: str) -> None:
        """Write a name. If it is not next to its point, draw a thin line between them."""
        text = self.axes.annotate(
            name, point, (0, 0), textcoords="offset points", va="center", color=colour, fontsize=7,
            bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5},
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
        offsets = list(_offsets())
        for offset in (*offsets, offsets[0]):
            box = self._move(text, *offset)
            inside = all(self.axes.bbox.contains(*corner) for corner in (box.p0, box.p1))
            if inside and not box.count_overlaps(self.taken):
                break
        self.taken.append(box)
        if text.arrow_patch is not None:
            text.arrow_patch.set_visible(abs(offset[1]) > 9)

    def _move(self, text: Annotation, x: float, y: float, side: Side) -> Bbox:
        from matplotlib.text import Text

        text.set_position((x, y))
        text.set_horizontalalignment(side)
        text.update_positions(self.renderer)
        return Text.get_window_extent(text, self.renderer)


def _offsets() -> Iterator[tuple[float, float, Side]]:
    """Yield offsets of a name in points, best first: left or right of the point, then further above and below."""
    for step in range(14):
        for x, side in SIDES:
            yield x, 9.0 * step, side
            yield x, -9.0 * step, side


def _error(score: float) -> float:
    return max(100 - score, LEAST)


def _height(score: Any) -> Any:
    """Return the negative logarithm of the error, so better is higher."""
    return -np.log10(np.maximum(100 - np.asarray(score, float), LEAST))


def _score(height: Any) -> Any:
    return 100 - 10 ** -np.asarray(height, float)


def _ends(line: Line) -> tuple[float, float]:
    """Return the mean minus and plus one standard deviation."""
    summary = line.average["ACC"]
    spread = summary.deviation or 0.0
    return max(summary.mean - spread, 0.0), min(summary.mean + spread, 100.0)
