"""`safa arena`: protocols in many worlds, tuned by one rule, judged on fresh seeds."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safa.cli.arguments import add_engine, engine_of
from safa.cli.live import watched
from safa.cli.progress import Progress
from safa.experiments.arena import STAGES, Arena, Row
from safa.experiments.arena_plan import Plan, World
from safa.experiments.arena_tables import write_results

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa arena` to the commands."""
    parser = commands.add_parser(
        "arena",
        help="tune protocols in many worlds by one rule, and judge them on fresh seeds",
        description="Run a plan of worlds and protocols: tune every protocol on some seeds, judge it on others, write "
        "tables and a page. The same command resumes what was stopped.",
        allow_abbrev=False,
    )
    parser.add_argument("plan", metavar="PLAN.toml", help="the plan; docs/arena.md says what is in it")
    parser.add_argument("--out", metavar="DIR", help="the folder of the results (default: runs/arena-PLAN)")
    parser.add_argument(
        "--stage",
        metavar="STAGE",
        choices=STAGES,
        help=f"do this only: {', '.join(STAGES)} (default: all, in order)",
    )
    parser.add_argument(
        "--worlds", metavar="NAME,...", default="", help="these worlds of the plan only; names may have wildcards, as *"
    )
    add_engine(parser)
    parser.add_argument(
        "--stack", metavar="N", type=int, default=1,
        help="train up to N runs at a time as one computation, which pays on a GPU (default: 1)",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Do the stages that are wanted, and say where the results are."""
    plan = Plan.read(Path(arguments.plan))
    worlds = plan.chosen(name.strip() for name in arguments.worlds.split(",") if name.strip())
    plan.check(worlds)
    folder = Path(arguments.out) if arguments.out else Path("runs") / f"arena-{Path(arguments.plan).stem}"

    def watch(words: str, rows: Iterable[Row], total: int) -> Iterable[Row]:
        return watched(rows, Progress(total, "run", title=words), lambda row: row, quiet=arguments.quiet)

    arena = Arena(plan, folder, stack=arguments.stack, watch=watch)
    stages = [arguments.stage] if arguments.stage else list(STAGES)
    try:
        _run(arguments, arena, worlds, stages)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"resume with the same command and --out {folder}") from None


def _run(arguments: argparse.Namespace, arena: Arena, worlds: Sequence[World], stages: Sequence[str]) -> None:
    if set(stages) & {"tune", "judge"}:
        settings = [arena.plan.runs(world, arena.plan.grid(world)[:1], [0], judged=False)[0] for world in worlds]
        arena.run(worlds, stages, engine_of(arguments, settings))
    if "report" in stages:
        write_results(arena)
        print(f"Written to {_page(arena.folder)}")


def _page(folder: Path) -> Path:
    """The page, or the Markdown where the libraries for charts are not installed."""
    try:
        from safa.report import write_report
    except ModuleNotFoundError:
        return folder / "arena.md"
    return write_report(folder)
