"""`safa deploy client`: one client, on a device."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from safa.cli.console import Terminal
from safa.cli.deploy.common import add_command
from safa.cli.deploy.output import sigterm_like_ctrl_c
from safa.deploy.exchange.roster import name_fault
from safa.deploy.exchange.text import printable
from safa.deploy.launcher.checks import check_certificate, is_loopback, private_key_fault
from safa.deploy.launcher.launch import run_client
from safa.deploy.launcher.link import FLOWER
from safa.deploy.launcher.node import Node
from safa.deploy.launcher.processes import private_files
from safa.errors import SafaError

__all__ = ["add_client"]


def add_client(kinds: Any) -> None:
    """Add the sub-command."""
    client = add_command(
        kinds, "client", _client, "one client of a deployment: starts its SuperNode, and keeps it running"
    )
    client.add_argument("--server", metavar="HOST:PORT", required=True, help="where the server listens")
    client.add_argument("--name", required=True, help="the name of the client, the same at every start")
    client.add_argument(
        "--state", metavar="DIR", required=True, help="a folder in which it keeps the training in progress"
    )
    client.add_argument("--keys", metavar="DIR", help="a folder with ca.crt and clients/NAME.key")
    client.add_argument("--ca", metavar="FILE", help="the server's ca.crt, where there is no such folder")
    client.add_argument("--key", metavar="FILE", help="the client's own NAME.key, likewise")
    client.add_argument("--insecure", action="store_true", help="plain text and no key; to a loopback address only")
    client.add_argument("--task", help="the only task that it will train; needed for one of your own")
    client.add_argument(
        "--partition", type=int, metavar="K", help="its data are part K of the task's (default: all of them)"
    )
    client.add_argument(
        "--pause", type=float, default=0.0, metavar="X", help="take X seconds more for each update (for trials)"
    )


def _client(arguments: argparse.Namespace) -> None:
    _check(arguments)
    ca, key = _trust(arguments)
    state = Path(arguments.state).resolve()
    try:
        with private_files():
            (state / FLOWER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SafaError(f"cannot create the folder {state}: {error.strerror}") from None
    node = Node(
        name=arguments.name,
        server=arguments.server,
        state=state,
        folder=state / FLOWER,
        ca=ca,
        key=key,
        task=arguments.task,
        partition=arguments.partition,
        pause_s=arguments.pause,
    )
    console = Terminal()
    with sigterm_like_ctrl_c():
        run_client(node, lambda line: console.print(printable(line), soft_wrap=True, markup=False))


def _check(arguments: argparse.Namespace) -> None:
    host, colon, port = arguments.server.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise SafaError(f"--server needs HOST:PORT, not {arguments.server!r}")
    fault = name_fault(arguments.name)
    if fault:
        raise SafaError(fault)
    if not 0 <= arguments.pause < float("inf"):
        raise SafaError(f"a pause must be a number of seconds, not {arguments.pause}")
    if (arguments.partition or 0) < 0:
        raise SafaError(f"partition must be at least 0, not {arguments.partition}")
    if arguments.insecure and not is_loopback(host.strip("[]")):
        raise SafaError(f"--insecure is for trials on one machine: {host} is not a loopback address")


def _trust(arguments: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """The certificate that a client trusts, and its own key."""
    ways = bool(arguments.keys), bool(arguments.ca or arguments.key), arguments.insecure
    if sum(ways) != 1:
        raise SafaError("a client needs --keys DIR, or --ca FILE and --key FILE, or --insecure")
    if arguments.insecure:
        return None, None
    if not arguments.keys and not (arguments.ca and arguments.key):
        raise SafaError("--ca and --key go together")
    ca = _file(arguments.ca or Path(arguments.keys, "ca.crt"), "certificate of an authority")
    key = _file(arguments.key or Path(arguments.keys, "clients", f"{arguments.name}.key"), "private key")
    check_certificate(ca)
    if private_key_fault(key):
        raise SafaError(f"{key} is not a client's private key: {private_key_fault(key)}")
    return ca, key


def _file(path: str | Path, what: str) -> Path:
    if not Path(path).is_file():
        raise SafaError(f"there is no {what} {path}")
    return Path(path).resolve()
