"""A chart that ranks the settings of a sweep, with the interval of each one's distance from the first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import altair as alt

from safa.analysis.compare import Best, Standing
from safa.report.figures import INK, SOFT, Style, data, layered
from safa.report.plan import is_number
from safa.report.setting_figures import distinguished
from safa.report.words import TIMES, duration

__all__ = ["ranks"]

_STEP, _DOWN, _UP = 42, 8, -9
"""The height of a row, and how far its bar is below its middle, and its text above."""

Rows = Sequence[Mapping[str, Any]]


def ranks(best: Best, styled: Mapping[str, Style]) -> alt.LayerChart:
    """The settings in their order, a bar each, under its name; a grey mark shows where the first one is."""
    rows = [_row(best, standing, place) for place, standing in enumerate(best.standings[: len(styled)])]
    scale = _scale(rows)
    layers = [_bars(rows, scale, styled), _first(rows, scale), *_intervals(rows, scale), *_texts(rows)]
    return layered(layers, _STEP * len(rows))


# -- layers ------------------------------------------------------------------------------------------------------------


def _scale(rows: Rows) -> alt.Scale:
    """From nothing to the longest bar or interval; an interval far beyond the bars is cut off."""
    values = [row["value"] for row in rows if is_number(row["value"])]
    longest = max([0.0, *values])
    widest = max([longest, *(row["high"] for row in rows if is_number(row["high"]))])
    return alt.Scale(domain=[min([0.0, *values]), min(max(widest, 1.08 * longest), 1.5 * longest) or 1.0], nice=False)


def _x(field: str, scale: alt.Scale) -> alt.X:
    return alt.X(f"{field}:Q", scale=scale, axis=None)


def _chart(rows: Rows) -> alt.Chart:
    """A chart with a line for every row."""
    y = alt.Y("place:O", axis=None, scale=alt.Scale(paddingInner=0, paddingOuter=0))
    tip = [alt.Tooltip(f"{name}:N", title=title) for name, title in _TOLD.items()]
    chart: alt.Chart = alt.Chart(data(rows)).encode(y=y, tooltip=tip)
    return chart


_TOLD = {"setting": "setting", "said": "in all", "behind": "behind the first"}


def _bars(rows: Rows, scale: alt.Scale, styled: Mapping[str, Style]) -> alt.Chart:
    colour = distinguished(alt.Color, styled, "colour", legend=False)
    strength = alt.Opacity("strength:Q", scale=None)
    bar = _chart(rows).mark_bar(size=14, yOffset=_DOWN, cornerRadiusEnd=3)
    return cast(alt.Chart, bar.encode(x=_x("value", scale), color=colour, opacity=strength))


def _first(rows: Rows, scale: alt.Scale) -> alt.Chart:
    """Where the first setting is, at every bar."""
    chart = _chart([dict(row) | {"first": rows[0]["value"]} for row in rows if row["value"] is not None])
    mark = chart.mark_tick(size=24, thickness=2, color=SOFT, yOffset=_DOWN)
    return cast(alt.Chart, mark.encode(x=_x("first", scale)))


def _intervals(rows: Rows, scale: alt.Scale) -> list[alt.Chart]:
    """A line with two ends for every row that has an interval."""
    known = [row for row in rows if row["low"] is not None]
    if not known:
        return []
    chart = _chart(known)
    line = chart.mark_rule(strokeWidth=1.5, color=INK, yOffset=_DOWN, clip=True)
    end = chart.mark_tick(size=9, thickness=1.5, color=INK, yOffset=_DOWN, clip=True)
    return [
        line.encode(x=_x("low", scale), x2=alt.X2("high:Q")),
        *(end.encode(x=_x(f, scale)) for f in ("low", "high")),
    ]


def _texts(rows: Rows) -> list[alt.Chart]:
    """The names on the left, that of the first one bold, and on the right what is said of each."""
    names = [
        _chart(of).mark_text(align="left", dy=_UP, fontSize=13, fontWeight=cast(Any, weight), color=INK)
        for of, weight in ((rows[:1], "bold"), (rows[1:], "normal"))
    ]
    said = _chart(rows).mark_text(align="right", dy=_UP, fontSize=12, color=SOFT)
    return [
        *(name.encode(x=alt.value(0), text=alt.Text("setting:N")) for name in names),
        said.encode(x=alt.value("width"), text=alt.Text("said:N")),
    ]


# -- rows --------------------------------------------------------------------------------------------------------------


def _row(best: Best, standing: Standing, place: int) -> dict[str, Any]:
    low, high = _interval(best, standing) if place else (None, None)
    whole = best.target is None or standing.setting.reached == best.seeds
    return {
        "setting": standing.setting.name,
        "place": place,
        "value": standing.value if whole else None,
        "low": low,
        "high": high,
        "said": _said(best, standing, place)
        if whole
        else f"reached in {standing.setting.reached} of {best.seeds} seeds",
        "behind": _behind(best, standing) if place else "",
        "strength": 1.0 if place == 0 or standing.is_told else 0.45,
    }


def _interval(best: Best, standing: Standing) -> tuple[float | None, float | None]:
    """The interval of the distance from the first, on the axis of the bars."""
    first, behind = best.standings[0].value, standing.behind
    if first is None or behind is None or behind.low is None or behind.high is None:
        return None, None
    if best.target is not None:
        return first * behind.low, first * behind.high
    if (standing.value or 0.0) < first:  # more is better
        return first - behind.high, first - behind.low
    return first + behind.low, first + behind.high


def _said(best: Best, standing: Standing, place: int) -> str:
    """What is written at a bar."""
    value = standing.value if standing.value is not None else math.nan
    text = duration(value) if best.target or best.metric.endswith("_s") else f"{value:.4g}"
    if place and not standing.is_told:
        return f"{text} · cannot tell"
    return f"{text} · {standing.behind.mean:.3g}{TIMES}" if place and best.target and standing.behind else text


def _behind(best: Best, standing: Standing) -> str:
    behind, unit = standing.behind, TIMES if best.target else ""
    if behind is None:
        return ""
    return f"{behind.mean:.3g}{unit}" + ("" if behind.low is None else f" ({behind.low:.3g} to {behind.high:.3g})")
