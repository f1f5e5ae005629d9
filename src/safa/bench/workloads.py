"""What is measured to see how costs grow, each in a process of its own: rounds of a simulation, steps of an aggregator.

    python -m safa.bench.workloads '{"kind": "rounds", "clients": 1000, "rounds": 20}'

prints what was measured as one JSON object. Peak memory is that of the whole process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from safa.experiments.simulate import Experiment
from safa.protocol.records import Rule
from safa.runs import Settings

__all__ = ["WORKLOADS", "measure_rounds", "measure_steps", "peak_mib"]

_ALL_MEMORY_MB = 1e6  # so much that no row is held in a file
_ROUNDS_FIRST, _STEPS_FIRST = 2, 4  # before anything is measured: memory is taken, and every client has an entry


def measure_rounds(clients: int, rounds: int, protocol: str = "safa") -> dict[str, Any]:
    """Seconds of a simulated round, without training."""
    total = rounds + _ROUNDS_FIRST
    settings = Settings.of("mnist", clients=clients, rounds=total, fraction=0.1, protocol=protocol, train=False)
    experiment = Experiment(settings)
    starts = [time.perf_counter() for _ in experiment.rounds()]
    return {"seconds": (starts[-1] - starts[_ROUNDS_FIRST - 1]) / rounds}


def measure_steps(aggregator: str, parameters: int, updates: int, steps: int = 4) -> dict[str, Any]:
    """Seconds of a step of so many updates on one thread, and of a copy of the bytes that it reads and changes.

    Those are the updates, the new model, and the running sum where there is one. Half of the clients are silent.
    """
    import torch

    torch.set_num_threads(1)
    rows, copy = torch.randn(updates, parameters), torch.empty(updates, parameters)
    stepped = _Steps(aggregator, rows)
    spent, copied = [], []
    for number in range(steps + _STEPS_FIRST):
        start = time.perf_counter()
        copy.copy_(rows)
        middle = time.perf_counter()
        stepped.step()
        if number >= _STEPS_FIRST:
            copied.append(middle - start)
            spent.append(time.perf_counter() - middle)
    more = 1 + (3 if stepped.has_sum else 1) / updates
    return {"seconds": float(np.median(spent)), "copy_seconds": float(np.median(copied)) * more}


class _Steps:
    """One step of an aggregator after the other, with the same updates from two halves of the clients in turn."""

    def __init__(self, aggregator: str, rows: Any) -> None:
        from safa.aggregation import registry
        from safa.aggregation.rows import Versions

        self._rows, self._count = rows, len(rows)
        self._aggregator = registry.build(aggregator, {})
        self._rule = next(rule for rule in (Rule.CACHE, Rule.AVERAGE, Rule.DELTA) if rule in self._aggregator.rules)
        self._versions = Versions(rows[0].clone())
        self._aggregator.begin(self._versions, np.ones(2 * self._count), memory_mb=_ALL_MEMORY_MB)
        self.has_sum = self._aggregator.keeps_entries

    def step(self) -> None:
        """Make the next version."""
        from safa.aggregation import Step, Updates

        latest, count = self._versions.latest, self._count
        client, base = np.arange(count) + latest % 2 * count, np.full(count, latest)
        weight, picked = np.full(count, 1 / (2 * count)), np.ones(count, dtype=np.bool_)
        updates = Updates(client, base, weight, picked, self._rows, self._versions.rows(base))
        step = Step(latest + 1, self._rule, float(weight.sum()), np.arange(0), iter((updates,)))
        self._versions.add(latest + 1, self._aggregator.step(step))
        self._versions.forget_all_but(self._aggregator.references())


def peak_mib() -> float:
    """The most memory that this process has had, in MiB."""
    try:  # ru_maxrss would be that of the process that started this one, if that was larger
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


WORKLOADS: dict[str, Callable[..., dict[str, Any]]] = {"rounds": measure_rounds, "steps": measure_steps}
"""What can be measured, by name."""


def main() -> None:
    """Measure what the command line says, and print it."""
    given = json.loads(sys.argv[1])
    found = WORKLOADS[given.pop("kind")](**given)
    print(json.dumps(found | {"peak_mib": peak_mib()}))


if __name__ == "__main__":
    main()
