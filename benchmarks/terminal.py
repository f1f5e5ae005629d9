"""What the live view of `safa run` costs: the same run in a pseudo-terminal with the view and with --quiet, in turn.

    python -m benchmarks.terminal [rounds] [pairs]

Prints the median ratio of processor times (user and system), which does not depend on what else the machine does.
"""

from __future__ import annotations

import resource
import statistics
import sys

from tests.terminals import in_terminal


def seconds(rounds: int, *more: str) -> float:
    """The processor time of a run of so many rounds, without training: the smallest work per round there is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "safa", "run", "boston", "--no-train", "--rounds", str(rounds), *more]
    with in_terminal(command, columns=80) as terminal:
        assert terminal.read_all() == 0, terminal.text
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(rounds: int = 10_000, pairs: int = 5) -> None:
    """Measure, and print the ratio."""
    ratios = [seconds(rounds) / seconds(rounds, "--quiet") for _ in range(pairs)]
    print(f"with the view / quiet: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


main(*map(int, sys.argv[1:]))
