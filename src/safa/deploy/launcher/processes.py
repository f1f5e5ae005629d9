"""Programs that are started and stopped together, with all processes that they start in turn.

They start others, some of them detached in sessions of their own. So everything that is started here has a random token
in its environment, and is found by it. Where the environment of a process cannot be read, it is found by its parent or
its session; where there is no /proc, by its process group.

A watchdog, a small process of its own, waits for the end of the process that started it. When that ends, be it by
SIGKILL, the watchdog stops what is left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Self, cast

# The watchdog executes this file by itself, so it imports nothing but the standard library.

__all__ = ["STARTED", "Processes", "Supervised", "private_files", "process_tree"]

STARTED = "started"
"""The line of `Supervised` for a start."""

_PRIVATE = 0o077  # the umask: files of a deployment are readable by its user only
_MARK = "SAFA_PROCESS_TREE"
_PROC = Path("/proc")
_TERM_S, _KILL_S = 2.0, 1.0
_POLL_S = 0.05
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Files that are written in here are readable by the user of this process only, as are those of `Processes`."""
    before = os.umask(_PRIVATE)
    try:
        yield
    finally:
        os.umask(before)


class Processes:
    """Starts programs, and stops all of them at the end, whatever happens in between.

    with Processes() as processes:
        link = processes.start(["flower-superlink", "--insecure"], log=Path("superlink.log"))
    """

    def __init__(self, environment: Mapping[str, str] | None = None, *, kill_first: str = "") -> None:
        """`environment` is that of all programs (default: that of this process).

        Processes whose command line contains `kill_first` are killed before the others are asked to end.
        """
        self._kill_first = kill_first
        self._environment = dict(os.environ if environment is None else environment)
        self.token = secrets.token_hex(16)
        self._started: list[subprocess.Popen[bytes]] = []
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.token, self._kill_first],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            _stop(self.alive, self._kill_first)
            for process in self._started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILL_S)
        finally:
            watchdog, self._watchdog = self._watchdog, None
            if watchdog is not None:
                with contextlib.suppress(OSError):
                    cast(IO[bytes], watchdog.stdin).close()
                watchdog.wait()

    def start(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program, whose output goes to the end of a file."""
        with private_files(), log.open("ab") as output:
            return self._popen(command, environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def ask(
        self, command: Sequence[str], text: str, *, timeout_s: float, environment: Mapping[str, str] | None = None
    ) -> tuple[str, str]:
        """The standard output and the standard error of a program that is given a text on its standard input."""
        pipe = subprocess.PIPE
        process = self._popen(command, environment, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            output, errors = process.communicate(text.encode(), timeout=timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
        return output.decode(errors="replace"), errors.decode(errors="replace")

    def stop(self, some: Iterable[subprocess.Popen[bytes]], *, timeout_s: float) -> None:
        """Ask some programs to end, and wait so many seconds for that."""
        processes = [process for process in some if process.poll() is None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Kill the processes of `kill_first`. What they have done is on the disk."""
        _kill(self.alive(), self._kill_first)

    def is_running(self, *marks: str) -> bool:
        """Whether there is a process whose command line contains all of these marks; without /proc it may be so."""
        lines = map(_command_line, self.alive())
        return not _PROC.is_dir() or any(all(mark in line for mark in marks) for line in lines)

    def alive(self) -> set[int]:
        """Everything that was started here, directly or not, and still runs."""
        self._started = [process for process in self._started if process.poll() is None]
        return process_tree(self.token, [process.pid for process in self._started])

    def _popen(
        self, command: Sequence[str], environment: Mapping[str, str] | None, **streams: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        if self._watchdog is None:
            raise RuntimeError("programs are started inside of `with Processes()` only")
        variables = {
            **self._environment,
            **(environment or {}),
            f"{_MARK}_{self.token}": "1",
        }  # it may have tokens of others, too
        process = subprocess.Popen(  # type: ignore[call-overload]
            list(command), env=variables, start_new_session=True, umask=_PRIVATE, **streams
        )
        self._started.append(process)
        with contextlib.suppress(OSError):  # the watchdog may have been killed
            stdin = cast(IO[bytes], self._watchdog.stdin)
            stdin.write(f"{process.pid}\n".encode())
            stdin.flush()
        return cast("subprocess.Popen[bytes]", process)


class Supervised:
    """A program that is restarted whenever it ends, after a pause that doubles while it keeps ending."""

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes]],
        notify: Callable[[str], object],
        why: Callable[[], str] = lambda: "",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`notify` is called with one line for every start and end; `why` returns the known reason of an end."""
        self._start, self._notify, self._why, self._clock = start, notify, why, clock
        self._next = clock()
        self._began = 0.0
        self._pause = _FIRST_PAUSE_S
        self.process: subprocess.Popen[bytes] | None = None

    def tick(self) -> None:
        """Start it if it does not run and the pause is over."""
        now = self._clock()
        if self.process is not None and self.process.poll() is not None:
            if now - self._began >= _LONGEST_PAUSE_S:
                self._pause = _FIRST_PAUSE_S
            reason = self._why()
            ended = f"ended with exit code {self.process.returncode}{f' ({reason})' if reason else ''}"
            self._notify(f"{ended}; restarting in {self._pause:g} s")
            self.process, self._next = None, now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        if self.process is None and now >= self._next:
            self.process, self._began = self._start(), now
            self._notify(STARTED)


# -- finding and stopping --------------------------------------------------------------------------------------------


def process_tree(token: str, groups: Iterable[int] = ()) -> set[int]:
    """The processes that have a token in their environment, that descend from one that has, or share its session.

    Without /proc, those of the `groups` that are alive.
    """
    if not _PROC.is_dir():
        return {group for group in groups if _signal_group(group, 0)}
    mark = f"{_MARK}_{token}=1".encode()
    table = _table()
    found = {pid for pid in table if mark in _environment(pid)} | (set(groups) & table.keys())
    sessions = {table[pid][1] for pid in found}
    found |= {pid for pid, (_, session) in table.items() if session in sessions}
    while more := {pid for pid, (parent, _) in table.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _table() -> dict[int, tuple[int, int]]:
    """Parent and session of every process that runs; zombies do not."""
    table = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if state not in "ZX":
                    table[int(folder.name)] = int(parent), int(session)
    return table


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _stop(alive: Callable[[], set[int]], kill_first: str) -> None:
    """Stop all processes that are alive, and those that start in the meantime: by SIGTERM, then by SIGKILL."""
    _kill(alive(), kill_first)
    for number, timeout_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        deadline = time.monotonic() + timeout_s
        signalled: set[int] = set()
        while living := alive():
            for pid in living - signalled:
                _signal(pid, number)
            signalled |= living
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        else:
            return


def _kill(pids: Iterable[int], mark: str) -> None:
    for pid in pids if mark else ():
        if mark in _command_line(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _command_line(pid: int) -> str:
    """The command line of a process; "" where it has ended, or where there is no /proc."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _signal(pid: int, number: int) -> None:
    if not _PROC.is_dir():
        _signal_group(pid, number)
    else:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


def _watch() -> None:
    """Wait until the process that started this one ends, and stop the processes that it has left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    token, kill_first = sys.argv[1:]
    groups = [int(line) for line in sys.stdin]
    _stop(lambda: process_tree(token, groups if not _PROC.is_dir() else ()), kill_first)


if __name__ == "__main__":
    _watch()
