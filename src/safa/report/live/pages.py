"""The pages of what is under a folder, made when somebody asks for them, and made anew when something changes.

Making a page takes a part of a second of one core. So that this does not slow the run that is looked at, its page is
made anew only so often that it takes a small share of the time; what is seen at a glance comes with every round.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from altair.utils.schemapi import debug_mode
from numpy.typing import ArrayLike

from safa.errors import SafaError
from safa.protocol.records import RecordOrder, RoundRecord
from safa.report import page_of, run_page, run_sections, speeds_of
from safa.report.live.deployment import round_section
from safa.report.live.folders import Folders, Kind, has_links, kind_of
from safa.report.live.glance import Glance, Lines, State, Watcher, watcher_of
from safa.report.page import Section, blocks_of, render
from safa.runs import Run, load_run
from safa.runs.folder import ARENA, SWEEP, TABLE

__all__ = ["Library", "Made", "Maker", "Watched", "sentence"]

Maker = Callable[[Path], str]
"""Makes the page of a folder."""

Result = TypeVar("Result")
Written = tuple[State, tuple[object, ...]]

_ONE = threading.Lock()
"""One page is made at a time, so that never more than one core is taken."""
_BY_BLOCKS = (Kind.RUN, Kind.DEPLOYMENT)
"""What is sent block by block."""
_GLANCE_S, _LEAST_S = 0.4, 0.9
_PAGE_SHARE, _LIST_SHARE = 0.25, 0.05
"""The shares of one core that are spent on making one page anew, and on looking through one folder, at most."""
_KEPT = 8
"""So many pages are kept."""
_MOST = 300
"""So many rows are in a list at most."""
_FILES = ("config.toml", "rounds.jsonl", "summary.json", "roster.json", "results.jsonl", SWEEP, TABLE, ARENA)


Blocks = dict[str, str]
"""The blocks of a page by their keys."""


@dataclass(frozen=True)
class Made(Generic[Result]):
    """Something that was made of a folder, what the folder was then, and when, in nanoseconds since 1970."""

    what: Result
    of: Written
    at: int


class _OpenRun(Run):
    """A run of which the records that were read are held, while more are being written."""

    def records(self) -> Iterator[RoundRecord]:
        """The rounds that have been read."""
        yield from self.held_records


class Watched:
    """A folder that somebody looks at. May be used by several threads."""

    def __init__(self, folder: Path, kind: Kind, make: Maker) -> None:
        self.folder, self.kind, self._make = folder, kind, make
        self._making, self._looking, self._watcher = threading.Lock(), threading.Lock(), watcher_of(folder, kind)
        self._lines, self._records = Lines(folder / "rounds.jsonl"), list[RoundRecord]()
        self._order: RecordOrder | None = None
        self._speeds: tuple[ArrayLike | None] | None = None
        self._glance: tuple[float, Glance] | None = None
        self._page: Made[str] | None = None
        self._blocks: Made[Blocks] | None = None
        self._due = 0.0
        self._last: State | None = None

    # -- at a glance -------------------------------------------------------------------------------------------------

    def glance(self) -> Glance:
        """What there is to see at a glance, at most half a second old."""
        with self._looking:
            now = time.monotonic()
            if self._glance is None or now - self._glance[0] > _GLANCE_S:
                self._glance = now, _looked(self._watcher)
            return self._glance[1]

    def under_way(self) -> list[Section]:
        """The round of a deployment that is open."""
        state = self.glance().state
        is_open = self.kind is Kind.DEPLOYMENT and state is not State.FINISHED
        return [round_section(self.folder, running=state is State.RUNNING)] if is_open else []

    # -- the page ----------------------------------------------------------------------------------------------------

    def page(self) -> Made[str]:
        """The page as HTML, as it is now."""
        with self._making:
            if self._page is None or self._page.of != self._written():
                self._page = self._timed(self._html)
            return self._page

    def newer(self, than: int) -> Made[Blocks] | None:
        """The blocks of the page, if they are newer than what was made then; none where its kind is not sent so.

        They are made anew if something has changed, and the last time is long enough ago.
        """
        with self._making:
            written = self._written()
            is_page = self._page is not None and self._page.at == than and self._page.of == written
            if not is_page and (self._blocks is None or self._blocks.of != written) and self._is_due(written):
                self._blocks = self._timed(self._block_by_block)
            return self._blocks if self._blocks is not None and self._blocks.at > than else None

    def _written(self) -> Written:
        """What differs where the page may differ: the state, and when files were written."""
        return self.glance().state, tuple(_stamp(self.folder / name) for name in _FILES)

    def _is_due(self, written: Written) -> bool:
        """Whether it is time to make the page anew: at once when a run has ended."""
        return self._last is not written[0] or time.monotonic() >= self._due

    def _timed(self, make: Callable[[], Result]) -> Made[Result]:
        """Make something, and see to it that the next time is not too soon."""
        written, start = self._written(), time.thread_time()
        with _ONE, debug_mode(False):  # charts are checked in tests
            made = Made(make(), written, time.time_ns())
        self._last = written[0]
        self._due = time.monotonic() + max(_LEAST_S, (time.thread_time() - start) / _PAGE_SHARE)
        return made

    def _html(self) -> str:
        try:
            if self.kind in _BY_BLOCKS:
                run = self._run()
                return run_page(run, self._speeds_of(run))
            return self._make(self.folder) if self.kind is Kind.REPRODUCTION else page_of(self.folder)
        except Exception as error:  # whatever may be wrong with files that somebody has changed
            return _fault_page(self.folder, error)

    def _block_by_block(self) -> Blocks:
        try:
            run = self._run() if self.kind in _BY_BLOCKS else None
            return blocks_of(run_sections(run, self._speeds_of(run))) if run else {}
        except Exception:  # the page says why
            return {}

    def _run(self) -> Run:
        run = load_run(self.folder)
        if run.summary is not None:
            self._records, self._lines, self._order = [], Lines(self.folder / "rounds.jsonl"), None
            return run
        self._read_records(run.settings.clients)
        return _OpenRun(settings=run.settings, summary=None, folder=self.folder, held_records=self._records)

    def _read_records(self, clients: int) -> None:
        fresh, lines = self._lines.new()
        if fresh:
            self._records, self._order = [], None
        for line in lines:
            record = RoundRecord.from_json(line.decode())
            self._order = self._order or RecordOrder(rule=record.rule, clients=clients)
            self._order.check(record)
            self._records.append(record)

    def _speeds_of(self, run: Run) -> ArrayLike | None:
        """The speeds of a run's clients, which are found once there is a round."""
        if self._speeds is None:
            found = speeds_of(run)
            if self._records or run.summary is not None:
                self._speeds = (found,)
            return found
        return self._speeds[0]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _looked(watcher: Watcher) -> Glance:
    """A glance, also at what cannot be read."""
    try:
        return watcher.look()
    except Exception as error:
        words = f"cannot be read: {sentence(watcher.folder, error)}"
        return Glance(watcher.kind, State.STOPPED, words, 0, None, "rounds", "", (), 0.0)


def _fault_page(folder: Path, error: Exception) -> str:
    """A page in the place of one that cannot be made."""
    return render(folder.name, f"There is nothing to show yet: {sentence(folder, error)}.", [])


def sentence(folder: Path, error: Exception) -> str:
    """What is wrong, without the path of the folder; of what is not ours only its kind."""
    if isinstance(error, SafaError):
        return str(error).replace(f"{folder}/", "").replace(str(folder), "the folder").rstrip(".")
    return f"its files do not fit together ({type(error).__name__})"


class Library:
    """All that is under a folder."""

    def __init__(self, top: Path, make: Maker) -> None:
        self.folders, self._make = Folders(top), make
        self._lock = threading.Lock()
        self._watchers: dict[Path, Watcher] = {}
        self._pages: OrderedDict[Path, Watched] = OrderedDict()
        self._listed: dict[Path, tuple[float, dict[str, Glance]]] = {}

    def watched(self, path: str) -> Watched | None:
        """The folder at a path as a browser names it; None where there is nothing to show."""
        folder = self.folders.find(path)
        kind = kind_of(folder) if folder is not None and path else None
        if folder is None or kind is None or has_links(folder, kind):
            return None
        with self._lock:
            found = self._pages.pop(folder, None)
            if found is None or found.kind is not kind:
                found = Watched(folder, kind, self._make)
            self._pages[folder] = found
            while len(self._pages) > _KEPT:
                self._pages.popitem(last=False)
            return found

    def glances(self, path: str) -> dict[str, Glance] | None:
        """What is in a folder, by name: first what runs, then what was written last; None where there is no folder."""
        folder = self.folders.find(path)
        if folder is None:
            return None
        with self._lock:
            due, found = self._listed.get(folder, (0.0, {}))
            if time.monotonic() >= due:
                start, found = time.thread_time(), self._look(folder)
                due = time.monotonic() + max(_GLANCE_S, (time.thread_time() - start) / _LIST_SHARE)
                self._listed = ({} if len(self._listed) > _KEPT else self._listed) | {folder: (due, found)}
            return found

    def _look(self, folder: Path) -> dict[str, Glance]:
        found = _newest(list(self.folders.below(folder)))
        for path, kind in found:
            if path not in self._watchers or self._watchers[path].kind is not kind:
                self._watchers[path] = watcher_of(path, kind)
        seen = [(self.folders.name_of(path), _looked(self._watchers[path])) for path, _ in found]
        seen.sort(key=lambda one: (one[1].state is not State.RUNNING, -one[1].changed, one[0]))
        return dict(seen)


def _newest(found: Sequence[tuple[Path, Kind]]) -> list[tuple[Path, Kind]]:
    """As many as fit into a list, those in which a file was made last."""
    if len(found) <= _MOST:
        return list(found)
    return sorted(found, key=lambda one: _stamp(one[0]) or (0, 0), reverse=True)[:_MOST]
