"""`safa partitions`: list the partitions."""

from __future__ import annotations

import argparse
from typing import Any

from safa.cli.show import print_names
from safa.tasks.partitions import available

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa partitions` to the commands."""
    parser = commands.add_parser(
        "partitions",
        help="list the partitions, the ways to deal samples to clients",
        description="List the partitions, the ways to deal samples to clients.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=run)


def run(_: argparse.Namespace) -> None:
    """Print every partition, as it is written, with a line on what it does."""
    print_names("partition", available())
