"""Means over seeds: intervals by Student's t distribution, paired comparisons, and an exact sign test.

All settings of a sweep meet the same worlds, one for every seed. So two settings are compared seed by seed: what a
world does to both of them cancels out, and the interval is as narrow as the seeds allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

__all__ = [
    "LEVEL",
    "Interval",
    "mean_interval",
    "paired_difference",
    "paired_ratio",
    "sign_test",
    "t_probability",
    "t_quantile",
]

LEVEL = 0.95
"""The confidence of all intervals."""


@dataclass(frozen=True)
class Interval:
    """A mean, or a ratio, and the interval that covers it; a single value has none."""

    mean: float
    low: float | None = None
    high: float | None = None

    def excludes(self, value: float) -> bool:
        """Whether the interval is on one side of a value; where there is no interval, nothing is excluded."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of independent values with its interval: mean +- t * s / sqrt(n)."""
    count = len(values)
    if not all(map(math.isfinite, values)):
        return Interval(sum(values) / count)
    mean = math.fsum(values) / count
    if count < 2:
        return Interval(mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = t_quantile(count - 1) * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half)


def paired_difference(values: Sequence[float], others: Sequence[float]) -> Interval:
    """By how much `values` are larger than `others`, pair by pair."""
    return mean_interval([value - other for value, other in zip(values, others, strict=True)])


def paired_ratio(values: Sequence[float], others: Sequence[float]) -> Interval:
    """How many times `others` the `values` are, pair by pair: the geometric mean of the ratios.

    The interval is that of the mean logarithm. All values have to be above 0.
    """
    logs = paired_difference([math.log(value) for value in values], [math.log(other) for other in others])
    if logs.low is None or logs.high is None:
        return Interval(_exp(logs.mean))
    return Interval(_exp(logs.mean), _exp(logs.low), _exp(logs.high))


def _exp(power: float) -> float:
    return math.exp(power) if power < 700 else math.inf


def sign_test(wins: int, losses: int) -> float:
    """How likely so uneven a result, or a more uneven one, is if either side wins by chance (two-sided, exact)."""
    count = wins + losses
    tail = sum(math.comb(count, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / (1 << count))


@cache
def t_quantile(degrees: int, level: float = LEVEL) -> float:
    """The t of which Student's distribution has the share `level` between -t and t."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < level:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < level else (low, middle)
    return high


def t_probability(t: float, degrees: int) -> float:
    """The share of Student's distribution between -t and t, for a whole number of degrees of freedom.

    It is a finite sum: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= square * k / (k + 1)
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
