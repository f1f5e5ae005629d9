"""The server: pages, and streams of what changes on them. It reads only, and nothing is served but what it makes."""

from __future__ import annotations

import asyncio
import functools
import html
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import resources
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from safa.report import compare_page
from safa.report.live.access import Access
from safa.report.live.glance import Glance
from safa.report.live.markup import bar, glance_html, inside_url, row_html, run_url
from safa.report.live.pages import Library, Maker, Watched, sentence
from safa.report.page import blocks_of, render, script_hash, scripts, style

__all__ = ["make_app"]

_PAUSE_S = 0.5
_ALIVE = 30
"""After so many pauses something is sent, so that a closed connection is noticed."""
_OTHERWISE = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
"""What pages may do, besides running scripts."""
Stopping = Callable[[], bool]


def make_app(
    folder: Path, *, host: str, port: int, token: str | None, reproduction: Maker, stopping: Stopping = lambda: False
) -> Access:
    """The application that serves what is under a folder.

    `reproduction` makes the page of a reproduction of the paper. Streams end when `stopping` says so.
    """
    views = _Views(Library(folder, reproduction), stopping)
    routes = [
        Route("/", views.list_page),
        Route("/in/{path:path}", views.list_page),
        Route("/run/{path:path}", views.run_page),
        Route("/compare", views.compare_page),
        Route("/events/in/{path:path}", views.list_events),
        Route("/events/run/{path:path}", views.run_events),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return Access(app, host=host, port=port, token=token)


class _Views:
    """What is answered to which address."""

    def __init__(self, library: Library, stopping: Stopping) -> None:
        self._library, self._stopping = library, stopping

    async def list_page(self, request: Request) -> Response:
        path = request.path_params.get("path", "").strip("/")
        found = await run_in_threadpool(self._library.glances, path)
        if found is None:
            return _not_found()
        page = _list_page(path, self._library.folders.top.name, found)
        return HTMLResponse(page, headers={"Content-Security-Policy": _list_policy()})

    async def run_page(self, request: Request) -> Response:
        path = request.path_params["path"]
        watched = await run_in_threadpool(self._library.watched, path)
        if watched is None:
            return _not_found()
        return await run_in_threadpool(lambda: _html(_whole(path, watched)))

    async def compare_page(self, request: Request) -> Response:
        paths = request.query_params.getlist("run")
        return await run_in_threadpool(lambda: _html(_comparison(self._library, paths)))

    async def list_events(self, request: Request) -> Response:
        path = request.path_params["path"].strip("/")
        if self._library.folders.find(path) is None:
            return _not_found()
        return self._stream(request, [functools.partial(_list_changes, self._library, path, {})])

    async def run_events(self, request: Request) -> Response:
        watched = await run_in_threadpool(self._library.watched, request.path_params["path"])
        if watched is None:
            return _not_found()
        changes = _RunChanges(watched, request.query_params.get("at", ""))
        return self._stream(request, [changes.light, changes.rest])

    def _stream(self, request: Request, looks: Sequence[Callable[[], str]]) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return StreamingResponse(self._events(request, looks), media_type="text/event-stream")

    async def _events(self, request: Request, looks: Sequence[Callable[[], str]]) -> AsyncIterator[str]:
        """Look again and again, and send what has changed, as long as somebody listens."""
        yield "retry: 1000\n\n"
        for turn in itertools.count(1):
            for look in looks:
                if self._stopping() or await request.is_disconnected():
                    return
                if found := await run_in_threadpool(look):
                    yield found
            if turn % _ALIVE == 0:
                yield ": alive\n\n"
            await asyncio.sleep(_PAUSE_S)


def _event(name: str, value: object) -> str:
    """An event with a value as JSON, which has no line ends."""
    return f"event: {name}\ndata: {json.dumps(value)}\n\n"


def _list_changes(library: Library, path: str, sent: dict[str, str]) -> str:
    """The rows of a list that have changed since they were sent, and the order of all."""
    rows = {name: row_html(name, found) for name, found in (library.glances(path) or {}).items()}
    changed = {name: row for name, row in rows.items() if sent.get(name) != row}
    if not changed and list(sent) == list(rows):
        return ""
    sent.clear()
    sent.update(rows)
    return _event("rows", {"order": list(rows), "rows": changed})


class _RunChanges:
    """What has changed on a page since it was sent; `at` is when the page was made that the browser has."""

    def __init__(self, watched: Watched, at: str) -> None:
        self._watched, self._at = watched, int(at) if re.fullmatch(r"\d{1,20}", at) else 0
        self._bar, self._sent = "", dict[str, str]()
        self._keys: list[str] | None = None

    def light(self) -> str:
        """What costs nothing to make, and changes all the time: the bar, and the round that is under way."""
        old, self._bar = self._bar, glance_html(self._watched.glance())
        blocks, known = blocks_of(self._watched.under_way()), self._keys
        self._keys = list(blocks)
        if known is not None and self._keys != known:
            return _event("reload", "")  # the server of a deployment was started, or has ended
        return (_event("bar", self._bar) if self._bar != old else "") + self._changed(blocks)

    def rest(self) -> str:
        """The other blocks; of a page that has none, that there is a newer one."""
        newer = self._watched.newer(self._at)
        if newer is None:
            return ""
        self._at = newer.at
        return self._changed(newer.what) if newer.what else _event("stale", newer.at)

    def _changed(self, blocks: dict[str, str]) -> str:
        changed = {key: block for key, block in blocks.items() if self._sent.get(key) != block}
        self._sent |= changed
        return _event("blocks", changed) if changed else ""


def _whole(path: str, watched: Watched) -> str:
    """A page with a bar above it, the round that is under way, and the script that lets it grow."""
    page = watched.page()
    extra = "".join(
        f'<section id="{part.id}" aria-labelledby="{part.id}-title"><h2 id="{part.id}-title">{html.escape(part.title)}'
        f"</h2>{''.join(blocks_of([part]).values())}</section>"
        for part in watched.under_way()
    )
    return _decorated(page.what, bar(path, watched.glance()), extra, f"/events{run_url(path)}?at={page.at}")


def _decorated(page: str, above: str, extra: str, url: str) -> str:
    """A page as `safa report` writes it, with more in it."""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page, count=1)  # the header is stricter
    page = page.replace("</head>", f"<style>{_file('live.css')}</style></head>", 1)
    page = page.replace("<header>", f"<header>{above}", 1)
    head, main, rest = page.partition("</noscript>")
    start, end, after = (head + main + extra + rest).rpartition("</body>")
    script = f'<script id="live" data-url="{html.escape(url)}">{_file("page.js")}</script>'
    return f"{start}{script}{end}{after}"


def _list_page(path: str, top: str, found: dict[str, Glance]) -> str:
    rows = "".join(row_html(name, glance) for name, glance in found.items())
    name = path or top
    way = '<nav class="way" aria-label="Where this is"><a href="/">All runs</a></nav>' if path else ""
    places = {
        "title": html.escape(f"Runs in {name}"),
        "name": html.escape(name),
        "way": way,
        "style": style() + _file("live.css"),
        "rows": rows,
        "url": html.escape(f"/events{inside_url(path) if path else '/in/'}"),
        "script": _file("list.js"),
        "empty": "" if not found else " hidden",
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: places[place[1]], _file("list.html"))


def _comparison(library: Library, paths: list[str]) -> str:
    """The page that compares what was chosen in the list."""
    chosen = [library.watched(path) for path in dict.fromkeys(paths)]
    folders = [one.folder for one in chosen if one is not None]
    if len(folders) < 2 or len(folders) < len(chosen):
        return _plain("Choose two or more in the list to compare them.")
    try:
        page = compare_page(folders)
    except Exception as error:  # whatever may be wrong with their files
        return _plain(f"These cannot be compared: {sentence(library.folders.top, error)}.")
    above = '<nav class="way" aria-label="Where this is"><a href="/">All runs</a></nav>'
    return _decorated(page, above, "", "")


def _plain(words: str) -> str:
    return render("Comparison", words, [])


def _html(page: str) -> Response:
    return HTMLResponse(page, headers={"Content-Security-Policy": _policy()})


def _not_found() -> Response:
    return PlainTextResponse("There is nothing here.\n", 404)


def _file(name: str) -> str:
    return resources.files("safa.report.live").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _policy() -> str:
    """What a page may do: run the scripts of this package, and ask this server.

    The chart library compiles the expressions of charts, which needs 'unsafe-eval'.
    """
    return f"script-src {_allowed(*scripts(), _file('page.js'))} 'unsafe-eval'; {_OTHERWISE}"


@functools.cache
def _list_policy() -> str:
    """What a list may do: run its script, and ask this server."""
    return f"script-src {_allowed(_file('list.js'))}; {_OTHERWISE}"


def _allowed(*texts: str) -> str:
    return " ".join(map(script_hash, texts))
