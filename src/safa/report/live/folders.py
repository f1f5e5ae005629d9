"""Which folders under a folder hold runs, sweeps, arenas and reproductions.

Nothing outside of the folder is ever looked at: no symbolic link is followed, and what a browser asks for is found
step by step from the top.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from safa.runs.folder import ARENA, ROSTER, RUNS, STATUS, SWEEP, SWEEP_FORMAT, TABLE
from safa.runs.settings import FORMAT

__all__ = ["Folders", "Kind", "has_links", "kind_of"]

_CONFIG, _ROUNDS, _SUMMARY, _DEPLOY = "config.toml", "rounds.jsonl", "summary.json", "deploy.toml"
_PLAN, _RESULTS, _SESSIONS = "plan.toml", "results.jsonl", "sessions.jsonl"
_READ = {_CONFIG, _ROUNDS, _SUMMARY, _DEPLOY, _PLAN, _RESULTS, _SESSIONS, ARENA, ROSTER, STATUS, SWEEP, TABLE}
"""The files that are read. A folder in which one of them is a link is none of ours."""
_DEEPEST = 8


class Kind(StrEnum):
    """What a folder holds."""

    RUN = "run"
    DEPLOYMENT = "deployment"
    SWEEP = "sweep"
    ARENA = "arena"
    REPRODUCTION = "reproduction"


_MARKS = (
    (_DEPLOY, _CONFIG, FORMAT, Kind.DEPLOYMENT),
    (_CONFIG, _CONFIG, FORMAT, Kind.RUN),
    (SWEEP, SWEEP, SWEEP_FORMAT, Kind.SWEEP),
    (_PLAN, _PLAN, "safa arena", Kind.ARENA),
    (_RESULTS, _RESULTS, '{"key":', Kind.REPRODUCTION),
)
"""By which file a folder is known, and which of its files has to hold which words: the first that does."""
_BEGINNING = 4096
_INSIDE = {Kind.SWEEP: (RUNS, f"{RUNS}/*", f"{RUNS}/*/*.*"), Kind.ARENA: ("*", "*/*", "*/*/*")}
"""What is in the folder of a sweep or an arena, besides its own files."""


def kind_of(folder: Path) -> Kind | None:
    """What a folder holds; None where that is nothing of ours."""
    return _looked_at(folder)[0]


def _looked_at(folder: Path) -> tuple[Kind | None, list[str]]:
    """What a folder holds, and the names of the folders in it, without those that are hidden or links."""
    files, folders = set(), []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name in _READ:
                    if not entry.is_file(follow_symlinks=False):
                        return None, []
                    files.add(entry.name)
                elif not entry.name.startswith(".") and _is_text(entry.name) and entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
        known = (kind for mark, file, words, kind in _MARKS if {mark, file} <= files and _says(folder / file, words))
        return next(known, None), sorted(folders)
    except OSError:
        return None, []


def _says(file: Path, words: str) -> bool:
    """Whether a file holds these words near its beginning; of results, there may be none yet."""
    with file.open("rb") as content:
        beginning = content.read(_BEGINNING)
    return words.encode() in beginning or (file.name == _RESULTS and not beginning)


def _is_folder(path: Path) -> bool:
    """Whether it is a folder, and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:  # a name that is too long, too
        return False


def _is_text(name: str) -> bool:
    """Whether a name can be written in an address; a name of several lines is not found again."""
    try:
        return b"\n" not in name.encode()
    except UnicodeEncodeError:
        return False


def has_links(folder: Path, kind: Kind) -> bool:
    """Whether something that the page of a sweep or an arena is made of is a link."""
    return any(path.is_symlink() for pattern in _INSIDE.get(kind, ()) for path in folder.glob(pattern))


class Folders:
    """The folders under one folder. A folder is looked through again only when something was put into it or removed."""

    def __init__(self, top: Path) -> None:
        self.top = top.resolve()
        self._seen: dict[Path, tuple[int, Kind | None, list[str]]] = {}

    def find(self, path: str) -> Path | None:
        """The folder at a path below the top, as a browser names it; None where there is none, or a link on the way."""
        found = self.top
        for part in path.split("/") if path else []:
            if part in ("", ".", "..") or "\0" in part or os.sep in part or part.startswith("."):
                return None
            found = found / part
            if not _is_folder(found):
                return None
        return found

    def name_of(self, folder: Path) -> str:
        """The path of a folder below the top, with slashes."""
        return folder.relative_to(self.top).as_posix()

    def below(self, folder: Path) -> Iterator[tuple[Path, Kind]]:
        """All folders below a folder that hold something of ours; what is in them belongs to them."""
        for name in self._look(folder)[1]:
            yield from self._walk(folder / name, _DEEPEST)

    def _walk(self, folder: Path, deeper: int) -> Iterator[tuple[Path, Kind]]:
        kind, folders = self._look(folder)
        if kind is not None:
            yield folder, kind
        elif deeper:
            for name in folders:
                yield from self._walk(folder / name, deeper - 1)

    def _look(self, folder: Path) -> tuple[Kind | None, list[str]]:
        try:
            changed = folder.stat(follow_symlinks=False).st_mtime_ns
        except OSError:
            self._seen.pop(folder, None)
            return None, []
        known = self._seen.get(folder)
        if known is None or known[0] != changed:
            known = self._seen[folder] = changed, *_looked_at(folder)
        return known[1:]
