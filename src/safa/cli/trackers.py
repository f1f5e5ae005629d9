"""`safa trackers`: list the trackers."""

from __future__ import annotations

import argparse
from typing import Any

from safa.cli.show import print_table
from safa.trackers import available

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa trackers` to the commands."""
    parser = commands.add_parser(
        "trackers",
        help="list the trackers, the programs that a run can be followed in",
        description="List the trackers, the programs that a run can be followed in with --track.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=run)


def run(_: argparse.Namespace) -> None:
    """Print every tracker, whether it is installed, and a line on what it does."""
    rows = [
        (name, "yes" if there else f"pip install 'safa[{name}]'", line) for name, (there, line) in available().items()
    ]
    print_table(["tracker", "installed", "summary"], rows)
