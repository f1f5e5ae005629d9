"""How the cost of a run grows with the fleet: time and memory of `safa run mnist --no-train` for growing m.

The last column is the time per client and round, divided by log2(m): if it does not grow, the cost grows no faster than
m log m. Each size runs in a process of its own, on one core, so that its peak memory is its own.

    python benchmarks/scale.py [--protocol NAME] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys

SIZES = (1_000, 10_000, 100_000, 1_000_000)
CHILD = "import sys, safa.cli; sys.exit(safa.cli.main(sys.argv[1:]))"


def measure(protocol: str, clients: int, rounds: int) -> tuple[float, float]:
    """Wall time in seconds and peak memory in MiB of one run."""
    command = f"run mnist --clients {clients} --rounds {rounds} --fraction 0.1 --protocol {protocol} --no-train --json"
    done = subprocess.run([sys.executable, "-c", CHILD, *command.split()], capture_output=True, text=True, check=True)
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of the largest child so far, and they grow
    return json.loads(done.stdout)["metrics"]["wall_time_s"], peak_kib / 1024


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--protocol", default="safa")
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(f"{arguments.protocol}, {arguments.rounds} rounds, C = 0.1, one core")
    print(f"{'clients':>10} {'seconds':>9} {'MiB':>6} {'ns per client, round and log2(m)':>34}")
    for clients in SIZES:
        seconds, mebibytes = measure(arguments.protocol, clients, arguments.rounds)
        unit = seconds / (clients * arguments.rounds * math.log2(clients)) * 1e9
        print(f"{clients:>10,} {seconds:>9.2f} {mebibytes:>6.0f} {unit:>34.1f}", flush=True)


if __name__ == "__main__":
    main()
