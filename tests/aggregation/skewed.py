"""SCAFFOLD and FedAvg in the same world of label-skewed digits, for the test and for `benchmarks.scaffold`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from safa import simulate

_WINDOW = 5  # rounds over which an accuracy is averaged, since those of single rounds jump


def smoothed(aggregator: str, *, lr: float, seed: int, partition: str, rounds: int) -> NDArray[np.float64]:
    """The accuracy by round of FedAvg with that aggregator, as the mean over the last five rounds."""
    run = simulate(
        "digits",
        protocol="fedavg",
        aggregator=aggregator,
        lr=lr,
        seed=seed,
        partition=partition,
        rounds=rounds,
        clients=20,
        fraction=0.3,
        crash_rate=0.0,
        threads=1,
    )
    found = np.array([record.metrics["accuracy"] for record in run.records()])
    return np.array([found[max(0, t - _WINDOW + 1) : t + 1].mean() for t in range(len(found))])


def first_at(accuracy: NDArray[np.float64], target: float) -> int:
    """The first round with the target, counted from 1; one more than there are, where there is none."""
    return int(np.argmax(accuracy >= target)) + 1 if np.any(accuracy >= target) else len(accuracy) + 1


def compare(*, lr: float, seed: int, partition: str, rounds: int) -> tuple[float, float, int, int]:
    """The final accuracies of FedAvg and of SCAFFOLD, and when each reaches that of FedAvg."""
    mean, scaffold = (
        smoothed(name, lr=lr, seed=seed, partition=partition, rounds=rounds) for name in ("mean", "scaffold")
    )
    return float(mean[-1]), float(scaffold[-1]), first_at(mean, mean[-1]), first_at(scaffold, mean[-1])
