"""One self-contained HTML page, made of blocks.

A page is a list of sections, a section a list of blocks: words, facts, figures, tables. `render` turns them into one
file that opens from a disk and needs no network: style, script, data and the chart library are all inside. Every text
is escaped, except `Markup`. Every block has a key, made from its place: `blocks_of` gives the blocks by their keys, to
replace those of a page that is open (`window.safa.update`).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.metadata import version
from typing import Any

import altair as alt
import numpy as np
import vl_convert
from numpy.typing import NDArray

from safa.cache import cached_arrays
from safa.report.figures import RECOLOURED, THEMES, specification

__all__ = [
    "BEST", "OUTSIDE", "Block", "Cell", "ClientFigure", "Column", "Fact", "Facts", "Figure", "Folded", "Headline",
    "Mark", "Markup", "Section", "Table", "Words", "blocks_of", "render", "script_hash", "scripts", "style",
]  # fmt: skip


@dataclass(frozen=True)
class Words:
    """Plain text. A blank line begins a new paragraph, `backticks` make code; everything else is shown as it is."""

    text: str


@dataclass(frozen=True)
class Markup:
    """HTML that is not escaped. It must not contain text from users or files."""

    html: str


@dataclass(frozen=True)
class Fact:
    """One card: a name, a value, what the value says, and the name of its column in tables and files."""

    name: str
    value: str
    meaning: str = ""
    column: str = ""


@dataclass(frozen=True)
class Facts:
    """A group of cards."""

    facts: Sequence[Fact]


@dataclass(frozen=True)
class Headline:
    """The few numbers that matter most, large; at most four."""

    facts: Sequence[Fact]


@dataclass(frozen=True)
class Figure:
    """A chart with its title and caption; `alt` describes it for people who cannot see it.

    Charts that are not `wide` are placed side by side if there is room. `canvas` is for charts with thousands of marks.
    """

    chart: alt.TopLevelMixin
    title: str
    caption: str
    alt: str
    wide: bool = True
    canvas: bool = False


@dataclass(frozen=True)
class ClientFigure:
    """The map of clients and rounds, with the details of the client that the reader chooses (see `report.clients`)."""

    data: Mapping[str, Any]
    title: str
    caption: str
    alt: str


@dataclass(frozen=True)
class Mark:
    """A remark on a cell or a row: a symbol, its meaning, and a tone ("good", "bad" or "note")."""

    symbol: str
    label: str
    tone: str = "note"


BEST = Mark("★", "best", "good")
OUTSIDE = Mark("▲", "outside tolerance", "bad")


@dataclass(frozen=True)
class Cell:
    """A text (empty: a missing value), the value that the cell is sorted by (None: its text), and a mark."""

    text: str
    value: float | str | None = None
    mark: Mark | None = None


@dataclass(frozen=True)
class Column:
    """The head of a column, with an explanation that is shown on hover."""

    name: str
    meaning: str = ""


@dataclass(frozen=True)
class Table:
    """A table that can be sorted by every column and filtered by text; `row_marks` marks rows by their place."""

    columns: Sequence[str | Column]
    rows: Sequence[Sequence[str | Cell]]
    caption: str = ""
    filterable: bool = True
    row_marks: Mapping[int, Mark] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = [len(row) for row in self.rows if len(row) != len(self.columns)]
        if wrong:
            raise ValueError(f"a row has {wrong[0]} cells, but there are {len(self.columns)} columns")


@dataclass(frozen=True)
class Folded:
    """Blocks behind a title that opens them; on paper they are open."""

    title: str
    blocks: Sequence[Block]


Block = Words | Markup | Facts | Headline | Figure | ClientFigure | Table | Folded


@dataclass(frozen=True)
class Section:
    """A titled part of the page; `id` is the anchor (default: made from the title).

    One that is not `headed` does not show its title, which then is for screen readers alone.
    """

    title: str
    blocks: Sequence[Block]
    id: str = ""
    headed: bool = True


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page as one string of HTML."""
    anchors = _anchors(sections)
    charts = any(isinstance(block, Figure) for _, block in _leaves(sections))
    library = _library() if charts else ""
    places = {
        "title": html.escape(title),
        "lead": _words(lead),
        "contents": _contents(sections, anchors) if len(sections) > 3 else "",
        "sections": "\n".join(map(_section, sections, anchors)),
        "style": _file("page.css"),
        "themes": _json({"configs": THEMES, "recoloured": RECOLOURED}),
        "library": library,
        "script": _script(),
        "hashes": " ".join(map(script_hash, (library, _script()))),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: places[place[1]], _file("page.html"))


def scripts() -> tuple[str, ...]:
    """The scripts that are in a page: the chart library, and the page's own."""
    return _library(), _script()


def _script() -> str:
    return _file("map.js") + _file("page.js")


def script_hash(script: str) -> str:
    """What allows a script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def style() -> str:
    """The style of a page."""
    return _file("page.css")


def blocks_of(sections: Sequence[Section]) -> dict[str, str]:
    """The HTML of every block by its key; in the place of folded blocks, what is in them."""
    return {key: _block(block, key) for key, block in _leaves(sections)}


def _leaves(sections: Sequence[Section]) -> Iterator[tuple[str, Block]]:
    """The blocks with their keys, also those that are folded."""
    for section, anchor in zip(sections, _anchors(sections), strict=True):
        yield from _inside(section.blocks, anchor)


def _inside(blocks: Sequence[Block], where: str) -> Iterator[tuple[str, Block]]:
    for key, block in _keyed(blocks, where):
        if isinstance(block, Folded):
            yield from _inside(block.blocks, key)
        else:
            yield key, block


def _keyed(blocks: Sequence[Block], where: str) -> Iterator[tuple[str, Block]]:
    """Blocks with the keys that their places give them."""
    return ((f"{where}-{place}", block) for place, block in enumerate(blocks))


def _file(name: str) -> str:
    return resources.files("safa.report").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that can be put into a page.

    It takes seconds to put together, and is kept for later programs.
    """
    kept = cached_arrays(f"vega-{version('vl-convert-python')}", _bundle)
    return kept["script"].tobytes().decode()


def _bundle() -> dict[str, NDArray[np.uint8]]:
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    script = re.sub(r"</(?=script)", r"<\\/", bundle, flags=re.IGNORECASE)
    return {"script": np.frombuffer(script.encode(), dtype=np.uint8)}


def _json(value: Any) -> str:
    """JSON that cannot end the script element that contains it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _anchors(sections: Sequence[Section]) -> list[str]:
    """An anchor for every section, all different."""
    anchors: list[str] = []
    for section in sections:
        wanted = section.id or re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        anchor, number = wanted, 1
        while anchor in anchors:
            number += 1
            anchor = f"{wanted}-{number}"
        anchors.append(anchor)
    return anchors


def _contents(sections: Sequence[Section], anchors: Sequence[str]) -> str:
    items = (
        f'<li><a href="#{html.escape(anchor)}">{html.escape(section.title)}</a></li>'
        for section, anchor in zip(sections, anchors, strict=True)
    )
    return f'<nav class="contents" aria-label="Contents"><ol>{"".join(items)}</ol></nav>'


def _section(section: Section, anchor: str) -> str:
    name = html.escape(anchor)
    unseen = "" if section.headed else ' class="unseen"'
    head = f'<h2 id="{name}-title"{unseen}>{html.escape(section.title)}</h2>'
    inside = _blocks(section.blocks, anchor)
    return f'<section id="{name}" aria-labelledby="{name}-title">\n{head}\n{inside}\n</section>'


def _blocks(blocks: Sequence[Block], where: str) -> str:
    """Blocks one below the other; consecutive figures that are not wide share one grid."""
    parts: list[str] = []
    for key, block in _keyed(blocks, where):
        small = isinstance(block, Figure) and not block.wide
        if small and parts and parts[-1].startswith('<div class="side">'):
            parts[-1] = parts[-1].removesuffix("</div>") + _block(block, key) + "</div>"
        else:
            parts.append(f'<div class="side">{_block(block, key)}</div>' if small else _block(block, key))
    return "\n".join(parts)


def _block(block: Block, key: str) -> str:
    """A block, with its key on the outermost element."""
    return re.sub(r"\A<[a-z]+", lambda tag: f'{tag[0]} data-block="{html.escape(key)}"', _markup(block, key))


def _markup(block: Block, key: str) -> str:
    match block:
        case Words(text):
            return f"<div>{_words(text)}</div>"
        case Markup(markup):
            return f"<div>{markup}</div>"
        case Facts(facts):
            return f'<dl class="facts">{"".join(map(_fact, facts))}</dl>'
        case Headline(facts):
            return f'<dl class="headline">{"".join(map(_fact, facts))}</dl>'
        case Figure():
            return _figure(block)
        case ClientFigure():
            return _client_figure(block)
        case Table():
            return _table(block)
        case Folded(title, blocks):
            return f"<details><summary>{html.escape(title)}</summary>{_blocks(blocks, key)}</details>"


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _words(text: str) -> str:
    return "".join(f"<p>{_inline(part.strip())}</p>" for part in re.split(r"\n\s*\n", text) if part.strip())


def _fact(fact: Fact) -> str:
    column = f" <code>{html.escape(fact.column)}</code>" if fact.column else ""
    meaning = f'<dd class="meaning">{_inline(fact.meaning)}</dd>' if fact.meaning else ""
    return f"<div><dt>{html.escape(fact.name)}{column}</dt><dd>{html.escape(fact.value)}</dd>{meaning}</div>"


def _figure(figure: Figure) -> str:
    """A figure; the script draws its chart."""
    spec = specification(figure.chart)
    height = spec.get("height", 240)
    room = f' style="min-height:{height + 70}px"' if isinstance(height, int | float) else ""
    renderer = "canvas" if figure.canvas else "svg"
    chart = _chart(spec, figure.alt, renderer, room)
    return (
        f'<figure class="{"wide" if figure.wide else "small"}"><h3>{html.escape(figure.title)}</h3>{chart}'
        f"<figcaption>{_inline(figure.caption)}</figcaption></figure>"
    )


def _chart(data: Any, alt: str, renderer: str, room: str) -> str:
    """The place of a chart, with what it is drawn from."""
    return (
        f'<div class="chart" role="img" aria-label="{html.escape(alt)}" data-renderer="{renderer}"{room}>'
        f'<script type="application/json">{_json(data)}</script></div>'
    )


def _client_figure(figure: ClientFigure) -> str:
    """The map, a list of the clients to choose from, and room for the details of one."""
    chart = _chart(figure.data, figure.alt, "map", ' style="min-height:490px"')
    choose = '<select autocomplete="off"><option value="">choose</option></select>'
    choice = f"<p>Click a row, or choose: <label>details of client {choose}</label></p>"
    return (
        f'<figure class="wide"><h3>{html.escape(figure.title)}</h3>{chart}'
        f"<figcaption>{_inline(figure.caption)}</figcaption>"
        f'<div class="client">{choice}<div class="client-details" role="status"></div></div></figure>'
    )


def _table(table: Table) -> str:
    """A table with a button in every head, a box to filter by, and a key to its marks."""
    rows = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in table.rows]
    numeric = [_is_numeric([row[place] for row in rows]) for place in range(len(table.columns))]
    head = "".join(map(_head, table.columns, numeric))
    body = "".join(_row(row, numeric, table.row_marks.get(place)) for place, row in enumerate(rows))
    caption = f"<caption><span>{_inline(table.caption)}</span></caption>" if table.caption else ""
    box = (
        '<label class="filter">Filter <input type="search" autocomplete="off" spellcheck="false"></label>'
        '<span class="count" role="status"></span>'
        if table.filterable
        else ""
    )
    name = html.escape(table.caption or "table")
    return (
        f'<div class="table">{box}<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table>{caption}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{_key(rows, table.row_marks)}</div>"
    )


def _is_numeric(cells: Sequence[Cell]) -> bool:
    there = [cell for cell in cells if cell.text]
    return bool(there) and all(isinstance(cell.value, int | float) for cell in there)


def _head(column: str | Column, numeric: bool) -> str:
    shown = Column(column) if isinstance(column, str) else column
    title = f' title="{html.escape(shown.meaning)}"' if shown.meaning else ""
    kind = ' class="number"' if numeric else ""
    button = f'<button type="button"{title}>{html.escape(shown.name)}</button>'
    return f'<th scope="col" aria-sort="none"{kind}>{button}</th>'


def _row(cells: Sequence[Cell], numeric: Sequence[bool], mark: Mark | None) -> str:
    first = f"{_mark(mark)} " if mark else ""
    tone = f' class="marked {html.escape(mark.tone)}"' if mark else ""
    firsts = [first, *[""] * len(cells)]
    return f"<tr{tone}>{''.join(map(_cell, cells, numeric, firsts))}</tr>"


def _cell(cell: Cell, numeric: bool, before: str) -> str:
    kinds = ["number"] if numeric else ["long"] if len(cell.text) > 40 else []
    kinds += [cell.mark.tone] if cell.mark else []
    kind = f' class="{html.escape(" ".join(kinds))}"' if kinds else ""
    mark = f" {_mark(cell.mark)}" if cell.mark else ""
    shown = _inline(cell.text) or "\N{EN DASH}"
    return f'<td{kind} data-value="{html.escape(_sorted_by(cell))}">{before}{shown}{mark}</td>'


def _sorted_by(cell: Cell) -> str:
    """What the script sorts a cell by; empty if the value is missing."""
    value = cell.text if cell.value is None else cell.value
    if isinstance(value, float) and not math.isfinite(value):
        return "" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value)


def _mark(mark: Mark) -> str:
    label, symbol = html.escape(mark.label), html.escape(mark.symbol)
    inside = f'<span aria-hidden="true">{symbol}</span><span class="unseen">{label}</span>'
    return f'<span class="mark {html.escape(mark.tone)}" title="{label}">{inside}</span>'


def _key(rows: Sequence[Sequence[Cell]], row_marks: Mapping[int, Mark]) -> str:
    """The meaning of the marks of a table."""
    used = dict.fromkeys([*row_marks.values(), *(cell.mark for row in rows for cell in row if cell.mark)])
    items = "".join(
        f'<li><span class="mark {html.escape(mark.tone)}" aria-hidden="true">{html.escape(mark.symbol)}</span> '
        f"{html.escape(mark.label)}</li>"
        for mark in used
    )
    return f'<ul class="key">{items}</ul>' if items else ""
