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
from tests.aggregation.skewed import compare

PARTITIONS = ("shards:2", "dirichlet:0.1")
RATES = (0.03, 0.1, 0.3, 0.5)


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
