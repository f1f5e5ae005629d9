"""`safa report`: the page of a run, a sweep, an arena or a reproduction, or one that compares several."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from safa.cli.console import Terminal
from safa.errors import SafaError

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa report` to the commands."""
    parser = commands.add_parser(
        "report",
        help="make a page of a run, a sweep, an arena or a reproduction, or compare several runs and sweeps",
        description="Write DIR/report.html: one file that opens in any browser, without a network. Several runs and "
        "sweeps are compared on one page, comparison.html.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folders", metavar="DIR", nargs="+", help="the folder of a run, a sweep, an arena or a reproduction"
    )
    parser.add_argument("--out", metavar="FILE", help="write the page into this file")
    parser.add_argument(
        "--target",
        metavar="METRIC=VALUE[,held=ROUNDS]",
        help="compare settings by their time to this (default: the --until that all runs have; without one, the page "
        "chooses a value that three in four settings reached with every seed)",
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Write the page and print its path."""
    from safa.paper.collect import RESULTS
    from safa.report import write_report

    folders = [Path(folder) for folder in arguments.folders]
    if len(folders) == 1 and (folders[0] / RESULTS).exists():
        if arguments.out or arguments.target:
            raise SafaError("the page of a reproduction is written into its folder, and has no target")
        page = _reproduction_page(folders[0])
    else:
        page = write_report(folders if len(folders) > 1 else folders[0], arguments.out, target=arguments.target)
    Terminal().print(f"Written to {page}", soft_wrap=True)


def _reproduction_page(folder: Path) -> Path:
    from safa.paper import reproduction

    bias = reproduction.bias_of_figure_5() if reproduction.has_figure_5(folder) else ()
    return reproduction.write_reproduction(folder, bias=bias)
