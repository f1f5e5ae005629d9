"""`safa deploy local`: a trial on one machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from safa.cli.deploy.common import add_command, add_run_options, folder_of
from safa.cli.deploy.output import show_run
from safa.cli.deploy.resume import new_run, resumed
from safa.deploy.exchange.options import Options
from safa.deploy.launcher.launch import run_local
from safa.deploy.launcher.link import begin_local
from safa.errors import SafaError
from safa.runs.lock import hold_launcher

__all__ = ["add_local"]


def add_local(kinds: Any) -> None:
    """Add the sub-command."""
    local = add_command(kinds, "local", _local, "a trial on one machine: the server, and every client as a process")
    add_run_options(local, "local")
    local.add_argument("--insecure", action="store_true", help="plain text and no keys, instead of TLS and a key each")
    local.add_argument(
        "--pause",
        metavar="NAME=SECONDS",
        action="append",
        default=[],
        help="make a client slow: so many seconds more for each of its updates (clients are client-0, client-1, ...)",
    )


def _local(arguments: argparse.Namespace) -> None:
    if arguments.resume:
        if arguments.pause:
            raise SafaError("--resume takes everything from its folder; give no --pause with it")
        folder = resumed(arguments, "local")
    else:
        settings, given = new_run(arguments)
        options = Options.of({"start_with": settings.clients} | given)
        if options.start_with > settings.clients:
            raise SafaError(f"start_with is {options.start_with}, but there are only {settings.clients} clients")
        folder = folder_of(arguments, settings)
        pauses = _pauses(arguments.pause)
        begin_local(folder, settings, options, insecure=arguments.insecure, pauses=pauses, force=arguments.force)
    with hold_launcher(folder):
        show_run(arguments, "local", folder, run_local)


def _pauses(texts: list[str]) -> Mapping[str, float]:
    pauses = {}
    for text in texts:
        name, equals, seconds = text.rpartition("=")
        try:
            pauses[name] = float(seconds)
        except ValueError:
            equals = ""
        if not equals:
            raise SafaError(f"--pause needs NAME=SECONDS, not {text!r}")
    return pauses
