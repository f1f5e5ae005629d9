"""How long `safa run TASK` takes to its first round, with what is kept from an earlier run (warm) and without (cold).

    python benchmarks/startup.py [--task boston digits mnist kdd99] [--repeats 3] [--against CHECKOUT]

The program is started as a user would start it and stopped when its folder is there, which is written when everything
is ready for the first round. What is printed is the median of the seconds, and of those that a processor worked.
`--against` names another checkout, which is started in turns with this one; the last column is then the ratio of its
time to that of this one. `mnist` and `kdd99` need their files in SAFA_DATA.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent.parent
TASKS = ("boston", "digits", "mnist", "kdd99")


def start(task: str, checkout: Path, cache: Path) -> tuple[float, float]:
    """The seconds to the first round, and how long a processor worked for the whole program."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run" / "config.toml"
        before, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "safa", "run", task, "--rounds", "1", "--out", str(config.parent), "--quiet"]
        environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "SAFA_CACHE": str(cache)}
        with subprocess.Popen(command, env=environment) as program:
            while not config.exists() and program.poll() is None:
                time.sleep(0.002)
            seconds = time.perf_counter() - before
            program.send_signal(signal.SIGKILL)
        if program.returncode not in (0, -signal.SIGKILL):
            sys.exit(f"safa run {task} failed")
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        return seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def line(task: str, checkouts: list[Path], repeats: int, *, warm: bool) -> str:
    """A line of the table."""
    found: list[list[tuple[float, float]]] = [[] for _ in checkouts]
    with tempfile.TemporaryDirectory() as kept:
        for repeat in range(repeats + warm):
            for place, checkout in enumerate(checkouts):
                cache = Path(kept) / str(place) / ("" if warm else str(repeat))
                seconds = start(task, checkout, cache)
                if repeat or not warm:
                    found[place].append(seconds)
    (wall, cpu), *others = [[statistics.median(column) for column in zip(*times, strict=True)] for times in found]
    ratios = "".join(f" {other[0] / wall:>9.2f} {other[1] / cpu:>9.2f}" for other in others)
    return f"{task:>8} {'warm' if warm else 'cold':>5} {wall:>9.2f} {cpu:>12.2f}{ratios}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", nargs="*", default=TASKS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    checkouts = [HERE, *([given.against] if given.against else [])]
    print(
        f"{'task':>8} {'':>5} {'seconds':>9} {'processor s':>12}" + (" ratio (s, processor s)" if given.against else "")
    )
    for task in given.task:
        for warm in (True, False):
            print(line(task, checkouts, given.repeats, warm=warm), flush=True)


if __name__ == "__main__":
    main()
