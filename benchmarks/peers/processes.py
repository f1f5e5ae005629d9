"""A program and all that it starts: how much memory they have together, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ended", "watch"]

_EVERY_S = 0.5


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    output: str
    errors: str
    code: int | None
    """None: it was ended because its time was up."""
    memory_mb: float
    """The most memory at one time, pages that several processes share counted once."""


def watch(command: Sequence[str], env: Mapping[str, str], limit_s: float, folder: Path) -> Ended:
    """Run a program to its end, or until its time is up."""
    with open(folder / "output", "w+") as output, open(folder / "errors", "w+") as errors:
        program = subprocess.Popen(command, env=env, stdout=output, stderr=errors, start_new_session=True, cwd=folder)
        until, most = time.monotonic() + limit_s, 0.0
        while (code := program.poll()) is None and time.monotonic() < until:
            most = max(most, sum(_memory_mb(process) for process in _family(program.pid)))
            time.sleep(_EVERY_S)
        _end(program)
        for stream in (output, errors):
            stream.seek(0)
        return Ended(output.read(), errors.read(), code, most)


def _end(program: subprocess.Popen[bytes]) -> None:
    """End a program and whatever it started and left."""
    for process in _family(program.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    program.wait()


def _family(root: int) -> list[int]:
    """A program's process, those of its session and the descendants of all these."""
    parents: dict[int, int] = {}
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            process, parents[process] = int(path.parent.name), int(fields[1])
            if root in (process, int(fields[3])):
                found.add(process)
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def _memory_mb(process: int) -> float:
    """The proportional set size of a process; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0
