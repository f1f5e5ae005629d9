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
from typing import Any

import pytest

MARK = "SAFA_TESTS"
"""What the environment of every process carries that tests have started, with the process id of their pytest."""


def chromium() -> str:
    """The browser."""
    return _needed(shutil.which("chromium"), "chromium")


def libfaketime() -> str:
    """The library that gives a process another clock."""
    return _needed(next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), None), "libfaketime")


def _needed(path: str | None, name: str) -> str:
    """A path that was found. Where there is none the test is skipped, and in CI it fails: nothing is passed over."""
    if path is not None:
        return path
    how = f"there is no {name} on this machine; `make test` installs it on Debian as root"
    if os.environ.get("CI"):
        pytest.fail(how)
    pytest.skip(how)


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A program, with a session of its own, all of which has ended when the block is left."""
    with subprocess.Popen(list(command), text=True, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def left_behind(value: str) -> list[int]:
    """The processes that carry the mark with this value and still run, this one excepted."""
    mark, found = f"{MARK}={value}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            ended = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if not ended and mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]
