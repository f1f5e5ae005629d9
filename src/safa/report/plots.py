"""The charts that `Run.plot` and `Sweep.plot` return: Altair's, in the style of the pages, of a width of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import altair as alt
import numpy as np

from safa.analysis import Curve, Target, mean_curve, reached
from safa.analysis.client_map import client_map, turnaround_s
from safa.errors import SafaError, did_you_mean
from safa.report import figures
from safa.report.clients import spread
from safa.report.figures import INK, THEMES, Axis
from safa.report.words import TITLES, duration, number, time_unit
from safa.runs import Run

__all__ = ["Over", "clients_chart", "curves_chart", "rows_chart", "run_chart"]

Over = Literal["time", "round"]
_WIDTH = 560
_MAP_CLIENTS, _MAP_ROUNDS = 200, 100
"""The most clients and rounds that a map shows."""


def run_chart(run: Run, metric: str | None = None, over: Over = "time") -> alt.LayerChart:
    """A metric of a run, the main one by default, over time or rounds; where it has a target, that is marked."""
    metric = _metric(metric, run)
    found = [(r, {"loss": r.loss, **r.metrics}) for r in run.records() if r.loss is not None]
    found = [(r, scores) for r, scores in found if math.isfinite(scores.get(metric, math.nan))]
    if not found:
        raise SafaError(f"no round of this run has a finite {metric}, so there is nothing to draw")
    size, unit = time_unit(found[-1][0].closed_s)
    rows = [{"round": r.round, "time": r.closed_s / size, "score": scores[metric]} for r, scores in found]
    axes = {"time": Axis("time", f"time, {unit}", ".4~r"), "round": Axis("round", "round", "~d", whole=True)}
    if over not in axes:
        raise SafaError(f"over must be time or round, not {over!r}")
    x, other = (axes["time"], axes["round"]) if over == "time" else (axes["round"], axes["time"])
    goal = _goal(run, metric, None if over == "round" else size)
    return _own_width(figures.lines(rows, x, Axis("score", metric, ".4~r"), also=[other], target=goal))


def _goal(run: Run, metric: str, size: float | None) -> tuple[float, float | None, str] | None:
    """The target of a run if it is one of this metric: its value, where it was reached, and that in words.

    That is a time in units of so many seconds, or a round.
    """
    target = run.settings.target
    if target is None or target.metric != metric:
        return None
    found = reached(run.records(), target)
    at_s, in_round = found["time_to_target_s"], found["rounds_to_target"]
    if at_s is None:
        return target.value, None, f"target {target.value:g}, not reached"
    place = in_round if size is None else at_s / size
    return target.value, place, f"target {target.value:g}, reached after {duration(at_s)}, in round {in_round}"


def _metric(metric: str | None, run: Run) -> str:
    """The metric that was asked for, or the main one, if the run has it."""
    known = [*run.settings.metrics, "loss"]
    if metric is None:
        return known[0]
    if metric not in known:
        raise SafaError(f"there is no metric {metric!r}{did_you_mean(metric, known)}; there is {', '.join(known)}")
    return metric


def clients_chart(run: Run) -> alt.LayerChart:
    """What every client did in every round: a row a client, those whose updates took the least time on top.

    The mark of a client that starts over is not in the legend: Altair checks a chart, and knows none for a fixed mark.
    """
    took_s = turnaround_s(run.records())
    order = np.argsort(np.where(np.isnan(took_s), np.inf, took_s), kind="stable")
    if not len(order):
        raise SafaError("no round of this run is finished, so there is nothing to draw")
    cells = client_map(run.records(), spread(order, _MAP_CLIENTS))
    shown = cells.rows(np.arange(0, len(cells.rounds), -(-len(cells.rounds) // _MAP_ROUNDS)))
    chart = figures.client_map(shown, [str(client) for client in shown.clients], ("fastest", "slowest"))
    for over in chart.layer[1:]:
        over.encoding.stroke = alt.value(INK)
    return _own_width(chart)


def curves_chart(curves: Mapping[str, Sequence[Curve]], metric: str, target: Target | None = None) -> alt.LayerChart:
    """A metric over time: for every setting the mean over its seeds, and a band from the lowest to the highest.

    A run that has come to its end keeps its last value.
    """
    size, unit = time_unit(max(map(_end_s, curves.values()), default=0.0))
    rows = [
        {"setting": name, "time": time / size, "mean": mean, "lowest": low, "highest": high}
        for name, seeds in curves.items()
        for time, mean, low, high in mean_curve(seeds, _end_s(seeds))
    ]
    if not rows:
        raise SafaError(f"no run of this sweep has a finite {metric}, so there is nothing to draw")
    chart = figures.lines(
        rows,
        Axis("time", f"time, {unit}", ".4~r"),
        Axis("mean", metric, ".4~r"),
        series="setting",
        names=list(curves),
        band=("lowest", "highest"),
        target=(target.value, None, f"target {target.value:g}") if target and target.metric == metric else None,
    )
    return _own_width(chart, list(curves))


def _end_s(curves: Sequence[Curve]) -> float:
    return max((curve.times_s[-1] for curve in curves if curve.times_s), default=0.0)


def rows_chart(rows: Sequence[Mapping[str, Any]], x: str, metric: str, series: str) -> alt.LayerChart:
    """A metric against a setting: a curve for every value of `series`, and a band from the lowest to the highest seed.

    A point at which a run has no such number is left out: the mean of the others would be too good.
    """
    points = _points(rows, x, metric, series)
    if not points:
        raise SafaError(f"no setting has a finite {metric} in all seeds, so there is nothing to draw")
    y = Axis("mean", TITLES.get(metric, metric.replace("_", " ")), ",.3~r")
    band = ("lowest", "highest")
    if all(isinstance(point["x"], int | float) for point in points):
        ticks = sorted({point["x"] for point in points})
        axis = Axis("x", TITLES.get(x, x.replace("_", " ")), ticks=ticks if len(ticks) <= 8 else None)
        names = list(dict.fromkeys(str(row[series]) for row in rows))
        return _own_width(figures.lines(points, axis, y, series="series", names=names, band=band, points=True), names)
    named = [point | {"x": ", ".join(filter(None, (number(point["x"]), point["series"])))} for point in points]
    return _own_width(figures.dots(named, "x", y, band))


def _points(rows: Sequence[Mapping[str, Any]], x: str, metric: str, series: str) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, str], list[Any]] = {}
    for row in rows:
        groups.setdefault((row[x], str(row[series])), []).append(row.get(metric))
    return [
        {"x": place, "series": name, "mean": sum(values) / len(values), "lowest": min(values), "highest": max(values)}
        for (place, name), values in groups.items()
        if all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    ]


def _own_width(chart: alt.LayerChart, names: Sequence[str] = ()) -> alt.LayerChart:
    """The chart with the light theme and a width in pixels: a notebook has no container for it.

    `names` are those of a legend, which is broken into as many columns as there is room for.
    """
    theme = THEMES["light"]
    legend = {name: value for name, value in theme["legend"].items() if name != "layout"}  # Altair does not know it
    columns = int(_WIDTH / (45 + 6.6 * max(map(len, names)))) if names else 4
    config = theme | {"legend": legend | {"columns": max(1, columns), "labelLimit": _WIDTH}}
    return cast(alt.LayerChart, chart.properties(width=_WIDTH).configure(**config))
