"""`safa best`: which setting of a sweep is first to a target."""

from __future__ import annotations

import argparse
import json
from typing import Any

from safa.cli.sweep_tables import print_best
from safa.experiments.results import load_sweep

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa best` to the commands."""
    parser = commands.add_parser(
        "best",
        help="say which setting of a sweep is first to a target",
        description="Say which setting of a finished sweep is first to a target, by how much, and whether the seeds "
        "allow saying so. Settings are compared seed by seed.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="the folder of a sweep")
    parser.add_argument(
        "--target",
        metavar="METRIC=VALUE[,held=ROUNDS]",
        help="what is to be reached (default: the --until of the sweep; without one, the main metric of the last "
        "models is compared)",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, a line for every task")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the answer for every task of the sweep."""
    sweep = load_sweep(arguments.folder)
    answers = [sweep.best(arguments.target, task=task) for task in sweep.tasks]
    for number, best in enumerate(answers):
        if arguments.json:
            print(json.dumps(best.to_json()))
            continue
        if len(answers) > 1:
            print(f"{'' if number == 0 else chr(10)}{best.task}:")
        print_best(best)
