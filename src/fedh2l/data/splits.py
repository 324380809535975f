"""Splits of one domain's samples into private, public, validation and test data."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedh2l.errors import DataError
from fedh2l.protocol.sampling import shuffled


@dataclass(frozen=True)
class Shares:
    """Shares of a domain: `public` (the paper's α), `validation`, `test`. The rest is private."""

    public: float = 0.10
    validation: float = 0.10
    test: float = 0.15

    def __post_init__(self) -> None:
        if min(self.public, self.validation, self.test) <= 0 or self.public + self.validation + self.test >= 1:
            raise DataError(f"shares {self} must each be above 0 and together leave something private (sum below 1)")


DEFAULT_SHARES = Shares()


def rounded(number: float) -> int:
    """Round to the nearest integer, halves up."""
    return math.floor(number + 0.5)


def by_class(positions: Iterable[int], labels: Sequence[int]) -> dict[int, list[int]]:
    """Group positions by their label, in the order of labels."""
    found: dict[int, list[int]] = defaultdict(list)
    for position in positions:
        found[labels[position]].append(position)
    return dict(sorted(found.items()))


def stratified_split(
    labels: Sequence[int], shares: Shares, seed: int, domain: str
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the positions of the private, public, validation and test samples, in that order.

    Each class is shuffled by (seed, domain, class) and cut at shares rounded half up. So 100 samples give 65/10/10/15
    by default. A class of two or more samples has at least one public sample, unless test and validation data take them
    all. The union of private and public data does not depend on the public share.
    """
    parts: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
    for label, positions in by_class(range(len(labels)), labels).items():
        order = shuffled(positions, "split", seed, domain, label)
        test, validation, public = (
            rounded(len(order) * share) for share in (shares.test, shares.validation, shares.public)
        )
        if len(order) > 1:
            public = max(public, 1)
        cuts = (0, test, test + validation, test + validation + public, len(order))
        for part, first, last in zip((3, 2, 1, 0), cuts, cuts[1:], strict=False):
            parts[part].extend(order[first:last])
    return parts
