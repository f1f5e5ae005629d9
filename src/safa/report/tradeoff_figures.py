"""Charts of the trade-offs between the settings of a sweep, with the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import altair as alt

from safa.analysis import pareto_front
from safa.analysis.compare import Setting
from safa.report.answer import Answer
from safa.report.figures import INK, SOFT, Style, data, layered
from safa.report.setting_figures import GREY, distinguished, longest_s
from safa.report.words import time_unit

__all__ = ["Tradeoff", "time_s", "tradeoff"]

_NAMED = 5
"""Up to so many settings, all of them have their names beside them, and not only those on the front."""
_NAME_WIDTH, _NAME_HEIGHT = 0.3, 0.08
"""The room that a name needs, in shares of the width and the height of a chart."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Tradeoff:
    """What is drawn against time: a column, its name for readers, and whether more of it is better."""

    column: str
    name: str
    higher: bool
    format: str = "~r"
    """How its numbers are written (the format of d3)."""


def tradeoff(answer: Answer, styled: Mapping[str, Style], what: Tradeoff) -> tuple[alt.LayerChart, list[str]] | None:
    """A point a setting, and the names of those on the front, the soonest first; None where there are not two."""
    size, unit = time_unit(longest_s(answer.settings))
    rows = [row for setting in answer.settings if (row := _row(answer, setting, what, size))]
    if len(rows) < 2:
        return None
    places = pareto_front([(row["time"], -row["y"] if what.higher else row["y"]) for row in rows])
    rows = [row | {"strength": 1.0 if place in places else 0.4} for place, row in enumerate(rows)]
    front = sorted((rows[place] for place in places), key=lambda row: row["time"])
    axes = _axes(f"{'time to the target' if answer.target else 'time of the run'}, {unit}", what)
    layers = [
        _line(front, axes),
        *_points(rows, axes, styled),
        *_names(rows if len(rows) <= _NAMED else front, rows, axes),
    ]
    return layered(layers, 240), [row["setting"] for row in front]


def time_s(answer: Answer, setting: Setting) -> float | None:
    """The time of a setting to the target, if it reached it with every seed, or of its runs where there is none."""
    if answer.target is None:
        mean = setting.mean("virtual_time_s")
        return mean.mean if mean else None
    found = [one for one in (answer.best.standings if answer.best else ()) if one.setting.name == setting.name]
    return found[0].value if found and found[0].setting.reached == len(found[0].setting.rows) else None


def _row(answer: Answer, setting: Setting, what: Tradeoff, size: float) -> dict[str, Any] | None:
    """A setting as a point: means over its seeds; none where one of them has no number."""
    time, mean = time_s(answer, setting), setting.mean(what.column)
    if time is None or mean is None or not math.isfinite(mean.mean):
        return None
    return {"setting": setting.name, "time": time / size, "y": mean.mean}


def _axes(x: str, y: Tradeoff) -> dict[str, Any]:
    """The axes. The room around the points may begin below 0, where shares and bytes have no numbers."""
    scale = alt.Scale(zero=False, padding=22)
    named: dict[str, Any] = {} if y.higher else {"labelExpr": "datum.value < 0 ? '' : datum.label"}
    return {
        "x": alt.X("time:Q", title=x, scale=scale, axis=alt.Axis(format=",~r")),
        "y": alt.Y("y:Q", title=y.name, scale=scale, axis=alt.Axis(format=y.format, **named)),
    }


def _line(front: Rows, axes: Mapping[str, Any]) -> alt.Chart:
    chart = alt.Chart(data(front)).mark_line(interpolate="step-after", color=SOFT, strokeWidth=1.5, strokeDash=[4, 3])
    return cast(alt.Chart, chart.encode(**axes))


def _points(rows: Rows, axes: Mapping[str, Any], styled: Mapping[str, Style]) -> list[alt.Chart]:
    """The settings: those that have no colour of their own below the others."""
    known = [row for row in rows if row["setting"] in styled]
    grey = [row for row in rows if row["setting"] not in styled]
    tip = [alt.Tooltip("setting:N"), *(alt.Tooltip(f"{name}:Q", format=",.4~r") for name in ("time", "y"))]
    below = alt.Chart(data(grey)).mark_point(filled=True, size=50, color=GREY, opacity=1)
    above = alt.Chart(data(known)).mark_point(filled=True, size=110)
    colour, shape = (
        distinguished(c, styled, w, legend=False) for c, w in ((alt.Color, "colour"), (alt.Shape, "shape"))
    )
    strength = alt.Opacity("strength:Q", scale=None)
    drawn = [above.encode(**axes, tooltip=tip, color=colour, shape=shape, opacity=strength)]
    return [below.encode(**axes, tooltip=tip), *drawn] if grey else drawn


def _names(named: Rows, rows: Rows, axes: Mapping[str, Any]) -> list[alt.Chart]:
    """The names of some of the settings beside their points, where there is room; in the right half on the left."""
    chosen: list[tuple[Mapping[str, Any], _Spot]] = []
    for row in named:
        spot = _Spot.of(row, rows)
        if not any(spot.overlaps(other) for _, other in chosen):
            chosen.append((row, spot))
    strength = alt.Opacity("strength:Q", scale=alt.Scale(domain=[0, 1], range=[0.5, 1]), legend=None)
    return [
        alt.Chart(data(of))
        .mark_text(align=cast(Any, side), dx=dx, dy=-9, fontSize=11, color=INK)
        .encode(**axes, text=alt.Text("setting:N"), opacity=strength)
        for side, dx in (("left", 9), ("right", -9))
        if (of := [row for row, spot in chosen if spot.side == side])
    ]


@dataclass(frozen=True)
class _Spot:
    """The place of a name, in shares of the width and the height of a chart."""

    start: float
    height: float
    side: str
    """On which side of the name its point is."""

    @classmethod
    def of(cls, row: Mapping[str, Any], rows: Rows) -> _Spot:
        """The place of the name of a row in the chart of these rows."""
        time, height = (_share(row[name], [one[name] for one in rows]) for name in ("time", "y"))
        return cls(time, height, "left") if time <= 0.5 else cls(time - _NAME_WIDTH, height, "right")

    def overlaps(self, other: _Spot) -> bool:
        """Whether two names would overlap."""
        return abs(self.start - other.start) < _NAME_WIDTH and abs(self.height - other.height) < _NAME_HEIGHT


def _share(value: float, values: Sequence[float]) -> float:
    """Where a value is between the lowest and the highest, from 0 to 1."""
    low, high = min(values), max(values)
    return (value - low) / (high - low) if high > low else 0.0
