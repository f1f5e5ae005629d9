"""`safa serve`: all runs under a folder in a browser, while they are written and after."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = ["add", "run"]

_PORT = 8777
_NICE = 10


def add(commands: Any) -> None:
    """Add `safa serve` to the commands."""
    parser = commands.add_parser(
        "serve",
        help="show all runs under a folder in a browser, live",
        description="Show every run, sweep, arena, reproduction and deployment under DIR in a browser, while it is "
        "written and after. It reads only, and needs no network. Needs pip install 'safa[serve]'.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="the folder under which the runs are")
    parser.add_argument(
        "--port", type=int, default=_PORT, metavar="N", help=f"the port (default: {_PORT}; 0: any free)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on (default: 127.0.0.1, this machine only); with another one a token is needed",
    )
    parser.add_argument(
        "--token",
        help="needed to open the pages (default: with --host a new one, which is printed; else none)",
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Serve until Ctrl-C."""
    from safa.report.live import LiveServer

    folder, host, port, token = Path(arguments.folder), arguments.host, arguments.port, arguments.token
    server = LiveServer(folder, host=host, port=port, token=token, reproduction=_reproduction_page)
    words = f"The runs under {folder} are at {server.address} until you press Ctrl-C."
    Console(highlight=False).print(words, soft_wrap=True, markup=False)
    os.nice(_NICE)  # the runs go first
    server.run()


def _reproduction_page(folder: Path) -> str:
    """The page of a reproduction, as its results are now."""
    from safa.paper.outcome import Reproduction
    from safa.paper.webpage import webpage

    return webpage(Reproduction.read(folder))
