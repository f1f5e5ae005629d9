"""`safa aggregators`: list the aggregators and the server optimisers."""

from __future__ import annotations

import argparse
from typing import Any

from safa.cli.show import print_names

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa aggregators` to the commands."""
    parser = commands.add_parser(
        "aggregators",
        help="list the aggregators and the server optimisers",
        description="List the aggregators and the server optimisers.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=run)


def run(_: argparse.Namespace) -> None:
    """Print every aggregator and every server optimiser with a line on what it does."""
    from safa.aggregation.registry import available, optimisers

    print_names("aggregator", available())
    print()
    print_names("server optimiser", optimisers())
