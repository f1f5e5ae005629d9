"""`safa deploy server`: the server, for clients on other machines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from safa.cli.console import Terminal
from safa.cli.deploy.common import add_command, add_run_options, folder_of, resolved_path
from safa.cli.deploy.output import show_run
from safa.cli.deploy.resume import check_same, is_finished, new_run, resumed
from safa.deploy.exchange.files import UNBLOCK
from safa.deploy.exchange.options import Options
from safa.deploy.launcher.checks import is_loopback
from safa.deploy.launcher.launch import run_server
from safa.deploy.launcher.link import Link, begin
from safa.errors import SafaError
from safa.runs import load_run, write_atomically
from safa.runs.lock import hold_launcher

__all__ = ["add_server"]

_HOST, _PORT = "0.0.0.0", 9092


def add_server(kinds: Any) -> None:
    """Add the sub-command."""
    server = add_command(kinds, "server", _server, "the server of a deployment, for clients on other machines")
    add_run_options(server, "server")
    server.add_argument(
        "--keys", metavar="DIR", help="the keys, as safa deploy keys makes them; clients/*.pub may join"
    )
    server.add_argument("--host", help=f"the address to listen on (default: {_HOST}, all there are)")
    server.add_argument("--port", type=int, metavar="N", help=f"the port (default: {_PORT})")
    server.add_argument(
        "--insecure", action="store_true", help="plain text and no keys; on the loopback interface only"
    )
    server.add_argument(
        "--auto-resume", action="store_true", help="resume the run in --out if it was begun, else begin it"
    )
    server.add_argument(
        "--unblock",
        metavar="NAME",
        action="append",
        default=[],
        help="when a run is resumed: let a client take part again that was blocked or expelled",
    )


def _server(arguments: argparse.Namespace) -> None:
    folder = _folder(arguments)
    if folder is not None:
        with hold_launcher(folder):
            _unblock(folder, arguments.unblock)
            show_run(arguments, "server", folder, run_server)


def _folder(arguments: argparse.Namespace) -> Path | None:
    """The folder of the run that is to be begun or resumed; None where that is finished."""
    begun = bool(arguments.auto_resume and arguments.out and (Path(arguments.out) / "config.toml").exists())
    _check_flags(arguments, begun=begun)
    if arguments.resume:
        return resumed(arguments, "server")
    if not begun:
        return _begun(arguments)
    folder = Path(arguments.out)
    finished = is_finished(folder, "server")
    check_same(arguments, folder)
    if finished:
        Terminal(stderr=True).print(f"The run in {folder} is finished.", soft_wrap=True)
    return None if finished else folder


def _check_flags(arguments: argparse.Namespace, *, begun: bool) -> None:
    if arguments.auto_resume and not arguments.out:
        raise SafaError("--auto-resume needs --out, the folder of the run")
    if arguments.auto_resume and arguments.force:
        raise SafaError("--auto-resume resumes the run in --out, and --force replaces it; give one of them")
    if arguments.unblock and not arguments.resume and not begun:
        raise SafaError("--unblock goes with --resume: no client is blocked in a new run")
    if arguments.resume and (arguments.keys or arguments.host or arguments.port):
        raise SafaError("--resume takes everything from its folder; give no keys, host or port with it")


def _begun(arguments: argparse.Namespace) -> Path:
    """The folder of a new run."""
    settings, given = new_run(arguments)
    if arguments.insecure == bool(arguments.keys):
        raise SafaError("a server needs --keys DIR (safa deploy keys makes them), or --insecure, and not both")
    host, port = arguments.host or _HOST, _PORT if arguments.port is None else arguments.port
    if not 0 < port < 65536:
        raise SafaError(f"a port is a number from 1 to 65535, not {port}")
    if arguments.insecure and not is_loopback(host):
        raise SafaError(f"--insecure is for trials on one machine: {host} is not a loopback address")
    folder = folder_of(arguments, settings)
    link = Link(host=host, port=port, keys=resolved_path(arguments.keys))
    begin(folder, settings, Options.of(given), link, force=arguments.force)
    return folder


def _unblock(folder: Path, names: list[str]) -> None:
    known = [member["name"] for member in load_run(folder).roster() or []]
    for name in names:
        if name not in known:
            raise SafaError(f"there is no client {name!r} to unblock in {folder}")
    if names:
        write_atomically(folder / UNBLOCK, json.dumps(names).encode())
