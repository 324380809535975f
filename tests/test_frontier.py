"""Accuracy against bytes: which rows nothing beats, marked in tables and drawn."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest

from fedh2l.bench.plot import frontier_svg
from fedh2l.bench.statistics import Summary
from fedh2l.bench.tables import Line, Table

SVG = "{http://www.w3.org/2000/svg}"


def test_the_front_is_what_nothing_beats_at_fewer_bytes():
    def line(label, sent, *scores):
        return Line(label, "fedh2l", True, average={"ACC": Summary(scores)}, bytes_total=sent)

    lines = [
        line("silent", 0, 50.0, 52.0),
        line("loud", 9e9, 95.0, 97.0),
        line("cheap", 1e5, 90.0, 92.0),
        line("no better", 2e5, 91.0, 91.0),
        line("wasteful", 1e10, 96.0, 96.0),
        Line("not there", "fedavg", takes_part=False),
    ]
    table = Table("a < b & c", lines, 2)
    assert table.front() == {"silent", "cheap", "loud"}
    drawn = ElementTree.fromstring(frontier_svg([table, table]))
    words = ["".join(text.itertext()) for text in drawn.iter(f"{SVG}text")]
    assert words.count("a < b & c") == 2
    assert {"silent", "cheap", "loud", "nothing"} <= set(words)
    assert "wasteful" not in words
    assert len(list(drawn.iter(f"{SVG}title"))) == 2 * 5
    for mark in drawn.iter(f"{SVG}circle"):
        assert 0 <= float(mark.get("cx")) <= 1200
        assert 0 <= float(mark.get("cy")) <= 500


def test_names_of_points_that_are_close_are_apart():
    lines = [
        Line(f"FedH2L+, way {k}", "fedh2l-plus", True, average={"ACC": Summary((97.0 + k / 50, 97.1 + k / 50))})
        for k in range(6)
    ]
    lines = [replace(line, bytes_total=1e6 * 1.05**k) for k, line in enumerate(lines)]
    lines.append(Line("loud", "fedavg", True, average={"ACC": Summary((99.9, 100.0))}, bytes_total=1e9))
    drawn = ElementTree.fromstring(frontier_svg([Table("crowded", lines, 2)]))
    texts = {text.text: text for text in drawn.iter(f"{SVG}text")}
    names = [texts[f"way {k}"] for k in range(6)]  # the colour says whose they are
    places = [(float(name.get("x")), float(name.get("y"))) for name in names]
    assert all(abs(a - c) > 30 or abs(b - d) >= 9 for (a, b), (c, d) in combinations(places, 2))
    assert {"FedH2L+", "loud", "99"} <= set(texts)


def test_a_narrow_picture_has_marks():
    lines = [Line("a", "fedh2l", True, average={"ACC": Summary((84.2, 84.8))}, bytes_total=10)]
    drawn = ElementTree.fromstring(frontier_svg([Table("x", lines, 2)]))
    marks = [text.text for text in drawn.iter(f"{SVG}text") if text.get("text-anchor") == "end"]
    assert marks == ["82.5", "89.2"]


@pytest.mark.parametrize("tables", [[], [Table("empty", [], 3)], [Table("x", [Line("a", "fedh2l", True)], 1)]])
def test_a_picture_of_nothing(tables):
    ElementTree.fromstring(frontier_svg(tables))


def test_the_frontier_is_drawn_and_marked(cli, tmp_path):
    short = ["--rounds", 4, "--seeds", 1, "--device", "cpu", "--set", "data.per_class=20", "--out", "out"]
    done = cli("bench", "frontier", "--methods", "fedh2l-plus,independent", *short)
    assert done.returncode == 0, done.stderr
    assert "◆" in (tmp_path / "out/frontier.md").read_text()
    assert r"$\blacklozenge$" in (tmp_path / "out/frontier.tex").read_text()
    ElementTree.parse(tmp_path / "out/frontier.svg")
