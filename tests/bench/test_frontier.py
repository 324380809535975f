"""Accuracy against bytes: which rows nothing beats, marked in tables and drawn."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest

from fedh2l.bench.plot import _methods, frontier_svg
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
    words = [text.text for text in texts_of(frontier_svg([table, table]))]
    assert words.count("a < b & c") == 2
    assert {"silent", "cheap", "loud", "nothing"} <= set(words)
    assert "wasteful" not in words


def texts_of(svg):
    return list(ElementTree.fromstring(svg).iter(f"{SVG}text"))


def left_of(name):
    """The left end of a name of five signs, in letters of 7 points."""
    anchor = re.search(r"text-anchor: (\w+)", name.get("style"))[1]
    return float(name.get("x")) - {"start": 0, "middle": 10, "end": 20}[anchor]


def test_the_same_tables_give_the_same_file():
    lines = [Line("$a$", "fedh2l", True, average={"ACC": Summary((84.2, 84.8))}, bytes_total=10)]
    drawn = frontier_svg([Table("x", lines, 2)])
    assert drawn == frontier_svg([Table("x", lines, 2)])
    assert "$a$" in {text.text for text in texts_of(drawn)}  # a name is no formula


def test_methods_differ_in_colour_and_shape():
    lines = [Line(f"m{k}", f"m{k}", True, average={"ACC": Summary((90.0 + k, 91.0))}, bytes_total=k) for k in range(7)]
    styles = [(style["color"], style["marker"]) for style in _methods([Table("x", lines, 2)]).values()]
    assert [len(set(each)) for each in zip(*styles, strict=True)] == [7, 7]


def test_names_of_points_that_are_close_are_apart():
    lines = [
        Line(f"FedH2L+, way {k}", "fedh2l-plus", True, average={"ACC": Summary((97.0 + k / 50, 97.1 + k / 50))})
        for k in range(6)
    ]
    lines = [replace(line, bytes_total=1e6 * 1.05**k) for k, line in enumerate(lines)]
    lines.append(Line("loud", "fedavg", True, average={"ACC": Summary((99.9, 100.0))}, bytes_total=1e9))
    texts = {text.text: text for text in texts_of(frontier_svg([Table("crowded", lines, 2)]))}
    names = [texts[f"way {k}"] for k in range(6)]  # the colour says whose they are
    for (a, b), (c, d) in combinations([(left_of(name), float(name.get("y"))) for name in names], 2):
        assert abs(a - c) > 20 or abs(b - d) >= 7
    assert {"FedH2L+", "loud", "99"} <= set(texts)


def test_a_narrow_picture_has_marks():
    lines = [Line("a", "fedh2l", True, average={"ACC": Summary((84.2, 84.8))}, bytes_total=10)]
    texts = {text.text for text in texts_of(frontier_svg([Table("x", lines, 2)]))}
    assert {"82.5", "89.2"} <= texts


@pytest.mark.parametrize("tables", [[], [Table("empty", [], 3)], [Table("x", [Line("a", "fedh2l", True)], 1)]])
def test_a_picture_of_nothing(tables):
    ElementTree.fromstring(frontier_svg(tables))


@pytest.mark.usefixtures("bench_in_process")
def test_the_frontier_is_drawn_and_marked(cli, tmp_path):
    short = ["--rounds", 4, "--seeds", 1, "--device", "cpu", "--set", "data.per_class=20", "--out", "out"]
    done = cli("bench", "frontier", "--methods", "fedh2l-plus,independent", *short)
    assert done.returncode == 0, done.stderr
    assert "◆" in (tmp_path / "out/frontier.md").read_text()
    assert r"$\blacklozenge$" in (tmp_path / "out/frontier.tex").read_text()
    ElementTree.parse(tmp_path / "out/frontier.svg")
