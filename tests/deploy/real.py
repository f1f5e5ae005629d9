"""Deployments of real processes: commands that are started, watched through their files, and always stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safa.deploy.launcher.processes import Processes
from safa.protocol.records import RoundRecord

PATIENCE_S = 150.0


@contextmanager
def running() -> Iterator[Processes]:
    """Whatever is started in here, with everything that it starts in turn, is gone afterwards."""
    with Processes(dict(os.environ) | {"OMP_NUM_THREADS": "1"}) as processes:
        yield processes
    assert not processes.alive()


def safa(processes: Processes, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a safa command."""
    return processes.start([sys.executable, "-m", "safa", *arguments], log=log)


def wait_for(what: Callable[[], object], who: subprocess.Popen[bytes] | None = None, *, log: Path) -> None:
    """Wait until something is so; that it never comes, or that the process ends before, is a failure with its log."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        if who is not None and who.poll() is not None and not what():
            raise AssertionError(f"it ended with {who.returncode}:\n{log.read_text()[-3000:]}")
        if time.monotonic() > deadline:
            raise AssertionError(f"it took too long:\n{log.read_text()[-3000:]}")
        time.sleep(0.05)


def records(run: Path) -> list[RoundRecord]:
    """The rounds that are on the disk."""
    file = run / "rounds.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [RoundRecord.from_json(line) for line in lines if line.endswith("\n")]


def listens(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    with socket.socket() as listener:
        return listener.connect_ex(("127.0.0.1", port)) == 0


def pids(processes: Processes, *marks: str) -> list[int]:
    """Those of the processes whose command line holds all of these marks."""
    found = []
    for pid in processes.alive():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if all(mark in line for mark in marks):
            found.append(pid)
    return found


def kill(processes: Processes, *whom: Sequence[str]) -> list[int]:
    """SIGKILL, at one blow, to processes of which each is the only one whose command line holds all of its marks."""
    found = [pid for marks in whom for (pid,) in [pids(processes, *marks)]]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found
