"""Following a run through its files: rounds, log lines, and why a process ended."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from safa.deploy.exchange.files import LOG, ROUNDS, finished_rounds
from safa.deploy.exchange.text import printable
from safa.deploy.flower.internals import supernode_exit_reason
from safa.errors import SafaError
from safa.protocol.records import RoundRecord
from safa.runs import has_checkpoint
from safa.runs.settings import Settings

__all__ = ["ClientErrors", "Notify", "Server", "exit_reason", "follow_run", "last_line", "run_events"]

Notify = Callable[[RoundRecord | str], object]
"""Is called with every finished round, and with one line for everything else that a person should know."""

_LAST = 4000
_SUMMARY = "summary.json"
_WARNINGS = re.compile(r"\S+ (WARNING|ERROR|CRITICAL) (.*)")
_JOINS = re.compile(r"\S+ INFO (.+ is (?:new|back|here again): .*|resuming after .*)")
_TO_SERVER = re.compile(r"WARNING\s*:\s+To the server: (.+)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Flower's log is coloured
_ERRORS = ("error: ", "critical: ")
_PAUSE_S, _TIDY_S = 0.25, 2.0


class _Tail:
    """The complete lines that are appended to a file from now on. The file may be truncated meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            self._offset = min(self._offset, length)  # it was truncated
            file.seek(self._offset)
            whole, newline, _ = file.read(length - self._offset).rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").split("\n") if newline else []


def run_events(
    folder: Path, over: Callable[[], bool], *, sleep: Callable[[float], object] = time.sleep
) -> Iterator[RoundRecord | str]:
    """The rounds of a run from now on, and of its log the clients that join, warnings and errors.

    It ends with the run: when there is a summary, or when `over`, which is called a few times a second, returns True.
    """
    rounds, log = _Tail(folder / ROUNDS), _Tail(folder / LOG)

    def events() -> Iterator[RoundRecord | str]:
        last = False
        while True:
            for line in log.lines():
                warning = _WARNINGS.match(line)
                joins = _JOINS.match(line)
                if warning:
                    yield f"{warning[1].lower()}: {printable(warning[2])}"
                elif joins:
                    yield printable(joins[1])
            for line in rounds.lines():
                yield _round(line)
            if last:
                return
            last = (folder / _SUMMARY).exists() or over()  # and then look once more
            if not last:
                sleep(_PAUSE_S)

    return events()


def _round(line: str) -> RoundRecord | str:
    """A round from its line, or a warning that it is damaged."""
    try:
        return RoundRecord.from_json(line)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return f"warning: a line of {ROUNDS} is damaged"


class Server(Protocol):
    """What is to be known of the process that is followed."""

    def submit(self) -> None:
        """Start the run."""

    def is_over(self) -> bool:
        """Whether the run has ended, finished or not."""

    def stop(self) -> None:
        """Stop what is left of the run, so that nothing more is written to its log."""

    def why(self, error: str) -> str:
        """Why it has ended, given the last error in its log, or ""."""


def follow_run(
    folder: Path, settings: Settings, notify: Notify, *, server: Server, also: Callable[[], None], kind: str
) -> None:
    """Start a run, and notify what happens until it is finished. That its server stops before that is an error.

    `also` is called a few times a second, for the first time before the start. `kind` is the name of the command that
    resumes such a run.
    """

    def over() -> bool:
        also()
        return server.is_over()

    events = run_events(folder, over)
    also()
    server.submit()
    error = ""
    for event in events:
        if isinstance(event, str) and event.startswith(_ERRORS):
            error = event.partition(": ")[2]
        notify(event)
    if not (folder / _SUMMARY).exists():
        server.stop()
        done, reason = finished_rounds(folder), printable(server.why(error))
        if reason != error:
            _note(folder / LOG, reason)
        log = next((log for log in (folder / LOG, folder / "flower" / "superlink.log") if log.exists()), folder)
        stopped = f"the server stopped after round {done} of {settings.rounds}{reason and f': {reason}'}"
        more = "" if "; see " in reason else f" (see {log})"
        raise SafaError(f"{stopped}{more}; resume it with safa deploy {kind} --resume {folder}")
    deadline = time.monotonic() + _TIDY_S
    while has_checkpoint(folder) and time.monotonic() < deadline:  # the server removes it last
        time.sleep(_PAUSE_S)


def _note(log: Path, reason: str) -> None:
    """Append an error to the server's log that it could not write itself."""
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} ERROR {reason}\n")


class ClientErrors:
    """The errors that a client app reports to the server, from the log of its SuperNode, without repetitions."""

    def __init__(self, log: Path) -> None:
        self._tail, self._last = _Tail(log), ""

    def look(self) -> list[str]:
        """The errors since the last call."""
        new = []
        for line in self._tail.lines():
            found = _TO_SERVER.match(_COLOURS.sub("", line))
            if found and found[1] != self._last:
                self._last = found[1]
                new.append(printable(found[1]))
        return new


def exit_reason(log: Path) -> str:
    """Why a SuperNode ended, as far as the end of its log says."""
    return printable(supernode_exit_reason(_end(log)))


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line.strip() for line in _COLOURS.sub("", _end(log)).splitlines()]
    return printable(next((line for line in reversed(lines) if line), ""))


def _end(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
