"""Whether something has become slower: costs as ratios that do not depend on how fast the machine is.

    python benchmarks/bench.py [--update] [--only NAME ...]

Every cost is measured beside a plain piece of work of the same kind, in turns, and the median of their ratio is
compared with `benchmarks/baseline.json`. Less is better. A ratio that is more than 1.3 times the baseline is marked,
and the program ends with code 1. `--update` writes the baseline instead. Everything is computed on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from safa.bench.models import MODELS
from safa.bench.workloads import measure_rounds, measure_steps
from safa.runs import write_atomically
from safa.runs.checkpoints import CheckpointWriter
from safa.tasks import find_task, kdd99
from safa.tasks.problem import Problem
from safa.tasks.tables import zero_linear
from safa.training import Optimiser
from safa.training.setup import make_trainer

BASELINE = Path(__file__).parent / "baseline.json"
TOLERANCE = 1.3
Work = Callable[[], object]


def seconds(work: Work) -> float:
    """Wall time of some work."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(work: Work, beside: Work, repeats: int = 7) -> float:
    """The median of how many times as long some work takes as another, done in turns; the first turn is left out."""
    found = [seconds(work) / seconds(beside) for _ in range(repeats + 1)]
    return statistics.median(found[1:])


# -- trainers --------------------------------------------------------------------------------------------------------


def training(
    problem: Problem, shards: list[np.ndarray], batch_size: int, epochs: int = 1, *, kind: str = "batched"
) -> float:
    """Epochs of all clients by a trainer, beside the plain loop."""
    how = {"batch_size": batch_size, "optimiser": Optimiser(lr=1e-3), "device": torch.device("cpu")}
    trainer, serial = (make_trainer(name, problem, shards, **how) for name in (kind, "serial"))  # type: ignore[arg-type]
    module, everybody = problem.start_model(0), np.arange(len(shards))
    row = serial.layout.row(dict(module.named_parameters()) | dict(module.named_buffers()))
    start = row.expand(len(shards), -1)
    return ratio(
        lambda: trainer.train(everybody, start, epochs=epochs),
        lambda: serial.train(everybody, start, epochs=epochs),
        repeats=5,
    )


def boston() -> float:
    """Five clients, 5 samples at a time."""
    problem = find_task("boston").load()
    shards = [np.asarray(part) for part in np.array_split(np.arange(len(problem.train[1])), 5)]
    return training(problem, shards, 5, epochs=20)


def svm() -> float:
    """100 clients with 370 random samples of the shape of kdd99, 100 at a time."""
    inputs, targets = torch.randn(37_000, 35), torch.randint(2, (37_000,)) * 2.0 - 1
    data = inputs, targets
    problem = Problem(
        model=lambda: zero_linear(35), loss=kdd99.loss, train=data, test=data, kernel="linear_squared_hinge"
    )
    return training(problem, list(np.arange(37_000).reshape(100, 370)), 100, epochs=5)


def cnn() -> float:
    """Ten clients with 80 random images of the size of MNIST, 40 at a time."""
    problem, shards = MODELS["paper_cnn"].problem(10, 80)
    return training(problem, shards, 40, kind="threads")


# -- all else --------------------------------------------------------------------------------------------------------


def simulated_round() -> float:
    """A simulated round of a million clients, beside sorting a million numbers."""
    numbers = np.random.default_rng(0).random(1_000_000)
    spent = measure_rounds(1_000_000, 20)["seconds"]
    return float(spent / statistics.median(seconds(lambda: np.sort(numbers)) for _ in range(9)))


def step_of(aggregator: str) -> Callable[[], float]:
    """A step of an aggregator with 20 updates of a million numbers, beside a copy of as many bytes."""

    def measure() -> float:
        found = measure_steps(aggregator, 1_000_000, 20, steps=9)
        return float(found["seconds"] / found["copy_seconds"])

    return measure


def checkpoint() -> float:
    """A checkpoint of a model of 40 MB, beside writing such a file."""
    state = {"model": torch.randn(10_000_000)}
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        content = state["model"].numpy().tobytes()
        kept = CheckpointWriter(there, settings="")
        rounds = iter(range(1, 100))
        return ratio(lambda: kept.write(next(rounds), state, {}, {}), lambda: write_atomically(there / "file", content))


def start_of_program() -> float:
    """`safa --version`, beside importing numpy."""
    return ratio(
        lambda: subprocess.run([sys.executable, "-m", "safa", "--version"], check=True, stdout=subprocess.DEVNULL),
        lambda: subprocess.run([sys.executable, "-c", "import numpy"], check=True),
    )


MEASURES: dict[str, Callable[[], float]] = {
    "boston: batched / serial": boston,
    "svm: batched / serial": svm,
    "cnn: threads / serial": cnn,
    "round of 1e6 clients / sort of 1e6 numbers": simulated_round,
    "step of mean / copy": step_of("mean"),
    "step of buffer / copy": step_of("buffer"),
    "step of cache / copy": step_of("cache"),
    "step of mifa / copy": step_of("mifa"),
    "checkpoint / file": checkpoint,
    "safa --version / import numpy": start_of_program,
}
"""What is measured, by name: cost / cost of the plain work beside it."""


# -- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One measure and its baseline."""

    name: str
    now: float
    baseline: float | None

    @property
    def change(self) -> float | None:
        """How many times the baseline it is."""
        return None if self.baseline is None else self.now / self.baseline

    @property
    def is_worse(self) -> bool:
        """Whether it is worse than the baseline by more than the tolerance."""
        return self.change is not None and self.change > TOLERANCE

    def __str__(self) -> str:
        before, change = ("new", "") if self.change is None else (f"{self.baseline:.3g}", f"{self.change:.2f}x")
        return f"{self.name:44} {self.now:>9.3g} {before:>9} {change:>8} {'  SLOWER' if self.is_worse else ''}".rstrip()


def compared(measures: Mapping[str, Callable[[], float]], baseline: Mapping[str, float]) -> Iterator[Line]:
    """Every measure beside its baseline; one that is worse is measured again, and the better one counts."""
    for name, measure in measures.items():
        line = Line(name, measure(), baseline.get(name))
        yield Line(name, min(line.now, measure()), line.baseline) if line.is_worse else line


def main() -> int:
    """Print the table, or write the baseline."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the baseline")
    parser.add_argument("--only", nargs="*", choices=list(MEASURES), default=list(MEASURES), metavar="NAME")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    baseline: dict[str, float] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    print(f"{'less is better':44} {'now':>9} {'baseline':>9} {'change':>8}")
    lines = []
    chosen = {name: MEASURES[name] for name in given.only}
    for line in compared(chosen, {} if given.update else baseline):
        lines.append(line)
        print(line, flush=True)
    if given.update:
        measured = baseline | {line.name: float(f"{line.now:.3g}") for line in lines}
        found = {name: measured[name] for name in MEASURES if name in measured}
        BASELINE.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(line.is_worse for line in lines))


if __name__ == "__main__":
    sys.exit(main())
