"""What trainers on a CPU gain by keeping freed memory, for seven models.

    python -m benchmarks.allocation [--models NAME ...] [--trainers processes batched] [--clients 16] [--pairs 5]

Every trainer runs in processes of their own, in turns with kept memory and as glibc would have it. Printed are the
median milliseconds of a client and epoch, the median of the ratio, and the page faults of this process in one epoch of
all clients.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import resource
import statistics
from typing import Any

import numpy as np
import torch

from benchmarks.trainers import made, seconds
from safa.bench.models import MODELS

REPEATS = 5


def measure(name: str, kind: str, clients: int, *, kept: bool) -> tuple[float, float]:
    """Seconds of a client and epoch, and page faults of an epoch; in a new process."""
    if not kept:
        importlib.import_module("safa.training.trainer").__dict__["keep_freed_memory"] = lambda: None
    found, row = made(name, torch.device("cpu"), clients, [kind])
    everyone = np.arange(clients)
    for _ in range(2):
        seconds(found[kind], everyone, row)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    spent = [seconds(found[kind], everyone, row) / clients for _ in range(REPEATS)]
    return statistics.median(spent), (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / REPEATS


def in_a_process(pool: Any, *given: Any, kept: bool) -> tuple[float, float]:
    """The same from here."""
    found: tuple[float, float] = pool.apply(measure, given, {"kept": kept})
    return found


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--trainers", nargs="*", default=["processes", "batched"])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    for name in given.models:
        for kind in given.trainers:
            pairs = []
            for _ in range(given.pairs):
                with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                    pairs.append([in_a_process(pool, name, kind, given.clients, kept=kept) for kept in (True, False)])
            (kept, few), (freed, many) = (
                map(statistics.median, zip(*one, strict=True)) for one in zip(*pairs, strict=True)
            )
            ratio = statistics.median(one[0] / other[0] for one, other in pairs)
            print(
                f"{name:12} {kind:10} {kept * 1e3:7.2f} ms, {freed * 1e3:7.2f} ms without: {ratio:.2f}   "
                f"page faults {few:,.0f} and {many:,.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
