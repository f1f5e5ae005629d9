"""How accurate every aggregator and server optimiser is on digits, with and without hostile clients.

    python -m benchmarks.aggregators [--rounds 30] [--seed 0]

20 clients whose data are drawn alike (iid), C = 0.3, 10% crashes; in the columns "hostile" one client in ten sends the
negative of what its training changed, tenfold. Every number is the test accuracy after the last round of one run. A
dash: the combination is refused. The table is printed as markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from tests.aggregation.hostile import with_hostile

from safa import SafaError, Settings
from safa.experiments.simulate import Experiment

PROTOCOLS = ("fedavg", "safa")
CHOICES: dict[str, dict[str, Any]] = {
    "auto (the protocol's own)": {},
    **{name: {"aggregator": name} for name in ("mean", "population", "cache", "mixing", "buffer")},
    "mifa, server_step 1.0": {"aggregator": "mifa"},
    "mifa, server_step 0.3": {"aggregator": "mifa", "server_step": 0.3},
    "fedvarp, server_step 1.0": {"aggregator": "fedvarp"},
    "fedvarp, server_step 0.3": {"aggregator": "fedvarp", "server_step": 0.3},
    **{name: {"aggregator": name} for name in ("median", "trimmed_mean", "krum", "geometric_median")},
    **{f"server optimiser {name}": {"server_optimiser": name} for name in ("momentum", "adagrad", "adam", "yogi")},
}


def accuracy(settings: Settings, *, hostile: bool) -> float:
    """The accuracy of the last model of a run."""
    experiment = with_hostile(settings) if hostile else Experiment(settings)
    for _ in experiment.rounds():
        pass
    return float(experiment.summary()["last_accuracy"])


def row(given: dict[str, Any], **plain: Any) -> Iterator[str]:
    """The four numbers of a line."""
    for protocol in PROTOCOLS:
        for hostile in (False, True):
            try:
                yield f"{accuracy(Settings.of('digits', protocol=protocol, **plain | given), hostile=hostile):.3f}"
            except SafaError:
                yield "-"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    world = {"clients": 20, "fraction": 0.3, "crash_rate": 0.1, "partition": "iid", "threads": 1}
    print("| aggregator | " + " | ".join(f"{name} | {name}, hostile" for name in PROTOCOLS) + " |")
    print("|---|" + "---:|" * 2 * len(PROTOCOLS), flush=True)
    for name, choice in CHOICES.items():
        cells = row(choice, rounds=given.rounds, eval_every=given.rounds, seed=given.seed, **world)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
