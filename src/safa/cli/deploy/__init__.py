"""The commands of `safa deploy`. Flower is loaded only in the processes that need it."""

from __future__ import annotations

from typing import Any

from safa.cli.deploy.client import add_client
from safa.cli.deploy.expel import add_expel
from safa.cli.deploy.keys import add_keys
from safa.cli.deploy.local import add_local
from safa.cli.deploy.server import add_server

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add `safa deploy` to the commands."""
    deploy = commands.add_parser(
        "deploy",
        help="run a protocol on real devices, with Flower",
        description="Run a protocol on real devices, with Flower: as a trial on one machine, or server and clients "
        "each on its own.",
        allow_abbrev=False,
    )
    kinds = deploy.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_local(kinds)
    add_server(kinds)
    add_client(kinds)
    add_keys(kinds)
    add_expel(kinds)
