"""Means, standard deviations, and paired differences with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedh2l.extras import needs


@dataclass(frozen=True)
class Summary:
    """One value per seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Return the standard deviation, or None for one value."""
        return stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Difference:
    """A mean of paired differences, and its 95 % confidence interval if there are at least two pairs."""

    mean: float
    half_width: float | None

    @staticmethod
    def of(values: Sequence[float], reference: Sequence[float]) -> Difference:
        """Return the difference `values` minus `reference`, paired by seed."""
        differences = [value - other for value, other in zip(values, reference, strict=True)]
        if len(differences) < 2:
            return Difference(fmean(differences), None)
        width = t_quantile(len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
        return Difference(fmean(differences), width)


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t."""
    needs("bench", "scipy")
    from scipy import stats

    return float(stats.t.ppf(0.975, freedom))
