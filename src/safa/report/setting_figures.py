"""How the settings of a sweep are drawn, and their metric over time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import altair as alt

from safa.analysis import Curve, mean_curve
from safa.analysis.compare import Setting
from safa.report.answer import Answer, goal
from safa.report.figures import BACK, INK, RAMP, Style, styles
from safa.report.plan import Plan, is_number
from safa.report.tables import EVALUATIONS
from safa.report.words import time_unit

__all__ = ["GREY", "MOST", "curves", "data", "distinguished", "layered", "longest_s", "looks"]

MOST = 8
"""How many settings have a colour of their own; those behind them are grey."""
GREY = "#c5cbd4"
_DASHES = ((1, 0), (6, 3), (2, 2), (9, 3, 2, 3))
_SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-right", "triangle-left")

Rows = Sequence[Mapping[str, Any]]


# -- how a setting looks -----------------------------------------------------------------------------------------------


def looks(settings: Sequence[Setting], plan: Plan) -> dict[str, Style]:
    """A style for each of the first settings, by name: the colour says what varies, the dashes the rest of it."""
    names = plan.distinguishing
    by = "protocol" if "protocol" in names else plan.x or max(names, key=lambda n: len(plan.varied[n]), default=None)
    if by is None:
        return styles([setting.name for setting in settings[:MOST]])
    colours = _colours(by, plan.varied[by])
    others = [tuple(s.rows[0].get(name) for name in names if name != by) for s in settings]
    dashes = dict(zip(dict.fromkeys(others), itertools.cycle(_DASHES), strict=False))
    found = zip(settings, others, itertools.cycle(_SHAPES), strict=False)
    return {s.name: Style(colours[s.rows[0].get(by)], dashes[rest], shape) for s, rest, shape in list(found)[:MOST]}


def _colours(name: str, values: Sequence[Any]) -> dict[Any, str]:
    """A colour for every value: numbers have a ramp, others have colours that differ."""
    if name != "protocol" and len(values) > 2 and all(map(is_number, values)):
        steps = (len(RAMP) - 1) / (len(values) - 1)
        return {value: RAMP[round(place * steps)] for place, value in enumerate(sorted(values))}
    found = styles([str(value) for value in values])
    return {value: found[str(value)].colour for value in values}


def distinguished(channel: Any, styled: Mapping[str, Style], what: str, *, legend: bool = True) -> Any:
    """A channel that distinguishes settings; those of one chart share a legend."""
    values = [getattr(style, what) for style in styled.values()]
    scale = alt.Scale(domain=list(styled), range=[list(v) if isinstance(v, tuple) else v for v in values])
    box = alt.Legend(symbolOpacity=1, symbolType="stroke", symbolSize=350) if legend and len(styled) > 1 else None
    return channel("setting:N", scale=scale, title=None, legend=box)


def layered(layers: Sequence[alt.Chart], height: float) -> alt.LayerChart:
    """Layers as one chart of the width of its place."""
    return cast(alt.LayerChart, alt.layer(*layers).properties(width="container", height=height))


def data(rows: Rows) -> alt.InlineData:
    """Rows as a chart's own data; JSON has no NaN and no infinity, so that these are missing."""
    return alt.InlineData(values=[{name: _finite(value) for name, value in row.items()} for row in rows])


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
