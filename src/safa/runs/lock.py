"""One server, or one sweep, at a time works on a folder, and others can see whether it does.

A deployment has two locks, since there are two programs: the server app holds `lock`, and the command that started it
holds `flower/launcher.lock`, from before it starts anything until everything is stopped.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from safa.errors import SafaError

__all__ = ["alone", "hold", "hold_launcher", "in_use", "is_held", "is_launched", "is_written", "mark_written"]

_FILE, _LAUNCHER = "lock", Path("flower", "launcher.lock")
_WAIT_S = 30.0
_GLANCE_S = 0.5  # another command may just be looking whether the lock is held
_LOOK_S = 0.1  # a process that looks holds a lock for much less


@contextmanager
def hold(folder: Path, who: str = "server", *, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Hold a folder's lock. The system takes it back when the process ends, however it ends.

    Where somebody else holds it for as long as `wait_s`, that is an error, which says who that is.
    """
    with (folder / _FILE).open("w") as file:
        deadline = time.monotonic() + wait_s
        while not _taken(file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise SafaError(f"another {who} works on {folder}")
            time.sleep(min(0.2, wait_s))
        yield


@contextmanager
def hold_launcher(folder: Path) -> Iterator[None]:
    """Hold the lock of the command that runs the server of a folder; where another one does, say so at once."""
    try:
        with (folder / _LAUNCHER).open("a") as file:
            deadline = time.monotonic() + _GLANCE_S
            while not _taken(file.fileno(), fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise SafaError(in_use(folder))
                time.sleep(0.05)
            yield
    except OSError as error:
        if error.filename != str(folder / _LAUNCHER):
            raise
        raise SafaError(f"cannot write {error.filename}: {error.strerror}") from None


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """Be the only process in here for a moment, by the lock of this file."""
    with file.open("a") as lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        yield


def in_use(folder: Path) -> str:
    """The sentence for a folder on which another server works."""
    return f"another server works on {folder}; stop that one first"


def is_held(folder: Path) -> bool:
    """Whether a server app works on a folder."""
    return _is_held(folder / _FILE)


def is_launched(folder: Path) -> bool:
    """Whether a command runs the server of a folder."""
    return _is_held(folder / _LAUNCHER)


def mark_written(file: IO[bytes]) -> None:
    """Let others see that this process writes a file, for as long as it has it open.

    It never waits for long: where another process writes the file too, or there are no locks, that one is seen or none.
    """
    deadline = time.monotonic() + _LOOK_S
    with suppress(OSError):
        while not _taken(file.fileno(), fcntl.LOCK_EX) and time.monotonic() < deadline:
            time.sleep(0.002)


def is_written(path: Path) -> bool:
    """Whether a process on this machine writes a file. Any number of processes may ask at the same time."""
    with suppress(OSError):
        return _is_held(path)
    return False


def _is_held(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return not _taken(file.fileno(), fcntl.LOCK_SH)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _taken(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
