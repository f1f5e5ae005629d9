"""Glances as HTML. Everything that comes from a file, a name or a setting is escaped here."""

from __future__ import annotations

import html
from collections.abc import Sequence
from urllib.parse import quote

from safa.report.live.folders import Kind
from safa.report.live.glance import Glance, State
from safa.report.words import number

__all__ = ["bar", "glance_html", "inside_url", "row_html", "run_url"]

_WIDTH, _HEIGHT = 120, 28


def run_url(path: str) -> str:
    """The address of a page."""
    return f"/run/{quote(path)}"


def inside_url(path: str) -> str:
    """The address of the list of what is in a folder."""
    return f"/in/{quote(path)}" if path else "/"


def row_html(path: str, found: Glance) -> str:
    """A row of the list."""
    name, inside = html.escape(path), ""
    if found.inside is not None:
        what = "its runs" if found.kind is Kind.SWEEP else "its sweeps"
        inside = f' <a class="inside" href="{inside_url(f"{path}/{found.inside}".rstrip("/"))}">{what}</a>'
    return (
        f'<li data-run="{name}"><label><input type="checkbox" name="run" value="{name}">'
        f'<span class="unseen">Compare {name}</span></label>'
        f'<div class="name"><a href="{run_url(path)}">{name}</a>{inside}</div>{glance_html(found)}</li>'
    )


def bar(path: str, found: Glance) -> str:
    """What is above the page of a run: the way back, and what there is to see at a glance."""
    parts = path.split("/")
    above = [("All runs", "/")] + [(part, inside_url("/".join(parts[: n + 1]))) for n, part in enumerate(parts[:-1])]
    links = "".join(f'<a href="{url}">{html.escape(name)}</a><span aria-hidden="true">/</span>' for name, url in above)
    here = f'<span aria-current="page">{html.escape(parts[-1])}</span>'
    way = f'<nav class="way" aria-label="Where this is">{links}{here}</nav>'
    return f'<div class="bar">{way}{glance_html(found)}</div>'


def glance_html(found: Glance) -> str:
    """What changes while something runs."""
    return (
        f'<div class="glance {found.state.value}"><span class="words">{html.escape(found.words)}</span>'
        f'<span class="state">{found.state.value}</span>{_curve(found)}{_progress(found)}</div>'
    )


def _progress(found: Glance) -> str:
    of = f" of {found.total:,}" if found.total is not None and found.total != found.done else ""
    bar = ""
    if found.total and found.state is not State.FINISHED:
        bar = f'<progress value="{min(found.done, found.total)}" max="{found.total}" aria-label="progress"></progress>'
    return f'<span class="progress">{bar}<span class="count">{found.done:,}{of} {html.escape(found.unit)}</span></span>'


def _curve(found: Glance) -> str:
    """The main metric, over the rounds of a run as a small curve, of many runs as dots; and its value."""
    if not found.points:
        return '<span class="curve"></span>'
    name, places = html.escape(found.metric), _places(found.points)
    low, high, last = (number(float(value)) for value in (min(found.points), max(found.points), found.points[-1]))
    if found.kind in (Kind.RUN, Kind.DEPLOYMENT):
        said, value = f"{name} from {number(float(found.points[0]))} to {last}", last
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        marks = f'<polyline points="{line}" fill="none" vector-effect="non-scaling-stroke"/>'
    else:
        said, value = f"{name} of the runs, from {low} to {high}", low if low == high else f"{low} to {high}"
        marks = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8"/>' for x, y in places)
    drawing = f'<svg viewBox="-2 0 {_WIDTH + 4} {_HEIGHT}" role="img" aria-label="{said}">{marks}</svg>'
    return f'<span class="curve">{drawing}<span class="value">{name} <b>{value}</b></span></span>'


def _places(points: Sequence[float]) -> list[tuple[float, float]]:
    """Where numbers are drawn, the first on the left, the highest on top."""
    low, tall = min(points), (max(points) - min(points)) or 1.0
    shown = points if len(points) > 1 else [points[0], points[0]]
    return [
        (_WIDTH * place / (len(shown) - 1), 3 + (_HEIGHT - 6) * (1 - (value - low) / tall))
        for place, value in enumerate(shown)
    ]
