"""`safa sweep`: simulate every combination of settings."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from safa.cli.arguments import add_settings, foreign_settings, given_settings
from safa.cli.show import print_rows, with_progress
from safa.errors import SafaError
from safa.experiments.sweep import combinations, run_sweep
from safa.runs import Settings, new_folder, next_folder
from safa.tasks import TASKS

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa sweep` to the commands."""
    parser = commands.add_parser(
        "sweep",
        help="simulate every combination of settings",
        usage="safa sweep TASK[,TASK...] [options]",
        description="Simulate every combination of settings: any option takes a list, separated by commas.",
        allow_abbrev=False,
    )
    parser.add_argument("task", metavar="TASK", help=f"one or more of {', '.join(TASKS)}")
    add_settings(parser, lists=True)
    parser.add_argument("--out", metavar="DIR", help="write DIR/results.csv (default: a new folder in runs/)")
    parser.add_argument(
        "--workers", metavar="N", type=int, default=os.cpu_count() or 1, help="processes to use (default: all cores)"
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Simulate all combinations, write their table and print it."""
    if arguments.workers < 1:
        raise SafaError(f"workers must be at least 1, not {arguments.workers}")
    tasks, given = [name.strip() for name in arguments.task.split(",")], _given(arguments)
    runs = combinations(tasks, given, preset=arguments.preset)
    folder = Path(arguments.out) if arguments.out else next_folder(f"sweep-{'-'.join(tasks)}")
    table = new_folder(folder, force=arguments.force) / "results.csv"
    rows = _rows(arguments, runs, table)
    if not arguments.quiet:
        print_rows(rows, [name for name, values in given.items() if len(values) > 1], len(tasks) > 1)
        Console(stderr=True).print(f"{len(rows)} runs in {table}", highlight=False, soft_wrap=True)


def _given(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """The settings that were given, each as a list of values."""
    options = foreign_settings(arguments)
    return given_settings(arguments) | ({"protocol_options": [options]} if options else {})


def _rows(arguments: argparse.Namespace, runs: list[Settings], table: Path) -> list[dict[str, Any]]:
    """The rows of all runs, in order; Ctrl-C says how many are finished."""
    rows: list[dict[str, Any]] = []
    try:
        results = run_sweep(runs, table, workers=min(arguments.workers, len(runs)))
        rows.extend(with_progress(results, len(runs), "runs", quiet=arguments.quiet))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(rows)} of {len(runs)} runs are finished and can be read in {table}") from None
    return rows
