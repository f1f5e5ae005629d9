"""Settings of a sweep side by side: means over seeds, and which setting is first to a target.

Two settings are compared seed by seed, since a seed is the same world for both (`safa.analysis.statistics`). Times to a
target are compared as ratios, by the mean of their logarithms: worlds differ in how fast their clients are, which makes
all times longer or shorter by a factor, and the ratio is what remains of that. Metrics are compared as differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safa.analysis.statistics import (
    LEVEL,
    Interval,
    mean_interval,
    paired_difference,
    paired_ratio,
    sign_test,
)
from safa.analysis.targets import Target, higher_is_better
from safa.errors import SafaError

__all__ = [
    "Best",
    "Row",
    "Setting",
    "Standing",
    "by_setting",
    "default_target",
    "rank_by_metric",
    "rank_by_round_length",
    "rank_by_target",
    "with_shared_seeds",
]

Row = dict[str, Any]
_TIME = "time_to_target_s"
_NAMES = ("task", "protocol", "folder")
"""What is called by its value alone."""


@dataclass(frozen=True)
class Setting:
    """A setting of a sweep and its runs, one a seed, in the order of the seeds."""

    values: dict[str, Any]
    """What distinguishes it: the settings that were varied, the seed aside."""
    rows: list[Row]

    @property
    def name(self) -> str:
        """Its values in words."""
        words = [v if isinstance(v, str) and k in _NAMES else f"{k} {v}" for k, v in self.values.items()]
        return ", ".join(words) or "the only setting"

    def numbers(self, metric: str) -> list[float]:
        """What the runs have of a metric; a run that has none is left out."""
        return [row[metric] for row in self.rows if row.get(metric) is not None]

    def mean(self, metric: str) -> Interval | None:
        """The mean of a metric over the seeds; none where a run has no such number."""
        numbers = self.numbers(metric)
        return mean_interval(numbers) if numbers and len(numbers) == len(self.rows) else None

    @property
    def reached(self) -> int:
        """In how many seeds the target was reached."""
        return len(self.numbers(_TIME))

    @property
    def geometric_time_s(self) -> float | None:
        """The geometric mean of the times to the target, over the seeds in which it was reached."""
        times = self.numbers(_TIME)
        return math.exp(math.fsum(map(math.log, times)) / len(times)) if times and _have_logarithms(times) else None

    def times_as_long(self, other: Setting) -> Interval | None:
        """How many times as long as another setting it takes to the target; none unless both reach it in all seeds."""
        times, others = self.numbers(_TIME), other.numbers(_TIME)
        if not len(times) == len(others) == len(self.rows) or not _have_logarithms([*times, *others]):
            return None
        return paired_ratio(times, others)

    def sooner_and_later(self, other: Setting) -> tuple[int, int]:
        """In how many seeds it is at the target before another setting, and in how many after it.

        Where one of them did not reach the target, that is known only if its run was longer than the other's way.
        """
        pairs = list(zip(self.rows, other.rows, strict=True))
        return sum(_is_sooner(a, b) for a, b in pairs), sum(_is_sooner(b, a) for a, b in pairs)

    def ended_before(self, other: Setting) -> bool:
        """Whether a run of it was at its end, without the target, before another setting reached that."""
        pairs = zip(self.rows, other.rows, strict=True)
        return any(a.get(_TIME) is None and b.get(_TIME) is not None and not _is_sooner(b, a) for a, b in pairs)


def _have_logarithms(times: Sequence[float]) -> bool:
    return all(0 < time < math.inf for time in times)


def _is_sooner(row: Row, other: Row) -> bool:
    """Whether a run reached the target before another one did, or was at its end without."""
    time, limit = row.get(_TIME), other.get(_TIME)
    return time is not None and bool(time < ((other.get("virtual_time_s") or 0.0) if limit is None else limit))


def by_setting(varied: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> list[Setting]:
    """The settings of a sweep, in the order of its plan; `varied` has for every row what was varied, and the seed."""
    groups: dict[tuple[Any, ...], list[tuple[Any, Row]]] = {}
    for values, row in zip(varied, rows, strict=True):
        key = tuple((name, value) for name, value in values.items() if name != "seed")
        groups.setdefault(key, []).append((values["seed"], row))
    return [
        Setting(dict(key), [row for _, row in sorted(runs, key=lambda run: run[0])]) for key, runs in groups.items()
    ]


def with_shared_seeds(varied: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of runs that can be compared: settings that have the same seeds, as many runs as possible.

    In a sweep that is not finished, and in several sweeps together, some settings have seeds that others lack.
    """
    groups: dict[tuple[Any, ...], dict[Any, int]] = {}
    for place, values in enumerate(varied):
        key = tuple((name, value) for name, value in values.items() if name != "seed")
        groups.setdefault(key, {})[values["seed"]] = place
    seeds = [frozenset(of) for of in groups.values()]
    chosen = max([*seeds, frozenset.intersection(*seeds)], key=lambda of: len(of) * sum(of <= own for own in seeds))
    return sorted(of[seed] for of in groups.values() if chosen <= of.keys() for seed in chosen)


def default_target(settings: Sequence[Setting], metric: str, *, higher: bool) -> Target | None:
    """The hardest value of a metric that three in four of the settings, but two at least, reached with every seed.

    It is rounded to three digits; None where too few settings have a finite value.
    """
    sign, found = 1 if higher else -1, [setting.numbers(f"best_{metric}") for setting in settings]
    whole = [of for of, setting in zip(found, settings, strict=True) if of and len(of) == len(setting.rows)]
    reached = sorted((min(sign * value for value in of) for of in whole if all(map(math.isfinite, of))), reverse=True)
    needed = max(min(2, len(settings)), int(0.75 * len(settings) + 0.5))
    if len(reached) < needed:
        return None
    return Target(metric, sign * _rounded_down(reached[needed - 1]), higher=higher)


def _rounded_down(value: float) -> float:
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return math.floor(value * 10.0**digits) / 10.0**digits


@dataclass(frozen=True)
class Standing:
    """Where a setting stands behind the first one."""

    setting: Setting
    value: float | None
    """The geometric mean of its times to the target, or the mean of the metric."""
    behind: Interval | None
    """How many times as long as the first it takes, or by how much its metric is worse; None for want of numbers."""
    is_told: bool
    """Whether the seeds allow saying that the first one is ahead of it."""


@dataclass(frozen=True)
class Best:
    """Which setting of a task is the best, and whether the seeds allow saying so."""

    task: str
    target: Target | None
    """What was to be reached; None where the main metric of the last models is compared."""
    metric: str
    standings: list[Standing]
    """The settings, the best one first."""
    note: str = ""
    """What one has to know of the comparison; empty as a rule."""

    @property
    def first(self) -> Setting:
        """The best setting."""
        return self.standings[0].setting

    @property
    def is_certain(self) -> bool:
        """Whether the seeds allow telling the first from the second."""
        return self.is_found and len(self.standings) > 1 and self.standings[1].is_told

    @property
    def is_found(self) -> bool:
        """Whether any run reached the target, if there is one."""
        return self.target is None or self.first.reached > 0

    @property
    def seeds(self) -> int:
        """How many seeds there are."""
        return len(self.first.rows)

    def sentences(self) -> list[str]:
        """The answer in words."""
        if not self.is_found:
            return [self._nobody(), *filter(None, [self.note])]
        return [self._lead(), *([self._second()] if len(self.standings) > 1 else []), *filter(None, [self.note])]

    def _nobody(self) -> str:
        assert self.target is not None
        name, pick = f"best_{self.metric}", max if self.target.higher else min
        seen = [(row[name], s.setting) for s in self.standings for row in s.setting.rows if row.get(name) is not None]
        value, where = pick(seen, key=lambda one: one[0], default=(None, None))
        least = "" if value is None else f"; the best {self.metric} was {value:.4g} ({where.name if where else ''})"
        return f"No setting reached {self.target} in any seed{least}."

    def _lead(self) -> str:
        value, seeds = self.standings[0].value, _seeds(self.seeds)
        if self.target is None:
            return f"{self.first.name} has the best {self.metric} of the last model: {value:.4g} (mean over {seeds})."
        time = "" if value is None else f": after {value:,.0f} s (geometric mean over {_seeds(self.first.reached)})"
        rest = "" if self.first.reached == self.seeds else f"; {_of(self.first)}"
        return f"{self.first.name} is first to {self.target}{time}{rest}."

    def _second(self) -> str:
        second = self.standings[1]
        told = (
            "The seeds allow saying so"
            if self.is_certain
            else f"Cannot tell first from second with {_seeds(self.seeds)}"
        )
        return f"{told}: {second.setting.name} {self._behind(second)}."

    def _behind(self, standing: Standing) -> str:
        """How far a setting is behind the first one."""
        behind = standing.behind
        if behind is None:
            sooner, later = self.first.sooner_and_later(standing.setting)
            return f"{_of(standing.setting)}, and is known to be behind in {sooner} and ahead in {later} of them"
        range_ = "" if behind.low is None else f" ({LEVEL:.0%} interval {behind.low:.3g} to {behind.high:.3g})"
        if self.target is None:
            return f"is worse by {behind.mean:.3g}{range_}"
        return f"takes {behind.mean:.3g} times as long{range_}"

    def __repr__(self) -> str:
        return f"<{' '.join(self.sentences())}>"

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values."""
        return {
            "task": self.task,
            "target": str(self.target) if self.target else None,
            "metric": self.metric,
            "seeds": self.seeds,
            "first": self.first.values if self.is_found else None,
            "is_certain": self.is_certain,
            "settings": [self._standing_json(standing) for standing in self.standings],
            "note": self.note,
        }

    def _standing_json(self, standing: Standing) -> dict[str, Any]:
        names = ("geometric_time_to_target_s", "times_as_long") if self.target else ("mean", "worse_by")
        behind = standing.behind
        interval = None if behind is None or behind.low is None else [_finite(behind.low), _finite(behind.high)]
        reached = {"reached": standing.setting.reached} if self.target else {}
        values = {
            names[0]: _finite(standing.value),
            names[1]: _finite(behind.mean if behind else None),
            "interval": interval,
        }
        return {"setting": standing.setting.values, **reached, **values, "is_told_from_first": standing.is_told}


def _finite(value: float | None) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def _of(setting: Setting) -> str:
    return f"reached it in {setting.reached} of {_seeds(len(setting.rows))}"


def rank_by_target(task: str, settings: Sequence[Setting], target: Target, until: Target | None) -> Best:
    """The settings by the time to a target; those that reach it in fewer seeds come behind."""
    ordered = sorted(settings, key=lambda setting: (-setting.reached, setting.geometric_time_s or 0.0))
    standings = [_standing(setting, ordered[0]) for setting in ordered]
    return Best(task, target, target.metric, standings, _note(ordered, target, until))


def _note(ordered: Sequence[Setting], target: Target, until: Target | None) -> str:
    """What is not known because runs were at their end."""
    ended = [setting.name for setting in ordered[1:] if setting.ended_before(ordered[0])]
    if until and until != target and any(setting.reached < len(setting.rows) for setting in ordered):
        return f"The runs ended when {until} was held, so that what would have come after that is not known."
    if ended:
        return f"Runs were at their last round before the first setting was at the target: {'; '.join(ended)}."
    return ""


def _standing(setting: Setting, first: Setting) -> Standing:
    """Where a setting stands; where not all seeds reached the target, the seeds are counted by the sign test."""
    behind = setting.times_as_long(first)
    sooner, later = first.sooner_and_later(setting)
    is_told = behind.excludes(1.0) if behind else sooner > later and sign_test(sooner, later) <= 1 - LEVEL
    return Standing(setting, setting.geometric_time_s, behind, is_told)


def rank_by_metric(task: str, settings: Sequence[Setting], directions: Mapping[str, str]) -> Best:
    """The settings by the main metric of the last model, or by its loss where there is no metric."""
    metric = next(iter(directions), "loss")
    if any(setting.mean(f"last_{metric}") is None for setting in settings):
        raise SafaError(f"not every run of the sweep has a last {metric}, so that no setting can be called the best")
    return _rank(task, settings, metric, f"last_{metric}", -1 if higher_is_better(metric, directions) else 1)


def rank_by_round_length(task: str, settings: Sequence[Setting]) -> Best:
    """The settings by the mean length of a round, where no model was trained."""
    return _rank(task, settings, "round_length_s", "round_length_s", 1)


def _rank(task: str, settings: Sequence[Setting], metric: str, name: str, sign: int) -> Best:
    """The settings by the mean of a column; with the sign, less of it is better."""
    means = [mean_interval(setting.numbers(name)).mean for setting in settings]
    order = sorted(range(len(means)), key=lambda place: (math.isnan(means[place]), sign * means[place]))
    standings = []
    for place in order:
        numbers, best = ([sign * number for number in settings[of].numbers(name)] for of in (place, order[0]))
        behind = paired_difference(numbers, best)
        standings.append(Standing(settings[place], means[place], behind, behind.excludes(0.0)))
    return Best(task, None, metric, standings)
