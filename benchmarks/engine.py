"""How much faster a sweep is with two workers of Ray than with one: 40 runs of Task 1 (boston), trained.

    python benchmarks/engine.py [--runs 40] [--rounds 600] [--repeats 3]

Needs two idle cores. The start of Ray and of the workers is measured apart: every sweep is preceded by a short one with
as many runs as workers, on the same workers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from safa.cluster import Workers, connect
from safa.experiments.sweep import run_one
from safa.runs import Settings


def jobs(count: int, rounds: int) -> dict[str, tuple[Callable[[], Any]]]:
    """Runs that differ in their seeds."""
    made = (Settings.of("boston", rounds=rounds, seed=seed) for seed in range(count))
    return {f"run {settings.seed}": (partial(run_one, settings),) for settings in made}


def runner() -> Callable[[Callable[[], Any]], Any]:
    """What a worker answers with."""
    return lambda job: job()


def seconds(ray: Any, workers: int, runs: int, rounds: int) -> tuple[float, float]:
    """How long it takes to start so many workers, and how long the runs take after that."""
    hired = Workers(ray, runner, most=workers)
    try:
        start = time.perf_counter()
        list(hired.answers(jobs(2 * workers, 1)))
        ready = time.perf_counter()
        list(hired.answers(jobs(runs, rounds)))
        return ready - start, time.perf_counter() - ready
    finally:
        hired.close()


def main() -> None:
    """Measure one worker and two, in turns, and print the times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    start = time.perf_counter()
    ray = connect("local", cores=2)
    print(f"start of Ray: {time.perf_counter() - start:.1f} s")
    ratios = []
    for _ in range(arguments.repeats):
        (begin_1, one), (begin_2, two) = (seconds(ray, n, arguments.runs, arguments.rounds) for n in (1, 2))
        ratios.append(one / two)
        print(
            f"{arguments.runs} runs: one worker {one:.1f} s (start {begin_1:.1f} s), two {two:.1f} s "
            f"(start {begin_2:.1f} s), {one / two:.2f} times as fast",
            flush=True,
        )
    print(f"two workers are {statistics.median(ratios):.2f} times as fast as one (median of {len(ratios)})")


if __name__ == "__main__":
    main()
