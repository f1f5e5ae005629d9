"""One server at a time works on the folder of a run, and others can see whether it does."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safa.errors import SafaError

__all__ = ["hold", "is_held"]

_FILE = "lock"
_WAIT_S = 30.0


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a folder's lock. The system takes it back when the process ends, however it ends."""
    with (folder / _FILE).open("w") as file:
        deadline = time.monotonic() + _WAIT_S
        while not _taken(file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise SafaError(f"another server works on {folder}")
            time.sleep(0.2)
        yield


def is_held(folder: Path) -> bool:
    """Whether a server works on a folder."""
    try:
        with (folder / _FILE).open("rb") as file:
            return not _taken(file.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _taken(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
