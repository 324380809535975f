"""The parts of a benchmark: tables, rows, and the settings of a row's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedh2l.experiment.presets import Changes

Scores = Mapping[str, float]
"""ACC, WDP and CDP in percent."""


@dataclass(frozen=True)
class Row:
    """One row of a table.

    With several `choices`, all of them are run. The row shows the one with the best mean ACC on validation data.
    """

    label: str
    method: str
    choices: Mapping[str, Changes] = field(default_factory=lambda: {"": ()})
    """Settings by their name in the label."""
    paper: Scores | None = None
    """Scores in the paper."""

    @staticmethod
    def of(label: str, method: str, *changes: str, paper: Scores | None = None) -> Row:
        return Row(label, method, {"": changes}, paper)


@dataclass(frozen=True)
class TableSpec:
    """Rows with the same data. All rows are compared to the first."""

    title: str
    rows: Sequence[Row]
    changes: Changes = ()
    """Settings of all runs."""
    defaults: Changes = ()
    """Settings of all runs that the user may change."""


@dataclass(frozen=True)
class Suite:
    """A benchmark with a name."""

    name: str
    summary: str
    tables: Sequence[TableSpec]
    capabilities: bool = False
    """Whether to add a table of the methods' properties."""
    frontier: bool = False
    """Whether to mark and plot the rows that no other row beats with fewer bytes."""
    images: str | None = None
    """The image dataset. If set, the user can choose the models of the nodes."""


SPLITS = ("independent", "aligned")
FOUR_MODELS: Changes = tuple(f"nodes.{i}.model={name}" for i, name in enumerate(("lenet", "lenet-wide", "mlp", "cnn")))
"""A different model on each node."""


def by_splits(rows: Sequence[Row], *changes: str, title: str = "α = 10 %") -> list[TableSpec]:
    """Return a table for independent splits and one for aligned splits."""
    return [TableSpec(f"{title}, {splits} splits", rows, (*changes, f"data.splits={splits}")) for splits in SPLITS]


def scores(acc: float, wdp: float, cdp: float) -> Scores:
    """Return the three metrics, in the paper's order."""
    return {"ACC": acc, "WDP": wdp, "CDP": cdp}
