"""Draw the picture of docs/arena.md: how many times as long as FedBuff fedsecant takes, world by world.

python docs/arena_plot.py > docs/arena/times.svg
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from safa.report.figures import INK, PROTOCOLS, SOFT, THEMES, specification

FOLDER = Path(__file__).with_name("arena")
RESULTS = {"arena": "ratios.csv", "confirmation": "confirmation-ratios.csv"}
"""The tables of both, by the names that they have in the picture."""
COLOURS = {"arena": SOFT, "confirmation": PROTOCOLS["fedsecant"].colour}
SHAPES = {"exactly": "circle", "at most": "triangle-left", "at least": "triangle-right", "not known": "diamond"}
"""The shape of a point by what is known of it: where a target was missed, it is a bound."""
BOUNDS = dict(zip(("", "<=", ">=", "~"), SHAPES, strict=True))
TICKS = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2]


def rows() -> list[dict[str, Any]]:
    """A row for every world and result."""
    found = []
    for result, file in RESULTS.items():
        with (FOLDER / file).open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                if (row["protocol"], row["baseline"], row["target"]) == ("fedsecant", "fedbuff", "all"):
                    numbers = {key: float(row[key]) for key in ("times_as_long", "low", "high")}
                    found.append({"world": row["world"], "result": result, "bound": BOUNDS[row["bound"]]} | numbers)
    return found


def draw() -> str:
    """The picture as SVG."""
    drawn = rows()
    worlds, results = list(dict.fromkeys(row["world"] for row in drawn)), list(RESULTS)
    base = alt.Chart(alt.Data(values=drawn)).encode(
        y=alt.Y("world:N", sort=worlds, title=None, scale=alt.Scale(paddingInner=0.35), axis=alt.Axis(labelLimit=300)),
        yOffset=alt.YOffset("result:N", sort=results),
        color=alt.Color("result:N", sort=results, scale=alt.Scale(domain=results, range=list(COLOURS.values()))),
    )
    points = base.mark_point(filled=True, size=70, opacity=1).encode(
        x=_time("times_as_long"),
        shape=alt.Shape("bound:N", scale=alt.Scale(domain=list(SHAPES), range=list(SHAPES.values()))),
    )
    spans = base.mark_rule(strokeWidth=2).encode(x=_time("low"), x2="high:Q")
    equal = alt.Chart(alt.Data(values=[{"x": 1}])).mark_rule(stroke=INK, strokeDash=[3, 3]).encode(x=_time("x"))
    chart = alt.layer(equal, spans, points).properties(width=560, height=alt.Step(24, **{"for": "position"}))
    return str(vl_convert.vegalite_to_svg(specification(chart), config=THEMES["light"]))


def _time(field: str) -> alt.X:
    """A column as a place on the axis, which is logarithmic: half as long is as far from equal as twice as long."""
    return alt.X(
        f"{field}:Q",
        title="times as long as FedBuff to the targets, with 95% intervals",
        scale=alt.Scale(type="log", domain=[0.32, 2.2], nice=False, clamp=True),
        axis=alt.Axis(values=TICKS, tickCount=len(TICKS), grid=True, labelExpr="datum.value"),
    )


if __name__ == "__main__":
    print(draw())
