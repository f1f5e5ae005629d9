"""`safa report`: the page of a run, a sweep, an arena or a reproduction."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa report` to the commands."""
    parser = commands.add_parser(
        "report",
        help="make a page of a run, a sweep, an arena or a reproduction",
        description="Write DIR/report.html: one file that opens in any browser, without a network.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="the folder of a run, a sweep, an arena or a reproduction")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Write the page and print its path."""
    from safa.paper.collect import RESULTS

    folder = Path(arguments.folder)
    page = _reproduction_page(folder) if (folder / RESULTS).exists() else _page(folder)
    Console().print(f"Written to {page}", highlight=False, soft_wrap=True)


def _reproduction_page(folder: Path) -> Path:
    from safa.paper import reproduction

    bias = reproduction.bias_of_figure_5() if reproduction.has_figure_5(folder) else ()
    return reproduction.write_reproduction(folder, bias=bias)


def _page(folder: Path) -> Path:
    from safa.report import write_report

    return write_report(folder)
