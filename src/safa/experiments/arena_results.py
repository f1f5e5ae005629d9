"""What the judging runs of an arena came to: times to targets seed by seed, ratios with intervals, who wins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from safa.analysis.statistics import Interval, mean_interval, paired_ratio
from safa.experiments.arena import Arena, Judged, Row, Run
from safa.experiments.arena_plan import Plan, Win
from safa.runs.table import csv_line

__all__ = ["Ratio", "Results", "Standing", "Verdict", "as_csv"]

_SHARES = ("futility", "starved")
_POINTS = 60  # of a mean curve

_Times = Sequence[Sequence[float | None]]
"""For each target when each run reached it, in the order of the seeds; None where it did not."""


@dataclass(frozen=True)
class Ratio:
    """How many times as long as another protocol one takes to the targets."""

    interval: Interval
    bound: str = ""
    """What is known where targets were not reached, so that the horizon stands for the time: "<=" where the other one
    missed some, ">=" where this one did, "~" where both did."""

    @property
    def verdict(self) -> str:
        """Whether the interval says "faster" or "slower"; empty where it says neither."""
        low, high = self.interval.low, self.interval.high
        if high is not None and high < 1 and self.bound in ("", "<="):
            return "faster"
        return "slower" if low is not None and low > 1 and self.bound in ("", ">=") else ""

    def __str__(self) -> str:
        sign = {"<=": "≤ ", ">=": "≥ ", "~": "~ "}.get(self.bound, "")
        low, high = self.interval.low, self.interval.high
        spread = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
        return f"{sign}{self.interval.mean:.2f}{spread}"


@dataclass(frozen=True)
class Standing:
    """A protocol in a world: its runs on the judging seeds."""

    judged: Judged
    name: str
    held: float

    @property
    def runs(self) -> Sequence[Run]:
        """The runs, in the order of the seeds."""
        return self.judged.runs[self.name]

    def times(self, target: float) -> list[float | None]:
        """When each run reached a target."""
        end = self.judged.tuned.world.horizon_s
        return [run.curve.time_to(target, held_s=self.held * end, until_s=end) for run in self.runs]

    def seconds(self, target: float) -> float | None:
        """The geometric mean of the times to a target; None unless it was reached on every seed."""
        times = self.times(target)
        return math.exp(fmean(math.log(time) for time in times if time)) if all(times) else None

    def ratio(self, other: Standing, targets: Sequence[float] | None = None) -> Ratio | None:
        """How many times as long as another protocol it takes; None where neither reached any of the targets."""
        wanted = self.judged.tuned.targets if targets is None else targets
        mine, theirs = ([standing.times(target) for target in wanted] for standing in (self, other))
        my_all, their_all = ([time for of_target in times for time in of_target] for times in (mine, theirs))
        if not any(my_all) and not any(their_all):
            return None
        bound = {(True, True): "", (True, False): "<=", (False, True): ">=", (False, False): "~"}[
            all(my_all), all(their_all)
        ]
        end = self.judged.tuned.world.horizon_s
        return Ratio(paired_ratio(_joint_times(mine, end), _joint_times(theirs, end)), bound)

    @property
    def seconds_or_end(self) -> float:
        """The geometric mean over all targets and seeds, with the horizon where a target was missed."""
        tuned = self.judged.tuned
        times = _joint_times([self.times(target) for target in tuned.targets], tuned.world.horizon_s)
        return math.exp(fmean(map(math.log, times)))

    @property
    def rank(self) -> tuple[float, float]:
        """The shortest times to the targets come first, of equal ones the best metric at the horizon."""
        sign = -1 if self.judged.tuned.world.higher else 1
        return self.seconds_or_end, sign * self.metric.mean if self.metric else math.inf

    @property
    def metric(self) -> Interval | None:
        """The metric at the horizon."""
        return self._mean([run.curve.at(self.judged.tuned.world.horizon_s) for run in self.runs])

    @property
    def worst_tenth(self) -> Interval | None:
        """The metric of the last model on the data of the worst-served tenth of the clients."""
        return self._mean([_worst_tenth(self.judged, run) for run in self.runs])

    def mean(self, name: str) -> Interval | None:
        """The mean of another metric of the runs."""
        return self._mean([_value(run, name) for run in self.runs])

    def _mean(self, values: Sequence[float | None]) -> Interval | None:
        known = [value for value in values if value is not None]
        return mean_interval(known) if len(known) == len(values) else None


def _worst_tenth(judged: Judged, run: Run) -> float | None:
    value: float | None = run.row.get(f"client_{judged.tuned.world.metric}_worst_decile")
    return value


def _value(run: Run, name: str) -> float:
    return float(run.row["bytes_down"] + run.row["bytes_up"] if name == "bytes" else run.row[name])


@dataclass(frozen=True)
class Verdict:
    """How the protocol that is to win does in a world."""

    world: str
    rival: str
    """Who of the others has the shortest times to the targets here."""
    ratio: Ratio | None
    is_within: bool
    """Whether it takes at most as many times as long as the rival as the plan allows."""
    is_ahead: bool
    """Whether it is faster by the interval."""
    worst_tenth: float | None
    """By how much its worst-served tenth is better than the best of the others'."""
    serves: bool
    """Whether that is as the plan demands."""


class Results:
    """What the judged worlds of an arena came to."""

    def __init__(self, arena: Arena) -> None:
        self.plan: Plan = arena.plan
        self.worlds: dict[str, dict[str, Standing]] = {
            judged.tuned.world.name: {name: Standing(judged, name, arena.plan.targets.held) for name in judged.runs}
            for judged in arena.judged()
        }
        """By world and protocol."""

    @property
    def missing(self) -> list[str]:
        """The worlds of the plan that have not been judged."""
        return [name for name in self.plan.worlds if name not in self.worlds]

    def verdicts(self) -> list[Verdict]:
        """How the protocol that is to win does in every world; nothing where the plan names none."""
        win = self.plan.win
        return [_verdict(name, standings, win) for name, standings in self.worlds.items()] if win else []

    def equal_worlds(self) -> list[tuple[str, str, float | None]]:
        """Pairs of worlds with the same data, and how much better the metric in one is than the best in the other."""
        win = self.plan.win
        pairs = [pair for pair in (win.equal if win else ()) if set(pair) <= self.worlds.keys()]
        return [(first, second, self._beyond(first, second)) for first, second in pairs]

    def _beyond(self, first: str, second: str) -> float | None:
        assert self.plan.win is not None
        own = self.worlds[first][self.plan.win.protocol]
        return _better_by(own, [own.metric], [one.metric for one in self.worlds[second].values()])

    # -- tables ------------------------------------------------------------------------------------------------------

    def run_rows(self) -> list[Row]:
        """A row for every judged run."""
        return [
            self._run_row(standing, place)
            for standings in self.worlds.values()
            for standing in standings.values()
            for place in range(len(standing.runs))
        ]

    def _run_row(self, standing: Standing, place: int) -> Row:
        run, tuned = standing.runs[place], standing.judged.tuned
        end = tuned.world.horizon_s
        times = {f"time_to_target_{n}_s": standing.times(t)[place] for n, t in enumerate(tuned.targets, start=1)}
        return {
            **self._key(standing),
            "seed": run.seed,
            **times,
            "metric_at_end": run.curve.at(end),
            "metric_over_time": run.curve.mean(end),
            **{name: _value(run, name) for name in _SHARES},
            "worst_tenth": _worst_tenth(standing.judged, run),
            "bytes": _value(run, "bytes"),
            "plan": self.plan.digest,
        }

    def _key(self, standing: Standing) -> Row:
        tuned, choice = standing.judged.tuned, standing.judged.tuned.best[standing.name]
        knob = self.plan.entries[standing.name].knob
        return {
            "world": tuned.world.name,
            "protocol": standing.name,
            "lr": choice.lr,
            "knob": knob,
            "value": choice.value,
        }

    def ratio_rows(self) -> list[Row]:
        """A row for every world, protocol, baseline, and target or all targets together."""
        rows = []
        for standings in self.worlds.values():
            for standing in standings.values():
                for name in self.plan.baselines:
                    targets = standing.judged.tuned.targets
                    for wanted in ([*targets], *([target] for target in targets)):
                        what = wanted[0] if len(wanted) == 1 else "all"
                        rows.append(self._ratio_row(standing, name, what, standing.ratio(standings[name], wanted)))
        return rows

    def _ratio_row(self, standing: Standing, baseline: str, target: Any, ratio: Ratio | None) -> Row:
        interval = ratio.interval if ratio else Interval(math.nan)
        return {
            "world": standing.judged.tuned.world.name,
            "protocol": standing.name,
            "baseline": baseline,
            "target": target,
            "times_as_long": interval.mean if ratio else None,
            "low": interval.low,
            "high": interval.high,
            "bound": ratio.bound if ratio else None,
        }

    def tuned_rows(self) -> list[Row]:
        """A row for every world and protocol: what tuning chose, and whether that is at an end of its grid."""
        return [
            self._key(standing)
            | {
                "lr_at_end_of_grid": self.is_at_end(standing),
                "tuning_runs": standing.judged.tuned.runs,
                "targets": " ".join(map(str, standing.judged.tuned.targets)),
            }
            for standings in self.worlds.values()
            for standing in standings.values()
        ]

    def is_at_end(self, standing: Standing) -> bool:
        """Whether the learning rate that was chosen is the lowest or the highest that was tried."""
        rates = standing.judged.tuned.world.rates
        return standing.judged.tuned.best[standing.name].lr in (min(rates), max(rates))

    def curve_rows(self) -> list[Row]:
        """The mean curve of every protocol in every world, over its seeds, at equally many times."""
        return [
            {"world": world, "protocol": name, "time_s": time, "mean": mean}
            for world, standings in self.worlds.items()
            for name, standing in standings.items()
            for time, mean in _mean_curve(standing)
        ]


def _joint_times(times: _Times, end_s: float) -> list[float]:
    """For every seed the geometric mean of the times to the targets; the horizon for those that were missed."""
    return [math.exp(fmean(math.log(time or end_s) for time in of_seed)) for of_seed in zip(*times, strict=True)]


def _mean_curve(standing: Standing) -> list[tuple[float, float]]:
    end = standing.judged.tuned.world.horizon_s
    times = [end * place / _POINTS for place in range(1, _POINTS + 1)]
    values = [(time, [run.curve.at(time) for run in standing.runs]) for time in times]
    return [(time, fmean(v for v in of if v is not None)) for time, of in values if None not in of]


def _verdict(world: str, standings: Mapping[str, Standing], win: Win) -> Verdict:
    own = standings[win.protocol]
    rivals = [standing for name, standing in standings.items() if name != win.protocol]
    best = min(rivals, key=lambda standing: standing.rank)
    ratio = own.ratio(best)
    served = _better_by(own, [own.worst_tenth], [rival.worst_tenth for rival in rivals])
    return Verdict(
        world,
        best.name,
        ratio,
        ratio is not None and ratio.bound != ">=" and ratio.interval.mean <= win.within,
        ratio is not None and ratio.verdict == "faster",
        served,
        served is None or served >= -win.worst_tenth,
    )


def _better_by(standing: Standing, own: Sequence[Interval | None], others: Sequence[Interval | None]) -> float | None:
    """By how much a mean is better than the best of others."""
    sign = 1 if standing.judged.tuned.world.higher else -1
    mine, theirs = ([sign * one.mean for one in many if one is not None] for many in (own, others))
    return mine[0] - max(theirs) if mine and theirs else None


def as_csv(rows: Sequence[Row]) -> bytes:
    """Rows as a table; a column for every name that one of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return csv_line(names) + b"".join(csv_line([row.get(name) for name in names]) for row in rows)
