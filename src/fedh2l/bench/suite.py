"""What a benchmark consists of: tables, their rows, and the runs that a row is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedh2l.presets import Changes

Scores = Mapping[str, float]
"""ACC, WDP and CDP in percent."""


@dataclass(frozen=True)
class Row:
    """One line of a table.

    With several `choices`, all of them are run, and the line shows the one with the best mean ACC on validation data.
    """

    label: str
    method: str
    choices: Mapping[str, Changes] = field(default_factory=lambda: {"": ()})
    """Settings by what to call them in the label."""
    paper: Scores | None = None
    """What the paper prints for it."""

    @staticmethod
    def of(label: str, method: str, *changes: str, paper: Scores | None = None) -> Row:
        """A line of one setting."""
        return Row(label, method, {"": changes}, paper)


@dataclass(frozen=True)
class TableSpec:
    """Lines that are compared with each other, on the same data; the first is what the others are compared with."""

    title: str
    rows: Sequence[Row]
    changes: Changes = ()
    """Settings of all its runs."""
    defaults: Changes = ()
    """Settings of all its runs that a user may change."""


@dataclass(frozen=True)
class Suite:
    """A benchmark that can be named."""

    name: str
    summary: str
    tables: Sequence[TableSpec]
    capabilities: bool = False
    """Whether to say what each method is, beside how it does."""
    frontier: bool = False
    """Whether to say which rows nothing beats at fewer bytes, and to draw them."""
    images: str | None = None
    """The dataset of images that it is about; which models the nodes have can be chosen."""


def scores(acc: float, wdp: float, cdp: float) -> Scores:
    """The three metrics, in the paper's order."""
    return {"ACC": acc, "WDP": wdp, "CDP": cdp}
