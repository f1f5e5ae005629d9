"""How the settings of a sweep are drawn, and their metric over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import altair as alt

from safa.analysis import Curve, mean_curve
from safa.analysis.compare import Setting
from safa.report.answer import Answer
from safa.report.figures import BACK, INK, PROTOCOLS, RAMP, Style, by_series, data, layered, styles
from safa.report.plan import Plan, is_number
from safa.report.tables import EVALUATIONS
from safa.report.words import goal, time_unit

__all__ = ["GREY", "MOST", "curves", "distinguished", "longest_s", "looks"]

MOST = 8
"""How many settings have a colour of their own; those behind them are grey."""
GREY = "#c5cbd4"
_DASHES = [style.dash for style in PROTOCOLS.values()]
_SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-right", "triangle-left")

Rows = Sequence[Mapping[str, Any]]


# -- how a setting looks -----------------------------------------------------------------------------------------------


def looks(settings: Sequence[Setting], plan: Plan) -> dict[str, Style]:
    """A style for each of the first settings, by name: the colour says what varies, the dashes the rest of it."""
    names, shown = plan.distinguishing, settings[:MOST]
    by = "protocol" if "protocol" in names else plan.x or max(names, key=lambda n: len(plan.varied[n]), default=None)
    if by is None:
        return styles([setting.name for setting in shown])
    values = [setting.rows[0].get(by) for setting in shown]
    colours = _colours(by, list(dict.fromkeys(values)))
    others = [tuple(setting.rows[0].get(name) for name in names if name != by) for setting in shown]
    dashes = dict(zip(dict.fromkeys(others), _DASHES, strict=False))
    found = zip(shown, values, others, _SHAPES, strict=False)
    return {setting.name: Style(colours[value], dashes[rest], shape) for setting, value, rest, shape in found}


def _colours(name: str, values: Sequence[Any]) -> dict[Any, str]:
    """A colour for every value: numbers have a ramp, others have colours that differ."""
    if name != "protocol" and len(values) > 2 and all(map(is_number, values)):
        steps = (len(RAMP) - 1) / (len(values) - 1)
        return {value: RAMP[round(place * steps)] for place, value in enumerate(sorted(values))}
    found = styles([str(value) for value in values])
    return {value: found[str(value)].colour for value in values}


def distinguished(channel: Any, styled: Mapping[str, Style], what: str, *, legend: bool = True) -> Any:
    """A channel that distinguishes settings; those of one chart share a legend."""
    made = by_series(channel, "setting", styled, what, points=False)
    return made if legend else made.legend(None)


# -- the metric over time ----------------------------------------------------------------------------------------------


def longest_s(settings: Sequence[Setting]) -> float:
    """How long the longest run lasts."""
    return max((row.get("virtual_time_s") or 0.0 for setting in settings for row in setting.rows), default=0.0)


def curves(answer: Answer, styled: Mapping[str, Style], *, height: int = 250) -> alt.LayerChart | None:
    """The metric over time, a curve a setting with a band from the lowest to the highest seed; None without values."""
    size, unit = time_unit(longest_s(answer.settings))
    metric = answer.target.metric if answer.target else answer.metric
    points = [point for setting in answer.settings for point in _points(setting, metric, size)]
    if not points:
        return None
    x = alt.X("time:Q", title=f"time, {unit}", scale=alt.Scale(zero=True, nice=False))
    own = [point for point in points if point["setting"] in styled]
    rest = [point for point in points if point["setting"] not in styled]
    layers = [*_bands_and_lines(own, x, metric, styled), *_grey(rest), *_target(answer, styled, size)]
    return layered([*layers, _tips(own, metric, unit)], height)


def _points(setting: Setting, metric: str, size: float) -> list[dict[str, Any]]:
    """The mean curve of a setting as rows."""
    found = [_curve(row.get(EVALUATIONS) or [], metric) for row in setting.rows]
    return [
        {"setting": setting.name, "time": time / size, "mean": mean, "low": low, "high": high}
        for time, mean, low, high in mean_curve(found, longest_s([setting]))
    ]


def _curve(evaluations: Sequence[tuple[float, Mapping[str, float]]], metric: str) -> Curve:
    known = [(at_s, scores[metric]) for at_s, scores in evaluations if metric in scores]
    return Curve([at_s for at_s, _ in known], [value for _, value in known])


def _bands_and_lines(rows: Rows, x: alt.X, metric: str, styled: Mapping[str, Style]) -> list[alt.Chart]:
    coloured = alt.Chart(data(rows)).encode(x=x, color=distinguished(alt.Color, styled, "colour"))
    y = alt.Y("low:Q", title=metric, scale=alt.Scale(zero=False), axis=alt.Axis(format=".3~r"))
    band = coloured.mark_area(opacity=0.16 if len(styled) < 4 else 0.07).encode(y=y, y2=alt.Y2("high:Q"))
    dash = distinguished(alt.StrokeDash, styled, "dash")
    return [band, coloured.mark_line().encode(y=_MEAN, strokeDash=dash)]


def _grey(rows: Rows) -> list[alt.Chart]:
    """The curves of settings that have no colour."""
    chart = alt.Chart(data(rows)).mark_line(strokeWidth=1, color=GREY)
    return [chart.encode(x=_TIME, y=_MEAN, detail=alt.Detail("setting:N"))] if rows else []


def _target(answer: Answer, styled: Mapping[str, Style], size: float) -> list[alt.Chart]:
    """A line at the target, and a point where each setting is there, in the mean."""
    best, target = answer.best, answer.target
    if best is None or target is None:
        return []
    line = alt.Chart(data([{"mean": target.value, "said": goal(target)}])).encode(y=_MEAN)
    text = line.mark_text(align="left", baseline="bottom", dx=4, dy=-5, color=INK, fontSize=12, fontWeight=600)
    there = [
        {"setting": one.setting.name, "time": one.value / size, "mean": target.value}
        for one in best.standings
        if one.value is not None and one.setting.name in styled and one.setting.reached == best.seeds
    ]
    rule = line.mark_rule(strokeDash=[4, 4], strokeWidth=1.5, color=INK)
    point = alt.Chart(data(there)).mark_point(filled=True, size=75, opacity=1, stroke=BACK, strokeWidth=1.5)
    points = [point.encode(x=_TIME, y=_MEAN, color=distinguished(alt.Color, styled, "colour"))] if there else []
    return [rule, text.encode(x=alt.value(0), text=alt.Text("said:N")), *points]


def _tips(rows: Rows, metric: str, unit: str) -> alt.Chart:
    """Points that cannot be seen, and say what a curve says where the mouse is."""
    names = {"mean": f"{metric}, mean", "low": "lowest seed", "high": "highest seed"}
    shown = [alt.Tooltip("setting:N"), alt.Tooltip("time:Q", title=unit, format=",.3~r")]
    shown += [alt.Tooltip(f"{name}:Q", title=said, format=".4~r") for name, said in names.items()]
    point = alt.Chart(data(rows)).mark_point(size=160, opacity=0, filled=True)
    return cast(alt.Chart, point.encode(x=_TIME, y=_MEAN, tooltip=shown))


_TIME, _MEAN = alt.X("time:Q"), alt.Y("mean:Q")
