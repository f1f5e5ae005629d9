"""`safa bias`: the bias between the fastest and the slowest client."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from safa.cli.console import Terminal
from safa.cli.show import print_table
from safa.paper.bias import bias_figure, bias_report, describe, table
from safa.runs import new_folder, next_folder

__all__ = ["add", "run"]

_RATES = (
    ("--crash-a", 0.3, "crash rate of A"),
    ("--crash-b", 0.3, "crash rate of B"),
    ("--fraction", 0.5, "C: the fraction of clients whose updates end a round"),
    ("--crash-rate", 0.3, "R: crash rate of all others"),
)
_COUNTS = (
    ("--rounds", 12, "rounds"),
    ("--clients", 200, "clients in the simulation"),
    ("--repetitions", 300, "simulated runs"),
    ("--seed", 0, "the seed of the simulation"),
)


def add(commands: Any) -> None:
    """Add `safa bias` to the commands."""
    parser = commands.add_parser(
        "bias",
        help="the bias between the fastest and the slowest client, by theory and by simulation",
        description="How much more likely the fastest client A is to contribute than the slowest client B: by the "
        "paper's recurrence corrected, as printed, and by simulation.",
        allow_abbrev=False,
    )
    for flag, rate, meaning in _RATES:
        parser.add_argument(flag, type=float, default=rate, metavar="X", help=f"{meaning} (default: {rate})")
    for flag, count, meaning in _COUNTS:
        parser.add_argument(flag, type=int, default=count, metavar="N", help=f"{meaning} (default: {count})")
    parser.add_argument("--out", metavar="DIR", help="where to put the plot (default: a new folder in runs/)")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the bias as a table and plot it."""
    from safa.report.figures import save

    counts = {name: getattr(arguments, name) for name in ("rounds", "clients", "repetitions", "seed")}
    rates = arguments.crash_a, arguments.crash_b, arguments.fraction, arguments.crash_rate
    report = bias_report(*rates, **counts)
    folder = new_folder(Path(arguments.out) if arguments.out else next_folder("bias"), force=False)
    files = save(bias_figure(report).properties(width="container"), folder / "bias")
    console = Terminal()
    for line in describe(report):
        console.print(line, soft_wrap=True)
    print_table(*table(report))
    console.print(f"Plotted to {files[0]}", soft_wrap=True)
