"""`safa protocols`: list the protocols."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from safa.cli.show import print_names
from safa.protocol import available

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa protocols` to the commands."""
    parser = commands.add_parser(
        "protocols", help="list the protocols", description="List the protocols.", allow_abbrev=False
    )
    parser.set_defaults(command=run)


def run(_: argparse.Namespace) -> None:
    """Print every protocol with the first line of its documentation."""
    print_names("protocol", {name: (inspect.getdoc(cls) or "").partition("\n")[0] for name, cls in available().items()})
