"""`safa deploy keys`: the keys of a deployment."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from safa.cli.console import Terminal
from safa.cli.deploy.common import add_command
from safa.errors import SafaError

__all__ = ["add_keys"]


def add_keys(kinds: Any) -> None:
    """Add the sub-command."""
    keys = add_command(kinds, "keys", _keys, "make the keys of a deployment: an authority, the server, one per client")
    keys.add_argument("folder", metavar="DIR", help="where to put them")
    keys.add_argument("--host", nargs="+", action="extend", default=[], help="by which names clients call the server")
    keys.add_argument("--client", nargs="+", action="extend", default=[], metavar="NAME", help="names of clients")
    keys.add_argument("--add", metavar="NAME", help="a further client, in a folder that has keys already")
    keys.add_argument(
        "--days", type=float, default=365.0, metavar="N", help="how long the certificates hold (default: 365)"
    )
    keys.add_argument("--force", action="store_true", help="replace keys that are there")


def _keys(arguments: argparse.Namespace) -> None:
    from safa.deploy.launcher.keys import add_client, make_keys

    if arguments.add is not None:
        if arguments.host or arguments.client:
            raise SafaError("--add makes the key of one more client; --host and --client are for a new folder")
        files = add_client(arguments.folder, arguments.add, force=arguments.force)
    elif not arguments.host or not arguments.client:
        raise SafaError("name the server with --host and its clients with --client, or one more client with --add")
    elif not arguments.days > 0:
        raise SafaError(f"days must be above 0, not {arguments.days:g}")
    else:
        hosts, clients = arguments.host, arguments.client
        files = make_keys(arguments.folder, hosts=hosts, clients=clients, days=arguments.days, force=arguments.force)
    console = Terminal()
    for file in files:
        console.print(str(file), soft_wrap=True, markup=False)
    root = Path(arguments.folder)
    console.print(
        f"A client gets {root / 'ca.crt'} and its own key, clients/NAME.key; the server needs no clients/*.key, and "
        f"nobody but you needs {root / 'ca.key'}.",
        soft_wrap=True,
        markup=False,
    )
