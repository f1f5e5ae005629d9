"""A metric over the time of a run, as steps: a value holds from when it was measured until the next one is."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

__all__ = ["Curve", "mean_curve"]


@dataclass(frozen=True)
class Curve:
    """The times at which a metric changed, in order, and its values from then on.

    Two runs are compared at equal times with it, however often each of them was evaluated.
    """

    times_s: Sequence[float] = ()
    values: Sequence[float] = ()
    higher: bool = True
    """Whether more of the metric is better."""

    @classmethod
    def parse(cls, text: str | None, *, higher: bool = True) -> Curve:
        """The curve that `str` wrote."""
        pairs = [pair.split(":") for pair in (text or "").split()]
        return cls([float(time) for time, _ in pairs], [float(value) for _, value in pairs], higher)

    def __str__(self) -> str:
        """TIME:VALUE for every change, to six digits."""
        pairs = [(f"{time:.6g}", f"{value:.6g}") for time, value in zip(self.times_s, self.values, strict=True)]
        changed = [new for old, new in pairwise([("", ""), *pairs]) if new[1] != old[1]]
        return " ".join(":".join(pair) for pair in changed)

    def at(self, time_s: float) -> float | None:
        """The value at a time; None before the first."""
        known = bisect_right(self.times_s, time_s)
        return self.values[known - 1] if known else None

    def mean(self, until_s: float) -> float:
        """The mean over the time from 0 to `until_s`.

        Before the first value, and where it is NaN, it counts as the worst: 0, or the highest where less is better.
        """
        worst = 0.0 if self.higher else max(filter(math.isfinite, self.values), default=math.inf)
        ends = [min(time, until_s) for time in (*self.times_s, until_s)]
        lengths = [end - start for start, end in pairwise([0.0, *ends])]
        values = [worst if math.isnan(value) else value for value in (worst, *self.values)]
        return math.fsum(length * value for length, value in zip(lengths, values, strict=True) if length) / until_s

    def time_to(self, value: float, *, held_s: float = 0.0, until_s: float = math.inf) -> float | None:
        """When the metric reached a value that it then held for so long, all of it before `until_s`; None if never."""
        since: float | None = None
        for time, now in zip([*self.times_s, until_s], [*self.values, math.nan], strict=True):
            if since is not None and min(time, until_s) - since >= held_s:
                return since
            met = now >= value if self.higher else now <= value
            since = (time if since is None else since) if met and time <= until_s else None
        return None


def mean_curve(
    curves: Sequence[Curve], until_s: float, *, points: int = 120
) -> list[tuple[float, float, float, float]]:
    """Times, and the mean, the lowest and the highest of several curves then; a curve keeps its last value.

    It begins when all curves have a value, and leaves out times at which one of them is not finite.
    """
    changes = sorted({time for curve in curves for time in curve.times_s if time <= until_s} | {until_s})
    times = [*changes[:: -(-len(changes) // points)][:-1], until_s]
    found = [(time, [value for curve in curves if (value := curve.at(time)) is not None]) for time in times]
    return [
        (time, fmean(values), min(values), max(values))
        for time, values in found
        if len(values) == len(curves) > 0 and all(map(math.isfinite, values))
    ]
