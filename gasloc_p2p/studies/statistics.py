"""Means, paired differences, their intervals, and what these say about a claim."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["holds", "does not hold", "not decided"]

T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The .975 quantile of Student's t for 1 to 30 degrees of freedom.

Source: NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.6.7.2, table of critical
values of Student's t distribution.
"""

NORMAL_QUANTILE = 1.960
"""The .975 quantile of the normal distribution, used above 30 degrees of freedom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean with its two-sided 95 % t-interval.

    Attributes:
        mean: mean of the values.
        half_width: half the length of the interval; None for a single value, which has none.
        count: how many values.
    """

    mean: float
    half_width: float | None
    count: int

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return None if self.half_width is None else self.mean + self.half_width


def t_quantile(degrees: int) -> float:
    """Return the .975 quantile of Student's t with `degrees` (at least 1) of freedom."""
    return T_QUANTILES[degrees - 1] if degrees <= len(T_QUANTILES) else NORMAL_QUANTILE


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of `values` with its 95 % t-interval; None when there are none."""
    if not values:
        return None
    count = len(values)
    if count == 1:
        return Estimate(mean=values[0], half_width=None, count=1)
    half_width = t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Estimate(mean=statistics.fmean(values), half_width=half_width, count=count)


def relative_difference(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """Return the paired difference of (value, baseline) in percent of the baseline."""
    return estimate([100 * (value - baseline) / baseline for value, baseline in pairs])


def at_most(difference: Estimate | None, limit: float) -> Verdict:
    """Judge the claim that a difference is at most `limit`.

    It holds when the whole interval lies at or below the limit, does not hold when the whole
    interval lies above it, and is not decided when the interval straddles it or there is none.
    """
    if difference is None or difference.low is None or difference.high is None:
        return "not decided"
    if difference.high <= limit:
        return "holds"
    return "does not hold" if difference.low > limit else "not decided"


def at_least(difference: Estimate | None, limit: float) -> Verdict:
    """Judge the claim that a difference is at least `limit`, by the same rule as `at_most`."""
    if difference is None or difference.low is None or difference.high is None:
        return "not decided"
    if difference.low >= limit:
        return "holds"
    return "does not hold" if difference.high < limit else "not decided"
