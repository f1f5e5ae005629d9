"""What a narrow wire saves and costs: the same deployment with float32, float16 and int8, in virtual time.

    python -m benchmarks.wire [TASK ...]

Conductor and devices are the real ones; only the network between them is left out, so that all three see the same
arrivals in the same order.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.deploy.stage import Stage, apart

from safa.deploy.exchange.codec import KINDS

_SETTINGS = {
    "boston": {"clients": 5, "rounds": 30},
    "digits": {"clients": 10, "rounds": 30},
}


def main(tasks: list[str]) -> None:
    """Print a table for every task."""
    print("| task | wire | MB up | MB down | accuracy | loss | model differs from float32's by at most |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for task in tasks:
        exact = None
        for wire in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                run = Stage(Path(folder) / "stage", {"task": task, **_SETTINGS[task]}, {"wire": wire}).play()
                records, model = list(run.records()), run.model()
            exact = exact or model
            up, down = (sum(getattr(r, name) for r in records) / 1e6 for name in ("bytes_up", "bytes_down"))
            print(
                f"| {task} | {wire} | {up:.4f} | {down:.4f} | {records[-1].accuracy:.4f} | {records[-1].loss:.4f} "
                f"| {apart(model, exact):.2g} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:] or list(_SETTINGS))
