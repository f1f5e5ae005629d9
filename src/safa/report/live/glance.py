"""What a list shows of a run, a sweep, an arena or a reproduction: its state, how far it is, and its main metric.

Files that grow are read from where the last look ended, so that a look costs little, however long a run is. A last line
that is half-written is read at the next look.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress
from pathlib import Path
from typing import Any

from safa.errors import SafaError
from safa.report.live.folders import Kind
from safa.report.words import protocol_name
from safa.runs import load_run
from safa.runs.folder import ARENA, RUNS, SWEEP, TABLE
from safa.runs.lock import is_held, is_written
from safa.runs.settings import Settings
from safa.runs.sweep_folder import SweepFolder
from safa.runs.table import parsed_row, read_cells

__all__ = ["Glance", "Lines", "State", "Watcher", "watcher_of"]

_AT_ONCE = 4_000_000
"""So many bytes are read in one go; of more, samples are read."""
_MOST_BYTES = 1_000_000_000
_SAMPLES, _SAMPLE = 48, 65_536
_POINTS = 160
_HEAD = re.compile(rb'\{"round":(\d+),')
_TAIL = re.compile(rb'"loss":([-+.\w]+),"metrics":(\{[^{}]*\})\}\s*\Z')
_ACCURACY = re.compile(rb'"last_accuracy":([-+.\w]+)')


class State(StrEnum):
    """Whether something is being written, came to its end, or neither."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Glance:
    """What there is to see at a glance."""

    kind: Kind
    state: State
    words: str
    """What was run."""
    done: int
    total: int | None
    """How many there will be at most, as far as that is known."""
    unit: str
    metric: str
    points: tuple[float, ...]
    """The main metric so far: over the rounds of a run, or of one run after the other."""
    changed: float
    """When it was written last, in seconds since 1970."""
    inside: str | None = None
    """The folder in its own one in which more is to be found; "" for its own."""


class Lines:
    """The complete lines that were added to a file since the last look. It may be replaced or cut off meanwhile.

    With `sampled`, of a lot of lines only some are read, evenly spread, and the last ones.
    """

    def __init__(self, path: Path, *, sampled: bool = False) -> None:
        self._path, self._sampled = path, sampled
        self._place, self._inode, self._end = 0, 0, b""

    def new(self) -> tuple[bool, list[bytes]]:
        """Whether the file is another one than at the last look, and the lines since then, or of this other one."""
        with suppress(OSError), self._path.open("rb") as file:
            number = file.fileno()
            fresh = self._is_another(number)
            self._place = 0 if fresh else self._place
            samples = self._skip(number) if self._sampled else []
            whole, newline, _ = _between(number, self._place, os.fstat(number).st_size).rpartition(b"\n")
            self._inode, self._place = os.fstat(number).st_ino, self._place + len(whole) + len(newline)
            self._end = os.pread(number, min(64, self._place), max(0, self._place - 64))
            return fresh, [*samples, *(whole.split(b"\n") if newline else [])]
        return False, []

    def _skip(self, file: int) -> list[bytes]:
        """Where there is much more to read than is worth it: some lines, and go on with the last ones."""
        new = os.fstat(file).st_size - self._place
        if new <= _AT_ONCE:
            return []
        found = [_line_at(file, self._place + n * new // _SAMPLES) for n in range(_SAMPLES)]
        self._place = _start_of_line(file, self._place + new - _SAMPLE)
        return [line for line in found if line]

    def _is_another(self, file: int) -> bool:
        found = os.fstat(file)
        if found.st_ino != self._inode or found.st_size < self._place:
            return True
        return os.pread(file, len(self._end), self._place - len(self._end)) != self._end


def _between(file: int, start: int, end: int) -> bytes:
    if end - start > _MOST_BYTES:
        raise SafaError("the file is too large to be shown here")
    return os.pread(file, max(0, end - start), start)


def _start_of_line(file: int, place: int) -> int:
    """The start of the first line behind a place; that place itself if there is none near."""
    return place + os.pread(file, 64 * _SAMPLE, place).find(b"\n") + 1


def _line_at(file: int, place: int) -> bytes:
    """The first whole line behind a place; nothing where it is very long, or the last."""
    parts = os.pread(file, 8 * _SAMPLE, place).split(b"\n", 2)
    return parts[1] if len(parts) == 3 else b""


class Watcher:
    """Looks at a folder again and again."""

    kind = Kind.RUN

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def look(self) -> Glance:
        """What there is to see now."""
        raise NotImplementedError


def watcher_of(folder: Path, kind: Kind) -> Watcher:
    """What looks at a folder of that kind."""
    return _WATCHERS[kind](folder)


class _Series:
    """Numbers of which a curve is drawn; of many, evenly spread ones."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._every, self._count = 1, 0

    def add(self, value: float) -> None:
        self._count += 1
        if not math.isfinite(value):
            return
        if self._every > 1 and (self._count - 1) % self._every and self.points:
            self.points[-1] = value  # the last one is always there
        else:
            self.points.append(value)
        if len(self.points) > 2 * _POINTS:
            self.points, self._every = [*self.points[:-1:2], self.points[-1]], 2 * self._every


class _RunWatcher(Watcher):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._lines, self._read = Lines(folder / "rounds.jsonl", sampled=True), (0, 0)
        self._settings: Settings | None = None
        self._done, self._series = 0, _Series()

    def look(self) -> Glance:
        settings = self._read_settings()
        main = next(iter(settings.metrics), "loss")
        fresh, lines = self._lines.new()
        if fresh:
            self._done, self._series = 0, _Series()
        for line in lines:
            self._take(line, main)
        changed = max(_changed(self.folder / name) for name in ("config.toml", "rounds.jsonl", "summary.json"))
        words = f"Deployment of {_words(settings)}" if self.kind is Kind.DEPLOYMENT else _words(settings)
        points = tuple(self._series.points)
        return Glance(self.kind, self._state(), words, self._done, settings.rounds, "rounds", main, points, changed)

    def _state(self) -> State:
        if (self.folder / "summary.json").is_file():
            return State.FINISHED
        return State.RUNNING if is_written(self.folder / "rounds.jsonl") else State.STOPPED

    def _read_settings(self) -> Settings:
        found = (self.folder / "config.toml").stat()
        if self._settings is None or self._read != (found.st_mtime_ns, found.st_ino):
            self._settings, self._read = load_run(self.folder).settings, (found.st_mtime_ns, found.st_ino)
        return self._settings

    def _take(self, line: bytes, main: str) -> None:
        """A line of the rounds, of which only the ends are looked at."""
        head, tail = _HEAD.match(line[:64]), _TAIL.search(line[-4000:])
        if head:
            self._done = int(head[1])
        if tail and tail[1] != b"null":
            with suppress(ValueError):
                values = {"loss": float(tail[1]), **json.loads(tail[2])}
                self._series.add(float(values.get(main, math.nan)))


class _DeploymentWatcher(_RunWatcher):
    kind = Kind.DEPLOYMENT


class _SweepWatcher(Watcher):
    kind = Kind.SWEEP

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._read: tuple[float, ...] = ()
        self._total: int | None = None
        self._rows: list[dict[str, Any]] = []

    def look(self) -> Glance:
        changed = _changed(self.folder / SWEEP), _changed(self.folder / TABLE)
        if changed != self._read:
            self._read, self._total, self._rows = changed, _planned(self.folder), _rows(self.folder / TABLE)
        done, rows = len(self._rows), self._rows
        metric = _main_metric(rows)
        found = [row.get(f"last_{metric}") for row in rows]
        state = State.FINISHED if done == (self._total or done) else State.STOPPED
        state = State.RUNNING if is_held(self.folder) else state
        tasks = ", ".join(dict.fromkeys(str(row.get("task")) for row in rows))
        words = f"Sweep on {tasks}" if tasks else "Sweep"
        finite = tuple(float(p) for p in found if isinstance(p, int | float) and math.isfinite(p))
        inside = RUNS if (self.folder / RUNS).is_dir() else None
        points = finite[-_POINTS:]
        return Glance(self.kind, state, words, done, self._total, "runs", metric, points, max(changed), inside)


class _ArenaWatcher(Watcher):
    kind = Kind.ARENA

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._sweeps: dict[Path, _SweepWatcher] = {}

    def look(self) -> Glance:
        for file in sorted(self.folder.glob(f"*/*/{SWEEP}")):
            if not (file.is_symlink() or file.parent.is_symlink() or file.parent.parent.is_symlink()):
                self._sweeps.setdefault(file.parent, _SweepWatcher(file.parent))
        found = [sweep.look() for sweep in self._sweeps.values()]
        state = State.FINISHED if (self.folder / ARENA).is_file() else State.STOPPED
        state = State.RUNNING if any(one.state is State.RUNNING for one in found) else state
        done, total = sum(one.done for one in found), sum(one.total or 0 for one in found)
        changed = max((one.changed for one in found), default=_changed(self.folder / "plan.toml"))
        last = max(found, key=lambda one: one.changed, default=None)
        metric, points = (last.metric, last.points) if last else ("", ())
        words = f"Arena: {len({path.parent for path in self._sweeps}):,} worlds begun"
        return Glance(self.kind, state, words, done, total or None, "runs", metric, points, changed, "")


class _ReproductionWatcher(Watcher):
    kind = Kind.REPRODUCTION

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._lines, self._done, self._series = Lines(folder / "results.jsonl"), 0, _Series()

    def look(self) -> Glance:
        fresh, lines = self._lines.new()
        if fresh:
            self._done, self._series = 0, _Series()
        for line in lines:
            self._done += 1
            found = _ACCURACY.search(line)
            with suppress(ValueError):
                self._series.add(float(found[1]) if found else math.nan)
        results = self.folder / "results.jsonl"
        state = State.RUNNING if is_written(results) else State.STOPPED
        if state is State.STOPPED and (self.folder / "report.html").is_file():
            state = State.FINISHED
        words, points = "Reproduction of the paper", tuple(self._series.points)
        return Glance(self.kind, state, words, self._done, None, "runs", "accuracy", points, _changed(results))


_WATCHERS: dict[Kind, type[Watcher]] = {
    one.kind: one for one in (_RunWatcher, _DeploymentWatcher, _SweepWatcher, _ArenaWatcher, _ReproductionWatcher)
}


def _words(settings: Settings) -> str:
    fraction = "" if settings.unmet("fraction") else f", C = {settings.fraction:g}"
    what = f"{protocol_name(settings.protocol)} on {settings.task}{fraction}"
    return f"{what}, {settings.clients:,} clients, seed {settings.seed}"


def _changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _planned(folder: Path) -> int | None:
    """How many runs a sweep is planned to have."""
    return len(SweepFolder.read(folder).varied) if (folder / SWEEP).is_file() else None


def _rows(table: Path) -> list[dict[str, Any]]:
    """The rows of a table that is being written: the columns that are shown of them."""
    if not table.is_file():
        return []
    (_, names), *lines = read_cells(table) or [("", [])]
    wanted = [name == "task" or name.startswith(("metric.", "last_")) for name in names]
    shown = list(compress(names, wanted))
    return [parsed_row(shown, list(compress(cells, wanted))) for _, cells in lines]


def _main_metric(rows: Sequence[dict[str, Any]]) -> str:
    """The first metric of the runs' task, as their table has it."""
    names = [name.removeprefix("metric.") for row in rows[:1] for name in row if name.startswith("metric.")]
    return next(iter(names), "loss")
