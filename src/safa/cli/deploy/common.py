"""What the sub-commands of `safa deploy` share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safa.cli.arguments import add_options, add_settings, add_track
from safa.deploy.exchange.options import Options
from safa.deploy.flower.internals import check_flower
from safa.errors import SafaError
from safa.runs import next_folder
from safa.runs.settings import Settings
from safa.tasks import TASKS

__all__ = ["add_command", "add_run_options", "folder_of", "resolved_path"]


def add_command(kinds: Any, name: str, function: Callable[[argparse.Namespace], None], about: str) -> Any:
    """Add a sub-command, which fails with one sentence where Flower is missing or a file cannot be written."""

    def checked(arguments: argparse.Namespace) -> None:
        check_flower()
        try:
            function(arguments)
        except BrokenPipeError:
            raise
        except OSError as error:  # a full disk, a folder without permission
            where = error.filename or "the folder of the run"
            raise SafaError(f"cannot read or write {where}: {error.strerror or error}") from None

    parser = kinds.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False)
    parser.set_defaults(command=checked)
    return parser


def add_run_options(parser: Any, kind: str) -> None:
    """Add the options of a command that begins or resumes a run."""
    parser.usage = f"safa deploy {kind} TASK [options]"
    parser.add_argument("task", metavar="TASK", nargs="?", help=f"one of {', '.join(TASKS)}, or your own")
    parser.add_argument("--task", dest="named_task", metavar="TASK", help="the same")
    add_settings(parser, lists=False)
    add_options(parser, Options)
    add_track(parser)
    parser.add_argument("--config", metavar="FILE", help="settings from a config.toml, and options from its [deploy]")
    parser.add_argument("--resume", metavar="DIR", help="resume the run in this folder where it was stopped")
    parser.add_argument("--out", metavar="DIR", help="write the run into this folder (default: a new one in runs/)")


def folder_of(arguments: argparse.Namespace, settings: Settings) -> Path:
    """The folder of a new run."""
    return Path(arguments.out) if arguments.out else next_folder(f"deploy-{settings.task}-{settings.protocol}")


def resolved_path(path: str | None) -> str | None:
    """An absolute path, where one was given."""
    return str(Path(path).resolve()) if path else None
