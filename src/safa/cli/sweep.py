"""`safa sweep`: simulate every combination of settings."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from safa.cli.arguments import add_engine, add_settings, add_track, engine_of, foreign_settings, given_settings
from safa.cli.console import Terminal
from safa.cli.live import LiveView
from safa.cli.progress import Progress
from safa.cli.sweep_tables import print_settings
from safa.errors import SafaError
from safa.experiments.engines import Engine
from safa.experiments.results import load_sweep
from safa.experiments.sweep import combinations, run_sweep
from safa.runs import Settings, next_folder
from safa.runs.sweep_folder import KEEPS, SweepFolder
from safa.tasks import TASKS

__all__ = ["add", "run"]

_MOST_SEEDS = 100_000


def add(commands: Any) -> None:
    """Add `safa sweep` to the commands."""
    parser = commands.add_parser(
        "sweep",
        help="simulate every combination of settings",
        usage="safa sweep TASK[,TASK...] [options]",
        description="Simulate every combination of settings: any option takes a list, separated by commas, and --seed "
        "ranges as well (0-9). To resume a sweep that was stopped, give the same command again, with its folder.",
        allow_abbrev=False,
    )
    parser.add_argument("task", metavar="TASK", help=f"one or more of {', '.join(TASKS)}")
    add_settings(parser, lists=True)
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write the sweep into this folder, or resume it there (default: a new one in runs/)",
    )
    parser.add_argument(
        "--keep",
        metavar="|".join(KEEPS),
        default="records",
        help="what to keep of the runs in DIR/runs besides DIR/results.csv: records (settings, rounds and metrics), "
        "models (these, too), curves (the main metric over time, in a column), or nothing (default: records)",
    )
    add_engine(parser)
    add_track(parser)
    parser.add_argument(
        "--stack", metavar="N", type=int, default=1,
        help="train up to N runs at a time as one computation, which pays on a GPU (default: 1)",
    )  # fmt: skip
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Simulate all combinations, write their table and print it."""
    tasks = [name.strip() for name in arguments.task.split(",")]
    runs = combinations(tasks, _given(arguments), preset=arguments.preset)
    folder = Path(arguments.out) if arguments.out else next_folder(f"sweep-{'-'.join(tasks)}")
    _finish(arguments, runs, folder, engine_of(arguments, runs))
    if not arguments.quiet:
        sweep = load_sweep(folder)
        print_settings(sweep.settings())
        Terminal(stderr=True).print(f"{len(runs)} runs in {sweep.place.table}", soft_wrap=True)


def _given(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """The settings that were given, each as a list of values."""
    if hasattr(arguments, "seed"):
        arguments.seed = [seed for part in arguments.seed for seed in _seeds(part.strip())]
    options = foreign_settings(arguments)
    return given_settings(arguments) | ({"protocol_options": [options]} if options else {})


def _seeds(text: str) -> list[str]:
    """The seeds of a range, or the one seed."""
    found = re.fullmatch(r"(\d{1,18})-(\d{1,18})", text)
    if not found and not text.isdigit():
        raise SafaError(f"seed must be a number, or a range FIRST-LAST such as 0-9, not {text!r}")
    if not found:
        return [text]
    first, last = int(found[1]), int(found[2])
    if not first <= last < first + _MOST_SEEDS:
        raise SafaError(f"a range of seeds must be FIRST-LAST, with {_MOST_SEEDS:,} seeds at most, not {text!r}")
    return [str(seed) for seed in range(first, last + 1)]


def _finish(arguments: argparse.Namespace, runs: list[Settings], folder: Path, engine: Engine) -> None:
    """Run what is missing; Ctrl-C says how many runs are finished and how to resume."""
    progress = Progress(len(runs), "run")
    try:
        rows = run_sweep(
            runs, folder, engine=engine, stack=arguments.stack, keep=arguments.keep, force=arguments.force,
            track=arguments.track,
        )  # fmt: skip
        with LiveView(progress, quiet=arguments.quiet) as view:
            for row in rows:
                view.run(row)
    except KeyboardInterrupt:
        there = SweepFolder.of(folder, runs, arguments.keep)
        written = sum(map(there.is_finished, range(len(runs))))  # some may not be in the table yet
        kept = f"{max(progress.done, written)} of {len(runs)} runs are finished and kept in {folder}"
        raise KeyboardInterrupt(f"{kept}; resume with the same command and --out {folder}") from None
