"""Programs that tests start or need: found, or named as missing; ended whatever happens."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

MARK = "SAFA_TESTS"
"""What the environment of every process carries that tests have started, with the process id of their pytest."""


def chromium() -> str:
    """The browser."""
    return _needed(shutil.which("chromium"), "chromium")


def libfaketime() -> str:
    """The library that gives a process another clock."""
    places = ("lib/*", "lib", "lib64", "local/lib")  # Debian's, and others'
    found = [path for place in places for path in glob.glob(f"/usr/{place}/faketime/libfaketime.so.1")]
    return _needed(found[0] if found else None, "libfaketime")


def _needed(path: str | None, name: str) -> str:
    if path is None:
        unavailable(f"there is no {name} on this machine; `make test` installs it on Debian as root")
    return path


def unavailable(why: str) -> NoReturn:
    """Skip a test for want of something; in CI that is a failure, so that nothing is skipped unnoticed."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A program, with a session of its own, all of which has ended when the block is left."""
    with subprocess.Popen(list(command), text=True, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def left_behind(value: str) -> dict[int, str]:
    """The processes that carry the mark with this value and still run, by number, with their command lines.

    This one is not among them, nor Python's own helper of multiprocessing, which ends with it.
    """
    mark, found = f"{MARK}={value}".encode(), {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            ended = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if not ended and "resource_tracker" not in line and mark in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = line
    found.pop(os.getpid(), None)
    return found
