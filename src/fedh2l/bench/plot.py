"""Accuracy against bytes as a picture (SVG), one panel a table; drawn here, so that nothing else is needed for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from fedh2l.bench.tables import Line, Table
from fedh2l.reporting.tables import human_bytes

WIDTH, HEIGHT = 560, 400
LEFT, RIGHT, TOP, BOTTOM = 52, 32, 34, 46
LEGEND = 22
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f", "#bcbd22", "#000000")
"""That most people can tell apart."""


def frontier_svg(tables: Sequence[Table]) -> str:
    """ACC over all bytes that crossed, mean and spread over seeds; what nothing beats at fewer bytes is joined."""
    methods = list(dict.fromkeys(line.method for table in tables for line in table.lines if line.average))
    colours = {method: COLOURS[place % len(COLOURS)] for place, method in enumerate(methods)}
    panels = [_Panel(table, colours).drawn(place * WIDTH) for place, table in enumerate(tables)]
    width, height = WIDTH * max(len(tables), 1), HEIGHT + LEGEND
    legend = [
        f'<circle cx="{LEFT + 110 * i}" cy="{HEIGHT + 8}" r="4" fill="{colour}"/>'
        f'<text x="{LEFT + 8 + 110 * i}" y="{HEIGHT + 12}">{escape(method)}</text>'
        for i, (method, colour) in enumerate(colours.items())
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


class _Panel:
    def __init__(self, table: Table, colours: dict[str, str]) -> None:
        self.table, self.colours = table, colours
        self.lines = [line for line in table.lines if line.average]
        sent = [math.log10(line.bytes_total) for line in self.lines if line.bytes_total > 0] or [0.0]
        self.first, self.last = math.floor(min(sent)) - 1, max(math.ceil(max(sent)), math.floor(min(sent)) + 1)
        """Powers of ten; those who send nothing stand on the first."""
        scores = [line.average["ACC"].mean for line in self.lines] or [0.0, 100.0]
        self.low, self.high = 5 * math.floor(min(scores) / 5), 5 * math.ceil((max(scores) + 0.5) / 5)

    def drawn(self, left: float) -> str:
        """The panel, moved to its place."""
        parts = [f'<g transform="translate({left} 0)">']
        parts.append(f'<text x="{LEFT}" y="20" font-weight="bold">{escape(self.table.title)}</text>')
        parts += self._axes()
        front = [line for line in self.lines if line.label in self.table.front()]
        joined = " ".join(f"{self._x(line):.1f},{self._y(line):.1f}" for line in sorted(front, key=_sent))
        parts.append(f'<polyline points="{joined}" fill="none" stroke="#555555" stroke-dasharray="4 3"/>')
        parts += [self._point(line, line in front) for line in self.lines]
        return "\n".join([*parts, "</g>"])

    def _axes(self) -> list[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = []
        for power in range(self.first, self.last + 1):
            x = self._at(power)
            label = "nothing" if power == self.first else human_bytes(10.0**power).replace(".0 ", " ")
            parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#eeeeee"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
        step = 5 if self.high - self.low <= 50 else 10
        for score in range(self.low, self.high + 1, step):
            y = self._height(score)
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#eeeeee"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{score}</text>')
        middle = (LEFT + right) / 2
        parts.append(f'<text x="{middle:.1f}" y="{bottom + 34}" text-anchor="middle">bytes in all</text>')
        parts.append(f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})">ACC, %</text>')
        return parts

    def _point(self, line: Line, front: bool) -> str:
        x, y, colour = self._x(line), self._y(line), self.colours[line.method]
        summary = line.average["ACC"]
        spread = summary.deviation or 0.0
        ends = [self._height(min(max(summary.mean + side * spread, self.low), self.high)) for side in (-1, 1)]
        told = f"{line.label}: {summary.mean:.2f} %, {human_bytes(line.bytes_total)}"
        bar = f'<line x1="{x:.1f}" y1="{ends[0]:.1f}" x2="{x:.1f}" y2="{ends[1]:.1f}" stroke="{colour}"/>'
        fill, radius = (colour, 4.5) if front else ("white", 3.5)
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{colour}"/>'
        name = f'<text x="{x + 6:.1f}" y="{y - 6:.1f}" font-size="9">{escape(line.label)}</text>' if front else ""
        return f"<g><title>{escape(told)}</title>{bar}{dot}{name}</g>"

    def _at(self, power: float) -> float:
        return LEFT + (power - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def _x(self, line: Line) -> float:
        return self._at(math.log10(line.bytes_total) if line.bytes_total > 0 else self.first)

    def _height(self, score: float) -> float:
        return TOP + (self.high - score) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def _y(self, line: Line) -> float:
        return self._height(line.average["ACC"].mean)


def _sent(line: Line) -> float:
    return line.bytes_total
