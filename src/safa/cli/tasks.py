"""`safa tasks`: list the tasks and their settings."""

from __future__ import annotations

import argparse
from typing import Any

from safa.cli.console import Terminal
from safa.tasks import TASKS

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa tasks` to the commands."""
    parser = commands.add_parser(
        "tasks",
        help="list the tasks and their settings",
        description="List the tasks and their settings.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=run)


def run(_: argparse.Namespace) -> None:
    """Print every task with its settings."""
    console = Terminal()
    for task in TASKS.values():
        console.print(f"[bold]{task.name}[/bold]  {task.about}")
        console.print(
            f"  {task.samples:,} samples, {task.clients} clients, {task.rounds} rounds, {task.epochs} epochs, "
            f"batches of {task.batch_size}, learning rate {task.lr:g}, at most {task.round_limit_s:g} s a round"
        )
