"""Begin cases, each in a process of its own that is killed in the middle, at the very same place every time.

Run as a program of its own: it loads torch once and forks. A process is killed when it sets about its third checkpoint,
whatever it does then: two are on the disk, and the rounds behind them, too.

    python -m tests.golden.stop FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch  # noqa: F401  (loads it before the forks)

from tests.golden.cases import CASES, RESUMED, simulate

LAST = 3 * int(CASES[RESUMED[0]]["checkpoint_every"])
"""The round whose checkpoint is never written."""


def _is_last(argument: object) -> bool:
    """Whether it names the file, under any ending, of the checkpoint after round `LAST`."""
    if not isinstance(argument, str | Path):
        return False
    return Path(argument).parent.name == "checkpoint" and f"{LAST:06d}" in Path(argument).name


def kill_at_checkpoint(event: str, arguments: tuple[object, ...]) -> None:
    """Kill this process if it does anything with the file of that checkpoint."""
    if any(map(_is_last, arguments)):
        os.kill(os.getpid(), signal.SIGKILL)


def stop(name: str, folder: Path) -> None:
    """Begin a case in a new folder and leave it unfinished."""
    child = os.fork()
    if child == 0:
        sys.addaudithook(kill_at_checkpoint)
        simulate(name, folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"{name} was not killed"


if __name__ == "__main__":
    for case in RESUMED:
        stop(case, Path(sys.argv[1], case))
