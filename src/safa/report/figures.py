"""All charts, for pages and for files: Vega-Lite through Altair, in one style.

The colours are those of Okabe and Ito, which people with colour-blindness can distinguish; every protocol has its own
dash and shape, too. A chart uses the colours of the light theme; `RECOLOURED` gives those of the dark theme.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import altair as alt
import numpy as np
import vl_convert

from safa.analysis.client_map import ClientMap, State
from safa.report.words import protocol_name
from safa.runs import write_atomically

__all__ = [
    "BACK", "INK", "PROTOCOLS", "RAMP", "RECOLOURED", "SOFT", "STATES", "THEMES", "Axis", "Style", "bars",
    "by_series", "client_map", "data", "dots", "layered", "lines", "save", "specification", "styles",
]  # fmt: skip

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Style:
    """How a series is drawn: its colour, the dashes of its line and the shape of its points."""

    colour: str
    dash: tuple[int, ...]
    shape: str


PROTOCOLS: dict[str, Style] = {
    "safa": Style("#0072b2", (1, 0), "circle"),
    "fedavg": Style("#d55e00", (7, 3), "square"),
    "fedcs": Style("#c98a00", (2, 2), "triangle-up"),
    "local": Style("#6b7480", (9, 3, 2, 3), "cross"),
    "fedasync": Style("#b5548c", (4, 2), "diamond"),
    "fedbuff": Style("#009e73", (5, 2, 1, 2), "triangle-down"),
    "timelyfl": Style("#3fa2dc", (3, 3), "triangle-right"),
    "fedcompass": Style("#7a5c00", (6, 2, 2, 2), "triangle-left"),
    "fedsecant": Style("#7b3fa0", (12, 2), "wedge"),
}
"""How each protocol is drawn, everywhere."""

_NAMED = PROTOCOLS | {protocol_name(name): style for name, style in PROTOCOLS.items()}
_OWN = [*PROTOCOLS.values(), Style("#1b212b", (10, 2, 2, 2, 2, 2), "circle")]
_OTHERS = [
    Style(a.colour, b.dash, b.shape) for n in range(len(_OWN)) for a, b in zip(_OWN, _OWN[n:] + _OWN[:n], strict=True)
]
"""Styles for other series, all pairs of a colour and a dash: first the styles of the protocols, then mixtures."""

STATES: dict[State, tuple[str, str]] = {
    State.PICKED: ("picked", "#009e73"),
    State.UNDRAFTED: ("undrafted", "#0072b2"),
    State.CRASHED: ("crashed", "#d55e00"),
    State.REFUSED: ("refused", "#b5548c"),
    State.TRAINING: ("training", "#c5cbd4"),
    State.IDLE: ("idle", "#f0f2f5"),
    State.ABSENT: ("not enrolled", "#ffffff"),
}
"""What a cell of the client map is called, and its colour."""

INK, SOFT, _LINE, BACK = "#1b212b", "#596273", "#dde1e7", "#ffffff"
"""The colours of text, of less important text, of lines, and of the page."""
RECOLOURED: dict[str, str] = {
    INK: "#e6e9ee", SOFT: "#a3adbb", _LINE: "#323a46", BACK: "#14171c",
    "#0072b2": "#4fa9e3", "#d55e00": "#f07f35", "#c98a00": "#e6b23c", "#6b7480": "#9aa5b4", "#b5548c": "#dd8bb9",
    "#009e73": "#22b98c", "#3fa2dc": "#9ad4f5", "#c5cbd4": "#4b5563", "#f0f2f5": "#1d222a",
    "#7a5c00": "#c7a54a", "#7b3fa0": "#b98ad9",
    "#dd7a00": "#ffb84d", "#cf3f17": "#ff8a65", "#b3246e": "#f783b5", "#7636c4": "#b592f7", "#2f5fd0": "#7fa8ff",
    "#0b7f8c": "#4fd0dd", "#1f6f3f": "#5fcf8a", "#6b7000": "#c9cf4a",
}  # fmt: skip
"""The colours of the light theme, and those of the dark theme for them."""

RAMP = ("#dd7a00", "#cf3f17", "#b3246e", "#7636c4", "#2f5fd0", "#0b7f8c", "#1f6f3f", "#6b7000")
"""Colours for numbers, from low to high."""


def _theme(ink: str, soft: str, line: str, back: str) -> dict[str, Any]:
    """The configuration of Vega-Lite."""
    font = "system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, Liberation Sans, sans-serif"
    text = {"labelColor": soft, "titleColor": soft, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 500}
    axis = text | {"gridColor": line, "domain": False, "ticks": False, "labelPadding": 6, "titlePadding": 10}
    on_top = {"titleAnchor": "end", "titleAngle": 0, "titleAlign": "left", "titleX": -34, "titleY": -12}
    legend = text | {"labelColor": ink, "orient": "top", "direction": "horizontal", "title": None, "offset": 30}
    symbols = {"symbolSize": 110, "symbolStrokeWidth": 2, "columnPadding": 16, "labelLimit": 200, "padding": 0}
    return {
        "background": back,
        "font": font,
        "view": {"stroke": None, "continuousHeight": 240, "discreteHeight": 240},
        "axis": axis | {"labelFlush": False},
        "axisX": {"grid": False, "domain": True, "domainColor": line, "tickCount": 8, "labelOverlap": True},
        "axisY": on_top | {"tickCount": 5},
        "legend": legend | symbols | {"layout": {"top": {"margin": 16, "direction": "horizontal"}}},
        "header": text | {"labelColor": ink, "labelFontSize": 13, "labelFontWeight": 600},
        "title": {"color": ink, "fontSize": 14, "anchor": "start"},
        "line": {"strokeWidth": 2, "strokeJoin": "round", "strokeCap": "butt"},
        "range": {"category": [style.colour for style in _OWN]},
    }


THEMES: dict[str, dict[str, Any]] = {
    "light": _theme(INK, SOFT, _LINE, BACK),
    "dark": _theme(*(RECOLOURED[colour] for colour in (INK, SOFT, _LINE, BACK))),
}
"""The configuration of the charts, light and dark."""


def specification(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The Vega-Lite specification of a chart, without Altair's own theme."""
    spec: dict[str, Any] = chart.to_dict(validate=False)
    spec.pop("config", None)
    return spec


def save(chart: alt.TopLevelMixin, path: Path, *, width: int = 640) -> list[Path]:
    """Write a chart as `path`.svg and `path`.png in the light theme; a file is complete or not written."""
    spec = _visible(specification(chart))
    if spec.get("width") == "container":
        spec["width"] = width
    legend = THEMES["light"]["legend"] | {"columns": max(1, int(width / min(240, 45 + 6.6 * _longest_label(spec))))}
    svg = vl_convert.vegalite_to_svg(spec, config=THEMES["light"] | {"legend": legend})
    files = [path.with_name(path.name + ".svg"), path.with_name(path.name + ".png")]
    write_atomically(files[0], svg.encode())
    write_atomically(files[1], vl_convert.svg_to_png(svg, scale=2))
    return files


def _visible(spec: Any) -> Any:
    """A specification without the invisible layers, which carry tooltips."""
    if isinstance(spec, list):
        return [_visible(part) for part in spec if not (isinstance(part, dict) and _is_invisible(part.get("mark")))]
    return {name: _visible(part) for name, part in spec.items()} if isinstance(spec, dict) else spec


def _is_invisible(mark: Any) -> bool:
    return isinstance(mark, dict) and mark.get("opacity") == 0


def _longest_label(spec: Any) -> int:
    """The length of the longest label in a legend."""
    if isinstance(spec, list):
        return max(map(_longest_label, spec), default=4)
    if not isinstance(spec, dict):
        return 4
    domain = spec.get("domain")
    own = [len(str(label)) for label in domain] if isinstance(domain, list) else []
    return max([4, *own, *map(_longest_label, spec.values())])


def styles(names: Sequence[str]) -> dict[str, Style]:
    """A style for every series: a protocol has its own, the others have those that are left."""
    if all(name in _NAMED for name in names):
        return {name: _NAMED[name] for name in _NAMED if name in names}
    taken = [_NAMED[name] for name in names if name in _NAMED]
    left = itertools.cycle([style for style in _OTHERS if style not in taken])
    return {name: _NAMED[name] if name in _NAMED else next(left) for name in names}


@dataclass(frozen=True)
class Axis:
    """A field with its title, and how its numbers are written (the format of d3)."""

    field: str
    title: str
    format: str = ",.6~r"
    zero: bool = False
    domain: tuple[float, float] | None = None
    whole: bool = False
    """Whether only whole numbers make sense."""
    ticks: Sequence[float] | None = None
    """The places of the ticks; None: chosen by the chart."""
    log: bool = False
    """Whether the scale is logarithmic."""


def data(rows: Rows) -> alt.InlineData:
    """Rows as the chart's own data; JSON has no NaN and no infinity, so that these are missing."""
    return alt.InlineData(values=tuple({name: _finite(value) for name, value in row.items()} for row in rows))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scale(axis: Axis, padding: float = 0) -> alt.Scale:
    if axis.domain is not None:
        return alt.Scale(domain=list(axis.domain), nice=False)
    if axis.log:
        return alt.Scale(type="log", nice=False, padding=padding)
    return alt.Scale(zero=axis.zero, padding=padding, nice=False) if padding else alt.Scale(zero=axis.zero)


def _axis(axis: Axis) -> alt.Axis:
    extra: dict[str, Any] = {"tickMinStep": 1} if axis.whole else {}
    extra |= {"values": list(axis.ticks)} if axis.ticks else {}
    return alt.Axis(title=axis.title, format=axis.format, **extra)


def _x(axis: Axis, padding: float = 0) -> alt.X:
    return alt.X(f"{axis.field}:Q", scale=_scale(axis, padding), axis=_axis(axis))


def _y(axis: Axis) -> alt.Y:
    return alt.Y(f"{axis.field}:Q", scale=_scale(axis), axis=_axis(axis))


def lines(
    rows: Rows,
    x: Axis,
    y: Axis,
    *,
    series: str | None = None,
    names: Sequence[str] = (),
    band: tuple[str, str] | None = None,
    points: bool = False,
    also: Sequence[Axis] = (),
    target: tuple[float, float | None, str] | None = None,
    height: int = 240,
) -> alt.LayerChart:
    """Curves of `y` over `x`, one per value of `series`, with a band between two fields and points where wanted.

    The tooltip of a point shows x, the series, y, and the fields in `also`. `names` are all the series that a page
    has, where some may be missing here, so that each looks the same in every chart. `target` is a value of y to reach,
    which is marked, the x where it was reached, if it was, and what to say there.
    """
    names = list(names) or (list(dict.fromkeys(str(row[series]) for row in rows)) if series else [""])
    looks = styles(names)
    shown = [_tooltip(x), *([alt.Tooltip(f"{series}:N")] if series else []), _tooltip(y), *map(_tooltip, also)]
    base = alt.Chart(data(rows)).encode(x=_x(x, 10 if points else 0))
    coloured = base.encode(color=by_series(alt.Color, series, looks, "colour", points)) if series else base
    plain: dict[str, Any] = {} if series else {"color": looks[names[0]].colour}
    layers: list[alt.Chart] = []
    if band:
        faint = 0.16 if len(names) < 4 else 0.09
        area = coloured.mark_area(opacity=faint, **plain)
        layers.append(area.encode(y=_y(replace(y, field=band[0])), y2=alt.Y2(f"{band[1]}:Q")))
    curve = coloured.mark_line(**plain).encode(y=_y(y))
    layers.append(_dashed(curve, series, looks, points) if series else curve)
    if points:
        dot = coloured.mark_point(filled=True, size=55, opacity=1, **plain).encode(y=_y(y))
        layers.append(dot.encode(shape=by_series(alt.Shape, series, looks, "shape", points)) if series else dot)
    layers += _target_layers(*target, rows, x, y) if target else []
    layers.append(base.mark_point(size=180, opacity=0, filled=True).encode(y=_y(y), tooltip=shown))
    return layered(layers, height)


def _target_layers(value: float, at: float | None, said: str, rows: Rows, x: Axis, y: Axis) -> list[alt.Chart]:
    """A dashed line at a value to reach, and a mark at the x where it was reached, with words where no curve is.

    Left of the mark the curve has not crossed the line yet, right of it it has.
    """
    one, rising = alt.Chart(data([{}])).encode(y=alt.YDatum(value)), bool(rows) and rows[0][y.field] < value
    rule = one.mark_rule(strokeDash=[5, 4], color=SOFT)
    late = at is not None and at > max(row[x.field] for row in rows) / 2
    above = rising == (late or at is None)
    words: dict[str, Any] = {"text": said, "dy": -14 if above else 18, "color": INK, "fontSize": 12}
    if at is None:
        return [rule, one.mark_text(align="left", dx=4, **words).encode(x=alt.value(0))]
    there = one.encode(x=alt.XDatum(at))
    mark = there.mark_point(size=130, filled=True, opacity=1, color="#d55e00")
    return [rule, mark, there.mark_text(align="right" if late else "left", dx=-10 if late else -8, **words)]


def layered(layers: Sequence[alt.Chart], height: float, **given: Any) -> alt.LayerChart:
    """Layers as one chart of the width of its place."""
    return cast(alt.LayerChart, alt.layer(*layers, width="container", height=height, **given))


def _dashed(curve: alt.Chart, series: str, looks: Mapping[str, Style], points: bool) -> alt.Chart:
    """The curve with dashes; where points make the legend, the dashes have other names, to be left out of it."""
    if not points:
        return curve.encode(strokeDash=by_series(alt.StrokeDash, series, looks, "dash", points))
    renamed = {f"_{name}": style for name, style in looks.items()}
    copied = curve.transform_calculate(_dash=f"'_' + datum[{series!r}]")
    return copied.encode(strokeDash=by_series(alt.StrokeDash, "_dash", renamed, "dash", points).legend(None))


def _tooltip(axis: Axis) -> alt.Tooltip:
    if not axis.format:
        return alt.Tooltip(f"{axis.field}:N", title=axis.title)
    return alt.Tooltip(f"{axis.field}:Q", title=axis.title, format=axis.format)


def by_series(channel: Any, series: str, looks: Mapping[str, Style], what: str, points: bool) -> Any:
    """A channel that distinguishes series. All channels share one legend: of the points, or else of the lines."""
    values = [getattr(style, what) for style in looks.values()]
    scale = alt.Scale(domain=list(looks), range=[list(v) if isinstance(v, tuple) else v for v in values])
    symbol: dict[str, Any] = {} if points else {"symbolType": "stroke", "symbolSize": 350}
    legend = alt.Legend(symbolOpacity=1, **symbol) if len(looks) > 1 else None
    return channel(f"{series}:N", scale=scale, title=None, legend=legend)


def bars(
    rows: Rows, x: Axis, y: Axis, *, also: Sequence[Axis] = (), colour: str = "#0072b2", height: int = 240
) -> alt.Chart:
    """Bars of `y` at the numbers `x`, which are one unit apart; the tooltip shows the fields in `also`, too."""
    places = [float(row[x.field]) for row in rows]
    unit = min((b - a for a, b in itertools.pairwise(places)), default=1.0)
    low, high = (min(places) - unit / 2, max(places) + unit / 2) if places else (0.0, 1.0)
    filled = 0.8 if len(rows) < 120 else 1.0
    chart: alt.Chart = (
        alt.Chart(data(rows))
        .mark_bar(
            color=colour, width=alt.ExprRef(f"max(1, {filled} * width / {(high - low) / unit})"), orient="vertical"
        )
        .encode(
            x=_x(Axis(x.field, x.title, x.format, domain=(low, high), whole=x.whole)),
            y=_y(Axis(y.field, y.title, y.format, zero=True, whole=y.whole)),
            tooltip=[_tooltip(axis) for axis in (*also, x, y)],
        )
        .properties(width="container", height=height)
    )
    return chart


def dots(rows: Rows, names: str, x: Axis, band: tuple[str, str] | None = None) -> alt.LayerChart:
    """A point for every name in the column `names`, one below the other, on a bar from lowest to highest."""
    looks = styles([str(row[names]) for row in rows])
    y = alt.Y(f"{names}:N", sort=None, axis=alt.Axis(title=None, labelLimit=220, grid=True))
    base = alt.Chart(data(rows)).encode(y=y, color=by_series(alt.Color, names, looks, "colour", True).legend(None))
    shown = [alt.Tooltip(f"{names}:N"), _tooltip(x), *(_tooltip(Axis(field, field, x.format)) for field in band or ())]
    point = base.mark_point(filled=True, size=90, opacity=1).encode(x=_x(x), tooltip=shown)
    layers = [point.encode(shape=by_series(alt.Shape, names, looks, "shape", True).legend(None))]
    if band:
        rule = base.mark_rule(strokeWidth=3, opacity=0.35)
        layers.insert(0, rule.encode(x=_x(replace(x, field=band[0])), x2=alt.X2(f"{band[1]}:Q")))
    return layered(layers, max(60, 28 * len(rows)))


def client_map(cells: ClientMap, names: Sequence[str], ends: tuple[str, str] = ("", "")) -> alt.LayerChart:
    """The map of clients and rounds: what every client did in every round, a row a client, in the order of `cells`.

    `names` are those of the rows (without commas), `ends` those of the first and the last row, if there are too many
    for names. The cells are stored in a few long texts, not in a table of objects: fifty thousand take half a megabyte.
    """
    rounds, clients = cells.state.shape
    thick = max(1.5, min(20.0, 480 / max(1, clients)))
    apart = int(cells.rounds[1] - cells.rounds[0]) if rounds > 1 else 1
    dense = thick < 6
    x = Axis("round", "round", "~d", domain=(float(cells.rounds[0]) - apart / 2, float(cells.rounds[-1]) + apart / 2))
    y = alt.Y("_row:Q", axis=_row_axis(clients, ends), scale=alt.Scale(domain=[clients + 0.5, 0.5], nice=False))
    whole = alt.ExprRef(f"width / {rounds} - {0 if dense else 1}")
    cell = (
        alt.Chart()
        .mark_rect(width=whole, height=thick - (0 if dense else 1), tooltip={"content": "data"})
        .encode(x=_x(x), y=y, fill=_state_colours(cells))
    )
    over = (
        alt.Chart()
        .mark_rect(
            width=alt.ExprRef(f"width / {rounds} * 0.4") if dense else whole,
            height=thick - (0 if dense else 2),
            fill=INK if dense else "transparent",
            strokeWidth=0 if dense else 1.5,
            xOffset=alt.ExprRef(f"width / {rounds} * -0.3") if dense else 0,
            tooltip={"content": "data"},
        )
        .transform_filter("datum['starts over'] == 'yes'")
        .encode(x=_x(x), y=y, stroke=_over_colour(dense))
    )
    places = alt.sequence(0, rounds * clients, as_="_cell")
    layers = [cell, over] if cells.deprecated.any() else [cell]
    chart = layered(layers, round(thick * clients), data=places).transform_calculate(**_cell_fields(clients))
    params = [
        param
        for name, text in _arrays(cells, names).items()
        for param in (alt.param(name=f"{name}_text", value=text), alt.param(name=name, expr=f"split({name}_text, ',')"))
    ]
    return chart.add_params(*params)


def _row_axis(clients: int, ends: tuple[str, str]) -> alt.Axis:
    """Every row has a name if there is room; otherwise only the first and the last."""
    if clients <= 40:
        values, label = list(range(1, clients + 1)), "map_clients[datum.value - 1]"
    else:
        values, label = [1, clients], f"datum.value == 1 ? '{ends[0]}' : '{ends[1]}'"
    return alt.Axis(title="client", values=values, tickCount=clients, labelExpr=label, grid=False, labelOverlap=False)


def _cell_fields(clients: int) -> dict[str, str]:
    """The fields of a cell, as expressions of its place in the arrays; tooltips show names without "_"."""
    return {
        "_row": f"datum._cell % {clients} + 1",
        "client": "map_clients[datum._row - 1]",
        "round": f"toNumber(map_rounds[floor(datum._cell / {clients})])",
        "what happened": "map_said[map_states[datum._cell]]",
        "base version": "map_bases[datum._cell]",
        "arrived": "map_arrivals[datum._cell] == '' ? '' : format(toNumber(map_arrivals[datum._cell]), ',.1f') + ' s'",
        "starts over": "map_over[datum._cell] == '1' ? 'yes' : 'no'",
    }


def _arrays(cells: ClientMap, names: Sequence[str]) -> dict[str, str]:
    """The map as flat lists, round after round, each as one text with commas; missing values are empty."""
    arrays: dict[str, Sequence[Any]] = {
        "map_clients": names,
        "map_rounds": cells.rounds.tolist(),
        "map_said": [STATES[state][0] for state in sorted(STATES)],
        "map_states": cells.state.ravel().tolist(),
        "map_bases": ["" if base < 0 else base for base in cells.base.ravel().tolist()],
        "map_arrivals": ["" if math.isnan(at) else f"{at:.1f}" for at in cells.arrival_s.ravel().tolist()],
        "map_over": cells.deprecated.ravel().astype(int).tolist(),
    }
    return {name: ",".join(map(str, values)) for name, values in arrays.items()}


def _state_colours(cells: ClientMap) -> alt.Fill:
    shown = [STATES[state] for state in STATES if np.any(cells.state == state)]
    scale = alt.Scale(domain=[name for name, _ in shown], range=[colour for _, colour in shown])
    legend = alt.Legend(symbolType="square", symbolStrokeColor=_LINE, symbolStrokeWidth=1)
    return alt.Fill("what happened:N", scale=scale, title=None, legend=legend)


def _over_colour(dense: bool) -> alt.StrokeDatum:
    legend = alt.Legend(
        symbolType="square", symbolFillColor=INK if dense else "transparent", symbolStrokeColor=INK,
        symbolStrokeWidth=1.5,
    )  # fmt: skip
    return alt.StrokeDatum("starts over", scale=alt.Scale(domain=["starts over"], range=[INK]), legend=legend)
