"""What a narrow codec saves and costs: the same deployment with float32, float16 and int8, in virtual time.

    python -m benchmarks.codec [TASK ...]

Coordinator and devices are the real ones; only the network between them is left out, so that all three see the same
arrivals in the same order.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.deploy.harness import Harness, apart

from safa.deploy.exchange.codec import CODECS

_SETTINGS = {
    "boston": {"clients": 5, "rounds": 30},
    "digits": {"clients": 10, "rounds": 30},
}


def main(tasks: list[str]) -> None:
    """Print a table for every task."""
    print("| task | codec | MB up | MB down | accuracy | loss | model differs from float32's by at most |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for task in tasks:
        exact = None
        for codec in CODECS:
            with tempfile.TemporaryDirectory() as folder:
                run = Harness(Path(folder) / "harness", {"task": task, **_SETTINGS[task]}, {"codec": codec}).run()
                records, model = list(run.records()), run.model()
            exact = exact or model
            up, down = (sum(getattr(r, name) for r in records) / 1e6 for name in ("bytes_up", "bytes_down"))
            print(
                f"| {task} | {codec} | {up:.4f} | {down:.4f} | {records[-1].metrics['accuracy']:.4f} "
                f"| {records[-1].loss:.4f} | {apart(model, exact):.2g} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:] or list(_SETTINGS))
