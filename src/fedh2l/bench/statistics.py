"""Means, spreads, and paired differences with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles of Student's t for 1 to 30 degrees of freedom."""


@dataclass(frozen=True)
class Summary:
    """Values of several seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean."""
        return fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Their standard deviation; of one value there is none."""
        return stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Difference:
    """A mean of paired differences, and its 95 % confidence interval if there are at least two pairs."""

    mean: float
    half_width: float | None

    @staticmethod
    def of(values: Sequence[float], reference: Sequence[float]) -> Difference:
        """Of `values` minus `reference`, seed by seed."""
        differences = [value - other for value, other in zip(values, reference, strict=True)]
        if len(differences) < 2:
            return Difference(fmean(differences), None)
        width = t_quantile(len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
        return Difference(fmean(differences), width)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; beyond 30 degrees of freedom by its expansion around the normal's."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
