"""Accuracy against bytes as a picture (SVG), one panel a table; drawn here, so that nothing else is needed for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from fedh2l.bench.tables import Line, Table
from fedh2l.reporting.tables import human_bytes

WIDTH, HEIGHT = 560, 400
LEFT, RIGHT, TOP, BOTTOM = 52, 32, 34, 46
LEGEND = 22
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f", "#bcbd22", "#000000")
"""That most people can tell apart."""
TICKS = (0, 50, 70, 80, 90, 95, 97, 98, 99, 99.5, 99.8, 99.9)
"""Accuracies that may be marked."""
LEAST = 0.05
"""No error is drawn as less than this, in percent, so that it has a logarithm."""
SIZE = 9
"""Of letters at points."""


def frontier_svg(tables: Sequence[Table]) -> str:
    """ACC over all bytes that crossed, mean and spread over seeds; what nothing beats at fewer bytes is joined.

    Bytes and errors are both on logarithmic scales: half the error is as far everywhere.
    """
    names: dict[str, str] = {}
    for line in (line for table in tables for line in table.lines if line.average):
        names.setdefault(line.method, line.label.split(",")[0])
    colours = {method: COLOURS[place % len(COLOURS)] for place, method in enumerate(names)}
    panels = [_Panel(table, colours).drawn(place * WIDTH) for place, table in enumerate(tables)]
    width, height = WIDTH * max(len(tables), 1), HEIGHT + LEGEND
    legend = [
        f'<circle cx="{LEFT + 110 * i}" cy="{HEIGHT + 8}" r="4" fill="{colours[method]}"/>'
        f'<text x="{LEFT + 8 + 110 * i}" y="{HEIGHT + 12}">{escape(name)}</text>'
        for i, (method, name) in enumerate(names.items())
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            f'font-size="11">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *panels,
            *legend,
            "</svg>\n",
        ]
    )


class _Box(NamedTuple):
    """What is taken up on the picture."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        """Whether two overlap."""
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.bottom <= other.top or other.bottom <= self.top)


class _Panel:
    def __init__(self, table: Table, colours: dict[str, str]) -> None:
        self.table, self.colours = table, colours
        self.lines = [line for line in table.lines if line.average]
        sent = [math.log10(line.bytes_total) for line in self.lines if line.bytes_total > 0] or [0.0]
        self.first, self.last = math.floor(min(sent)) - 1, max(math.ceil(max(sent)), math.floor(min(sent)) + 1)
        """Powers of ten; those who send nothing stand on the first."""
        ends = [score for line in self.lines for score in _ends(line)] or [0.0, 90.0]
        self.worst, self.best = _error(min(ends)) * 1.1, _error(max(ends)) / 1.4
        self.taken: list[_Box] = []

    def drawn(self, left: float) -> str:
        """The panel, moved to its place."""
        parts = [f'<g transform="translate({left} 0)">']
        parts.append(f'<text x="{LEFT}" y="20" font-weight="bold">{escape(self.table.title)}</text>')
        parts += self._axes()
        front = sorted((line for line in self.lines if line.label in self.table.front()), key=_sent)
        joined = " ".join(f"{self._x(line):.1f},{self._y(line):.1f}" for line in front)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="#555555" stroke-dasharray="4 3"/>')
        parts += [self._point(line, line in front) for line in self.lines]
        named = [line for line in self.lines if line in front or line is self.lines[0]]
        return "\n".join([*parts, *(self._name(line) for line in sorted(named, key=_sent)), "</g>"])

    def _axes(self) -> list[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = []
        for power in range(self.first, self.last + 1):
            x = self._at(power)
            label = "nothing" if power == self.first else human_bytes(10.0**power).replace(".0 ", " ")
            parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#eeeeee"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
        for score in self._ticks():
            y = self._height(score)
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#eeeeee"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{score:g}</text>')
        middle = (LEFT + right) / 2
        parts.append(f'<text x="{middle:.1f}" y="{bottom + 34}" text-anchor="middle">bytes in all</text>')
        parts.append(f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})">ACC, %</text>')
        return parts

    def _ticks(self) -> list[float]:
        """Accuracies that are marked; if few of the usual ones are in sight, what is at the ends."""
        seen = [float(tick) for tick in TICKS if self.best <= _error(tick) <= self.worst]
        return seen if len(seen) > 1 else [round(100 - self.worst, 1), round(100 - self.best, 1)]

    def _point(self, line: Line, front: bool) -> str:
        x, y, colour = self._x(line), self._y(line), self.colours[line.method]
        low, high = (self._height(score) for score in _ends(line))
        told = f"{line.label}: {line.average['ACC'].mean:.2f} %, {human_bytes(line.bytes_total)}"
        bar = f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
        fill, radius = (colour, 4.5) if front else ("white", 3.5)
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{colour}"/>'
        self.taken.append(_Box(x - radius, y - radius, x + radius, y + radius))
        return f"<g><title>{escape(told)}</title>{bar}{dot}</g>"

    def _name(self, line: Line) -> str:
        """What a point is, near it and where nothing else is yet, with a line to it if that is not next to it."""
        x, y, colour = self._x(line), self._y(line), self.colours[line.method]
        name = line.label.partition(", ")[2] or line.label  # its colour tells the method
        width = 0.62 * SIZE * len(name)
        places = list(_around(x, y, width))
        free = (box for box in places if self._inside(box) and not any(box.meets(other) for other in self.taken))
        box = next(free, places[0])
        self.taken.append(box)
        nearest = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
        far = math.dist(nearest, (x, y)) > SIZE
        leader = f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{nearest[0]:.1f}" y2="{nearest[1]:.1f}" stroke="{colour}"/>'
        size = f'width="{width:.1f}" height="{box.bottom - box.top:.1f}"'
        paper = f'<rect x="{box.left:.1f}" y="{box.top:.1f}" {size} fill="white" opacity="0.7"/>'
        text = f'<text x="{box.left:.1f}" y="{box.bottom - 2:.1f}" font-size="{SIZE}" fill="{colour}">'
        return f"{leader if far else ''}{paper}{text}{escape(name)}</text>"

    def _inside(self, box: _Box) -> bool:
        return box.left >= LEFT and box.right <= WIDTH and box.top >= TOP - SIZE and box.bottom <= HEIGHT - BOTTOM

    def _at(self, power: float) -> float:
        return LEFT + (power - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def _x(self, line: Line) -> float:
        return self._at(math.log10(line.bytes_total) if line.bytes_total > 0 else self.first)

    def _height(self, score: float) -> float:
        share = math.log(_error(score) / self.best) / math.log(self.worst / self.best)
        return TOP + share * (HEIGHT - TOP - BOTTOM)

    def _y(self, line: Line) -> float:
        return self._height(line.average["ACC"].mean)


def _error(score: float) -> float:
    return max(100 - score, LEAST)


def _ends(line: Line) -> tuple[float, float]:
    """A standard deviation below and above the mean."""
    summary = line.average["ACC"]
    spread = summary.deviation or 0.0
    return max(summary.mean - spread, 0.0), min(summary.mean + spread, 100.0)


def _around(x: float, y: float, width: float) -> Iterator[_Box]:
    """Places for words of a width at a point, the best first: beside it, then further and further above and below."""
    height = SIZE + 2
    for step in range(12):
        for left in (x + 7, x - 7 - width, x - width / 2):
            for side in (-1, 1):
                middle = y + side * step * height
                yield _Box(left, middle - height / 2, left + width, middle + height / 2)


def _sent(line: Line) -> float:
    return line.bytes_total
