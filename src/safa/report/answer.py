"""Which setting of a task is first, and how sure that is, for the top of a page: what `safa best` says, in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from safa.analysis import Target, time_to_target
from safa.analysis.compare import (
    Best,
    Setting,
    Standing,
    by_setting,
    default_target,
    rank_by_metric,
    rank_by_round_length,
    rank_by_target,
    with_shared_seeds,
)
from safa.analysis.statistics import LEVEL, Interval
from safa.analysis.targets import higher_is_better
from safa.errors import SafaError
from safa.report.page import Fact
from safa.report.plan import Plan, directions
from safa.report.tables import EVALUATIONS, Row
from safa.report.words import TIMES, capital, duration, goal, number, some_of

__all__ = ["Answer", "find_answer"]

_TIME = "time_to_target_s"
_CHOSEN = (
    "This page chose that target, as the runs have none in common: it is the {hardest} {metric} that three in four of "
    "the settings reached with every seed. Another one is taken with `--target METRIC=VALUE`."
)


@dataclass(frozen=True)
class Answer:
    """The settings of a task in their order, as far as that is known."""

    task: str
    metric: str
    """The main metric, or the loss where there is none."""
    higher: bool
    """Whether more of it is better."""
    settings: list[Setting]
    """All settings, those that were ranked first, in their order; each with all its runs."""
    best: Best | None
    """None where nothing can be ranked."""
    why: str
    """Why the settings are compared that way, or why they are not; nothing where that is clear."""

    @property
    def target(self) -> Target | None:
        """What was to be reached, if anything was."""
        return self.best.target if self.best else None

    @property
    def unranked(self) -> list[Setting]:
        """Settings that have not the seeds of the others."""
        return self.settings[len(self.best.standings) :] if self.best else []

    def note(self) -> str:
        """What one has to know besides the numbers."""
        left = some_of([setting.name for setting in self.unranked])
        more = f"Not ranked, as they have not the same seeds: {left}." if left else ""
        return " ".join(filter(None, [self.best.note if self.best else "", self.why, more]))

    def headline(self) -> list[Fact]:
        """Who is first, after how long, by how much, and how sure that is."""
        if self.best is None:
            return []
        if not self.best.is_found:
            return _nobody(self.best)
        first = _first_by_target(self.best) if self.best.target else _first_by_metric(self.best)
        if self.target and self.why:
            meaning = "; ".join(filter(None, [first[0].meaning, "the target is this page's choice"]))
            first[0] = replace(first[0], meaning=meaning)
        return first + ([_lead(self.best), _sure(self.best)] if len(self.best.standings) > 1 else [])


# -- finding it --------------------------------------------------------------------------------------------------------


def find_answer(rows: Sequence[Row], plan: Plan, wanted: str | None = None) -> Answer:
    """The answer from the rows of one task; `wanted` is a target to be taken instead of that of the runs."""
    ways, places = directions(rows), [plan.place(row) for row in rows]
    metric = next(iter(ways), "loss")
    compared = with_shared_seeds(places)
    ranked, why = _rank([rows[n] for n in compared], [places[n] for n in compared], ways, wanted)
    order = {standing.setting.name: place for place, standing in enumerate(ranked.standings if ranked else ())}
    settings = sorted(plan.settings(rows), key=lambda setting: order.get(setting.name, len(order)))
    return Answer(str(rows[0]["task"]), metric, higher_is_better(metric, ways), settings, ranked, why)


def _rank(
    rows: Sequence[Row], places: Sequence[Mapping[str, Any]], ways: Mapping[str, str], wanted: str | None
) -> tuple[Best | None, str]:
    """The order of the settings, and why it is that one."""
    task, settings = str(rows[0]["task"]), by_setting(places, [dict(row) for row in rows])
    if not any(_is_evaluated(row) for row in rows):
        return rank_by_round_length(
            task, settings
        ), "No model was trained, so the settings are ranked by the length of their rounds."
    own = {str(row.get("until") or "") for row in rows}
    until = Target.parse(own.pop(), ways) if len(own) == 1 and own != {""} else None
    target, why = _target(settings, ways, wanted, until)
    if target is None:
        return _by_metric(task, settings, ways)
    if target != until:
        settings = by_setting(places, [_timed(row, target, ways) for row in rows])
    return rank_by_target(task, settings, target, until), why


def _is_evaluated(row: Row) -> bool:
    """Whether anything is known of a run's models."""
    return any(value is not None for name, value in row.items() if name.startswith("last_") or name == _TIME)


def _target(
    settings: Sequence[Setting], ways: Mapping[str, str], wanted: str | None, until: Target | None
) -> tuple[Target | None, str]:
    """What is to be reached, and why that."""
    if wanted or until:
        return Target.parse(wanted, ways) if wanted else until, ""
    metric = next(iter(ways), "loss")
    higher = higher_is_better(metric, ways)
    known = all(row.get(EVALUATIONS) for setting in settings for row in setting.rows)
    target = default_target(settings, metric, higher=higher) if known else None
    return target, _CHOSEN.format(hardest="highest" if higher else "lowest", metric=metric)


def _timed(row: Row, target: Target, ways: Mapping[str, str]) -> dict[str, Any]:
    """The row with its time to a target, from the evaluations of the run."""
    seen = row.get(EVALUATIONS) or []
    if not all(target.metric in scores for _, scores in seen) or not seen:
        raise SafaError(f"the records of the runs were not kept, so that {target} cannot be asked for")
    return dict(row) | {_TIME: time_to_target(seen, target)}


def _by_metric(task: str, settings: Sequence[Setting], ways: Mapping[str, str]) -> tuple[Best | None, str]:
    nothing = "No setting has a finite score in every run, so none is called the best."
    try:
        best = rank_by_metric(task, settings, ways)
    except SafaError:
        return None, nothing
    value = best.standings[0].value
    if value is None or not math.isfinite(value):
        return None, nothing
    return best, "The runs have no target, and their course was not kept; so the last models are compared."


# -- saying it ---------------------------------------------------------------------------------------------------------


def _nobody(best: Best) -> list[Fact]:
    assert best.target is not None
    return [Fact(f"First to {goal(best.target)}", "none", best.sentences()[0])]


def _first_by_target(best: Best) -> list[Fact]:
    assert best.target is not None
    time = best.standings[0].value
    seeds = _seeds(best.first.reached) + ("" if best.first.reached == best.seeds else f" of {best.seeds}")
    return [
        Fact(f"First to {goal(best.target)}", _whole(best.first.name), _doubt(best)),
        Fact("It takes", "" if time is None else duration(time), _over("geometric mean", seeds), _TIME),
    ]


def _first_by_metric(best: Best) -> list[Fact]:
    value, mean = best.standings[0].value or 0.0, _over("mean", _seeds(best.seeds))
    if best.metric == "round_length_s":
        length = Fact("A round takes", duration(value), mean, "round_length_s")
        return [Fact("Shortest rounds", _whole(best.first.name), _doubt(best)), length]
    return [
        Fact(f"Best {best.metric} of the last model", _whole(best.first.name), _doubt(best)),
        Fact(capital(best.metric), f"{value:.4g}", mean, f"last_{best.metric}"),
    ]


def _whole(name: str) -> str:
    """A name that is broken only between its parts."""
    return ", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in name.split(", "))


def _doubt(best: Best) -> str:
    if best.is_certain or len(best.standings) < 2:
        return ""
    is_level = best.standings[0].value == best.standings[1].value
    return "level with the next" if is_level else "ahead, but cannot be told from the next"


def _lead(best: Best) -> Fact:
    """By how much the first setting is ahead of the second."""
    second = best.standings[1]
    name = second.setting.name
    if best.target is None:
        what = "longer" if best.metric == "round_length_s" else "worse"
        mean = second.behind.mean if second.behind else math.nan
        return Fact(f"The next is {what} by", duration(mean) if what == "longer" else f"{mean:.3g}", name)
    if second.behind is None:
        return Fact("The next", f"{second.setting.reached} of {best.seeds} seeds", f"is how often {name} got there")
    return Fact(
        "The next takes", f"{second.behind.mean:.3g}{TIMES}", f"as long: {name}, {duration(second.value or 0.0)}"
    )


def _sure(best: Best) -> Fact:
    """Whether the seeds allow telling the first from the second, and by what."""
    value = "Yes" if best.is_certain else "Cannot tell"
    return Fact("Do the seeds allow saying so?", value, _evidence(best, best.standings[1]))


def _evidence(best: Best, second: Standing) -> str:
    behind, seeds = second.behind, _seeds(best.seeds)
    if best.seeds == 1:
        return "one seed has no interval: add seeds"
    if behind is None:
        sooner, later = best.first.sooner_and_later(second.setting)
        return f"known to be behind in {sooner} and ahead in {later} of {seeds}"
    return f"{LEVEL:.0%} interval {_range(behind)}{_unit(best)}, {seeds} compared one by one"


def _unit(best: Best) -> str:
    return TIMES if best.target else " s" if best.metric == "round_length_s" else ""


def _range(interval: Interval) -> str:
    return "" if interval.low is None else f"{interval.low:.3g} to {interval.high:.3g}"


def _over(kind: str, seeds: str) -> str:
    return "with one seed" if seeds == "one seed" else f"{kind} over {seeds}"


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{number(count)} seeds"
