"""What training several runs of a sweep as one saves: 8 runs stacked, and the same runs one after the other.

    python benchmarks/stack.py [--device cuda] [--task digits mlp cnn] [--runs 8] [--rounds 10] [--repeats 3]

`digits` is the built-in task; `mlp` (784-200-10) and `cnn` (the paper's) have 100 clients of 60 random images of the
size of MNIST. Both ways are run in turns, after one run that is not counted; the median of the seconds is printed, and
how much the last losses differ at most. numpy and torch are all that is needed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from safa.experiments.sweep import combinations, run_sweep
from safa.tasks import TASKS, Problem, given_task
from safa.tasks.mnist import PaperCNN

CLIENTS, SAMPLES = 100, 60


def mlp() -> nn.Module:
    """A small network on images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10), nn.LogSoftmax(dim=-1))


def make_problem(name: str) -> Problem:
    """The problem of that name."""
    if name in TASKS:
        return TASKS[name].load()
    generator = torch.Generator().manual_seed(0)
    images = 255 * torch.rand(CLIENTS * SAMPLES + 1000, 1, 28, 28, generator=generator)
    labels = images[:, 0, 0, :10].argmax(dim=1)
    cut = CLIENTS * SAMPLES
    return Problem(
        model=mlp if name == "mlp" else PaperCNN,
        loss=nn.functional.nll_loss,
        metrics={"accuracy": lambda output, target: (output.argmax(dim=1) == target).float().mean()},
        train=(images[:cut], labels[:cut]),
        test=(images[cut:], labels[cut:]),
    )


def seconds(problem: Problem, stack: int, given: argparse.Namespace, rounds: int) -> tuple[float, list[float]]:
    """How long the runs take, and the last loss of each."""
    listed: dict[str, Any] = {"seed": range(given.runs), "rounds": rounds, "lr": 0.0001, "device": given.device}
    listed |= {"epochs": 1, "batch_size": 20, "clients": CLIENTS, "fraction": 0.5, "crash_rate": 0.1}
    listed |= {"trainer": "batched", "memory_mb": 32768.0 if given.device != "cpu" else 4096.0}
    lists = {name: value if isinstance(value, range) else [value] for name, value in listed.items()}
    runs = combinations([given_task(problem)], lists)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        rows = list(run_sweep(runs, Path(folder), stack=stack, keep="nothing", problem=problem))
        return time.perf_counter() - start, [row["last_loss"] for row in rows]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--task", nargs="*", default=["digits", "mlp", "cnn"])
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print(f"{given.runs} runs of {given.rounds} rounds on {given.device}")
    print(f"{'task':>8} {'alone, s':>9} {'stacked, s':>11} {'ratio':>6} {'losses differ by':>17}")
    for name in given.task:
        problem = make_problem(name)
        for stack in (1, given.runs):
            seconds(problem, stack, given, rounds=1)
        found: dict[int, list[float]] = {1: [], given.runs: []}
        for _ in range(given.repeats):
            losses = {}
            for stack, times in found.items():
                taken, losses[stack] = seconds(problem, stack, given, given.rounds)
                times.append(taken)
        alone, stacked = map(statistics.median, found.values())
        apart = max(abs(a - b) / abs(a) for a, b in zip(*losses.values(), strict=True))
        print(f"{name:>8} {alone:>9.2f} {stacked:>11.2f} {alone / stacked:>6.2f} {apart:>17.1e}", flush=True)


if __name__ == "__main__":
    main()
