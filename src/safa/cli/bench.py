"""`safa bench`: how costs grow on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safa.bench.growth import WHAT, Fit, Point, fits, measure, plan, write
from safa.cli.console import Terminal
from safa.cli.live import watched
from safa.cli.progress import Progress
from safa.cli.show import print_table
from safa.runs import new_folder

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa bench` to the commands."""
    parser = commands.add_parser(
        "bench",
        help="measure how costs grow with the clients, the model and the updates",
        description="Measure on this machine how costs grow, on one thread, and fit exponents: "
        + "; ".join(f"{name}: {meaning}" for name, meaning in WHAT.items())
        + ". In full it takes several minutes and 8 GB of memory.",
        allow_abbrev=False,
    )
    names = ",".join(WHAT)
    parser.add_argument("--what", default=names, metavar="LIST", help=f"what to measure (default: {names})")
    parser.add_argument("--quick", action="store_true", help="small sizes only: under a minute")
    parser.add_argument("--repeats", type=int, metavar="N", help="how often each (default: 3; 2 with --quick)")
    parser.add_argument("--json", action="store_true", help="print what was measured as one JSON object only")
    parser.add_argument("--out", metavar="DIR", help="write growth.csv and plots into this new folder")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, and write."""
    repeats = (2 if arguments.quick else 3) if arguments.repeats is None else arguments.repeats
    jobs = plan(arguments.what.split(","), quick=arguments.quick, repeats=repeats)
    folder = new_folder(Path(arguments.out), force=False) if arguments.out else None
    progress = Progress(len(jobs), "size")
    points = list(watched(map(measure, jobs), progress, lambda _: {}, quiet=arguments.quiet))
    found = fits(points)
    files = write(points, folder) if folder else []
    if arguments.json:
        print(json.dumps({"points": [asdict(point) for point in points], "fits": [asdict(fit) for fit in found]}))
        return
    _print(points, found)
    for path in files:
        Terminal().print(f"Written to {path}", soft_wrap=True)


def _print(points: Sequence[Point], found: Sequence[Fit]) -> None:
    head = ["measured", "of", "size", "seconds", "MiB", "times a copy"]
    print_table(head, [_cells(point) for point in points])
    print()
    rows = [(fit.what, fit.series, f"{fit.exponent:.2f}", f"{fit.least:.2f} to {fit.most:.2f}") for fit in found]
    print_table(["measured", "of", "exponent", "of single repetitions"], rows)


def _cells(point: Point) -> list[str]:
    ratio = "" if point.times_copy is None else f"{point.times_copy:.2f}"
    return [point.what, point.series, f"{point.size:,}", f"{point.median:.3g}", f"{point.peak_mib:.0f}", ratio]
