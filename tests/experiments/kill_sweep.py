"""Start a sweep again and again, kill it at random moments, start it again, and compare what is written in the end.

Run as a program of its own: it loads torch once and forks, so that every sweep is a real process that can be killed.

    python kill_sweep.py FOLDER KILLS records|nothing
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import safa.training  # noqa: F401  (loads torch before the forks)
from safa.cli.program import main

COMMAND = "sweep boston --protocol safa,fedavg --seed 0-2 --rounds 8 --until loss=0.2 --workers 1 --quiet"


def start(folder: Path, keep: str) -> int:
    """Fork a process that sweeps; return its number."""
    child = os.fork()
    if child == 0:
        os._exit(main([*COMMAND.split(), "--keep", keep, "--out", str(folder)]))
    return child


def entries(folder: Path) -> int:
    """How far a sweep is: the files and folders in its folder, and the bytes of its table."""
    table = folder / "results.csv"
    try:
        return sum(1 for _ in folder.rglob("*")) + (table.stat().st_size // 500 if table.exists() else 0)
    except OSError:  # something was renamed meanwhile
        return 0


def killed(folder: Path, keep: str, moment: int, wait: int) -> bool:
    """Sweep, and kill that as soon as there is so much in the folder, and some time later; whether it still ran."""
    child = start(folder, keep)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if entries(folder) >= moment:
            wait -= 1
            if wait <= 0:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return True
        time.sleep(0.001)  # leaves the processor to the child
    return False


def results(folder: Path) -> dict[str, bytes]:
    """Everything that a sweep wrote, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def trial(folder: Path, kills: int, keep: str) -> None:
    os.waitpid(start(folder / "whole", keep), 0)
    expected = results(folder / "whole")
    assert expected["results.csv"].count(b"\n") == 7
    draw = random.Random(7)
    count = 0
    while count < kills:
        place = folder / f"sweep-{count}"
        while count < kills and killed(place, keep, entries(place) + draw.randrange(8), draw.randrange(6)):
            count += 1
        assert os.waitpid(start(place, keep), 0)[1] == 0
        assert results(place) == expected, f"the sweep in {place} came out differently"
    print(f"{count} kills")


if __name__ == "__main__":
    trial(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
