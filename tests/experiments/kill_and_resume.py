"""Start a run again and again, kill it at random moments, resume it, and compare what is written in the end.

Run as a program of its own: it loads torch once and forks, so that every run is a real process that can be killed.

    python kill_and_resume.py FOLDER KILLS
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

ROUNDS = 60
COMMAND = f"run boston --rounds {ROUNDS} --checkpoint-every 3 --preset paper --quiet --out".split()
RESULTS = ("config.toml", "rounds.jsonl", "summary.json", "model.safetensors")


def run_in_child(arguments: list[str]) -> int:
    """Fork a process that runs a command; return its number."""
    child = os.fork()
    if child == 0:
        os._exit(main(arguments))
    return child


def killed(arguments: list[str], folder: Path, moment: int) -> bool:
    """Run a command and kill it as soon as so many bytes of rounds are written; whether it was still alive then."""
    child = run_in_child(arguments)
    rounds = folder / "rounds.jsonl"
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if rounds.exists() and rounds.stat().st_size >= moment:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True
        time.sleep(0.001)  # leaves the processor to the child
    return False


def results(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in RESULTS]


def trial(folder: Path, kills: int) -> None:
    os.waitpid(run_in_child([*COMMAND, str(folder / "whole")]), 0)
    expected = results(folder / "whole")
    draw = random.Random(5)
    count = 0
    while count < kills:
        run = folder / f"run-{count}"
        arguments = [*COMMAND, str(run)]
        moment = draw.randrange(len(expected[1]))
        while count < kills and killed(arguments, run, moment):
            count += 1
            arguments = ["run", "--resume", str(run), "--quiet"]
            moment = min(len(expected[1]) - 1, moment + draw.randrange(10_000))
        if not (run / "summary.json").exists():
            os.waitpid(run_in_child(["run", "--resume", str(run), "--quiet"]), 0)
        assert results(run) == expected, f"the run in {run} came out differently"
    print(f"{count} kills")


if __name__ == "__main__":
    trial(Path(sys.argv[1]), int(sys.argv[2]))
