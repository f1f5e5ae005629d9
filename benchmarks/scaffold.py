"""Whether SCAFFOLD reaches FedAvg's final accuracy in fewer rounds, on digits with label-skewed clients.

    python -m benchmarks.scaffold [--rounds 60] [--seeds 5]

20 clients, C = 0.3, no crashes, the task's two epochs per update. Accuracies are means over the last five rounds, since
those of single rounds jump. For every learning rate and seed, both are run in the same world; the target is FedAvg's
accuracy in its last round. A line has means over the seeds: of the final accuracies, and of the first rounds in which
the target is reached. "in": in how many of the seeds SCAFFOLD was first. The table is printed as markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from safa import simulate

PARTITIONS = ("shards:2", "dirichlet:0.1")
RATES = (0.03, 0.1, 0.3, 1.0)
_WINDOW = 5


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


def lines(rounds: int, seeds: int) -> Iterator[str]:
    """The lines of the table."""
    for partition in PARTITIONS:
        for lr in RATES:
            found = np.array([compare(lr=lr, seed=s, partition=partition, rounds=rounds) for s in range(seeds)])
            one, other, late, early = found.mean(axis=0)
            won = np.count_nonzero(found[:, 3] < found[:, 2])
            yield f"| {partition} | {lr} | {one:.3f} | {other:.3f} | {late:.0f} | {early:.0f} | {won} of {seeds} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    print("| partition | lr | FedAvg | SCAFFOLD | FedAvg, rounds | SCAFFOLD, rounds | in |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for line in lines(given.rounds, given.seeds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
