"""How good the learning rate is that `lr = auto` finds: against the best of a grid, in whole runs.

    SAFA_DATA=... python benchmarks/learning_rate.py [--rounds 25] [--seeds 3]

For every task, optimiser and protocol: the learning rates that the range test finds with the seeds, and the lowest
test loss of their runs, as a mean over the seeds; beside it the same of the best learning rate of a grid of nine, which
is chosen by what it reaches on the test set. The table is printed as markdown.
"""

from __future__ import annotations

import argparse
import itertools
import math
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, cast

import numpy as np

import safa

GRID = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)


def lowest_loss(task: str, given: dict[str, Any]) -> tuple[float, float]:
    """The lowest test loss of a run, and its learning rate."""
    run = safa.simulate(task, threads=1, **given)
    assert run.summary is not None
    loss = run.summary["best_loss"]
    return loss if loss is not None and math.isfinite(loss) else math.inf, cast(float, run.settings.lr)


def line(case: tuple[str, str, str], rounds: int, seeds: int) -> str:
    """A line of the table."""
    task, optimiser, protocol = case
    given = {"protocol": protocol, "optimiser": optimiser, "rounds": rounds, "eval_every": 5}

    def mean(lr: float | str) -> tuple[float, str]:
        found = [lowest_loss(task, given | {"seed": seed, "lr": lr}) for seed in range(seeds)]
        rates = ", ".join(f"{rate:.2g}" for rate in sorted({rate for _, rate in found}))
        return float(np.mean([loss for loss, _ in found])), rates

    (loss, rates), (least, best) = mean("auto"), min(map(mean, GRID))
    return f"| {task} | {optimiser} | {protocol} | {rates} | {loss:.3g} | {best} | {least:.3g} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    print("| task | optimiser | protocol | auto | loss | best of the grid | loss |")
    print("|---|---|---|---|---:|---:|---:|", flush=True)
    cases = itertools.product(("boston", "digits", "kdd99"), ("sgd", "adam"), ("safa", "fedavg"))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for text in pool.map(partial(line, rounds=given.rounds, seeds=given.seeds), cases):
            print(text, flush=True)


if __name__ == "__main__":
    main()
