"""The commands `safa reproduce` and `safa bias`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from safa.cli.show import TABLE_WIDTH, with_progress
from safa.errors import SafaError
from safa.paper import grid
from safa.paper.bias import bias_figure, bias_report, describe, table
from safa.paper.collect import RESULTS, Results, collect
from safa.paper.grid import Job
from safa.runs import new_folder, next_folder
from safa.tasks import find_task

if TYPE_CHECKING:
    from safa.paper.reproduction import Reproduction

__all__ = ["add_bias", "add_reproduce"]


def add_reproduce(commands: Any) -> None:
    """Add `safa reproduce` to the commands."""
    reproduce = commands.add_parser(
        "reproduce",
        help="reproduce the paper's tables and figures, and say what holds",
        description="Run the experiments of the SAFA paper as it did them and with its accounting put right, and write "
        "tables, figures and a page of both. Goes on where it was stopped: give the same folder again.",
        allow_abbrev=False,
    )
    reproduce.add_argument(
        "--task", default="all", metavar=f"{'|'.join(grid.TASKS)}|all", help="which task, or several (default: all)"
    )
    reproduce.add_argument(
        "--what",
        default="all",
        metavar=f"{'|'.join(grid.PARTS)}|all",
        help="timing: Tables IV-IX, XI, XIII, XV; accuracy: Tables X, XII, XIV and Figures 6-8; lag: Figures 3 and 4; "
        "bias: Figure 5; or several (default: all)",
    )
    reproduce.add_argument(
        "--seeds", type=int, default=5, metavar="N", help="worlds in which models are trained (default: 5)"
    )
    reproduce.add_argument(
        "--worlds",
        type=int,
        default=30,
        metavar="N",
        help="worlds in which rounds are timed, which takes little time (default: 30)",
    )
    reproduce.add_argument("--device", default="cpu", help="where to train: cpu or cuda (default: cpu)")
    reproduce.add_argument(
        "--workers", metavar="N", type=int, default=os.cpu_count() or 1, help="processes to use (default: all cores)"
    )
    reproduce.add_argument("--out", metavar="DIR", required=True, help="the folder, new or of a reproduction before")
    reproduce.add_argument("--quiet", action="store_true", help="no progress and no tables")
    reproduce.set_defaults(command=_reproduce)


def add_bias(commands: Any) -> None:
    """Add `safa bias` to the commands."""
    bias = commands.add_parser(
        "bias",
        help="the bias between the fastest and the slowest client, by theory and by simulation",
        description="How much likelier the fastest client A is to contribute than the slowest client B: by the paper's "
        "recurrence put right, as printed, and by simulation.",
        allow_abbrev=False,
    )
    for flag, default, meaning in (
        ("--crash-a", 0.3, "crash rate of A"),
        ("--crash-b", 0.3, "crash rate of B"),
        ("--fraction", 0.5, "C: the share of clients whose updates a round wants"),
        ("--crash-rate", 0.3, "R: crash rate of all others"),
    ):
        bias.add_argument(flag, type=float, default=default, metavar="X", help=f"{meaning} (default: {default})")
    for flag, count, meaning in (
        ("--rounds", 12, "rounds"),
        ("--clients", 200, "clients in the simulation"),
        ("--repetitions", 300, "simulated runs"),
        ("--seed", 0, "the seed of the simulation"),
    ):
        bias.add_argument(flag, type=int, default=count, metavar="N", help=f"{meaning} (default: {count})")
    bias.add_argument("--out", metavar="DIR", help="where to put the plot (default: a new folder in runs/)")
    bias.set_defaults(command=_bias)


def _reproduce(arguments: argparse.Namespace) -> None:
    from safa.paper import reproduction

    tasks = _chosen("task", arguments.task, grid.TASKS)
    parts = _chosen("what", arguments.what, grid.PARTS)
    for name in ("seeds", "worlds", "workers"):
        if getattr(arguments, name) < 1:
            raise SafaError(f"{name} must be at least 1, not {getattr(arguments, name)}")
    jobs = grid.plan(tasks, parts, seeds=arguments.seeds, worlds=arguments.worlds, device=arguments.device)
    if any(job.settings.train for job in jobs):
        from safa.training.setup import find_device

        find_device(arguments.device)
        for task in dict.fromkeys(job.settings.task for job in jobs if job.settings.train):
            find_task(task).load()  # data that cannot be had is missed now, not after hours
    if arguments.device == "cpu" and any(job.settings.train and job.settings.task == "mnist" for job in jobs):
        print("safa: training Task 2 (mnist) takes days without a GPU; see --device and --task", file=sys.stderr)
    folder = _reproduction_folder(Path(arguments.out))
    results = Results(folder / RESULTS)
    _do_missing(arguments, folder, results, jobs)
    bias = reproduction.bias_of_figure_5() if "bias" in parts or reproduction.has_figure_5(folder) else ()
    page = reproduction.write_reproduction(folder, bias=bias)
    if not arguments.quiet:
        _print_reproduction(reproduction.Reproduction.read(folder, bias))
        Console(stderr=True).print(f"Written to {page}", highlight=False, soft_wrap=True)


def _do_missing(arguments: argparse.Namespace, folder: Path, results: Results, jobs: Sequence[Job]) -> None:
    """Do what is missing of a reproduction, and note what it took; a later call goes on where this one is stopped."""
    from safa.paper import reproduction

    missing = results.missing(jobs)
    start = time.perf_counter()
    done = 0
    try:
        finished = collect(missing, results, workers=min(arguments.workers, max(1, len(missing))))
        for _ in with_progress(finished, sum(j.weight for j in missing), "runs", quiet=arguments.quiet, weigh=_weight):
            done += 1
    except KeyboardInterrupt:
        kept = f"{len(jobs) - len(missing) + done} of {len(jobs)} runs are finished"
        raise KeyboardInterrupt(f"{kept} and kept in {folder}; the same command goes on from there") from None
    finally:
        if done:
            command = f"safa reproduce --task {arguments.task} --what {arguments.what} --seeds {arguments.seeds}"
            places = f" --device {arguments.device}" if arguments.device != "cpu" else ""
            reproduction.note_session(
                folder,
                command=f"{command} --worlds {arguments.worlds} --workers {arguments.workers}{places}",
                machine=reproduction.machine(arguments.device),
                runs=done,
                seconds=round(time.perf_counter() - start, 1),
            )


def _weight(job: Job) -> float:
    return job.weight


def _chosen(name: str, text: str, known: Sequence[str]) -> list[str]:
    """One or several of what there is, or all."""
    chosen = list(known) if text == "all" else [part.strip() for part in text.split(",")]
    for part in chosen:
        if part not in known:
            raise SafaError(f"{name} must be one of {', '.join(known)} or all, not {part!r}")
    return chosen


def _reproduction_folder(path: Path) -> Path:
    """A folder that is new, empty, or holds a reproduction already."""
    if path.is_dir() and any(path.iterdir()) and not (path / RESULTS).is_file():
        raise SafaError(f"{path} holds other files; choose a new folder, or that of a reproduction before")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / RESULTS).touch()
    except OSError as problem:
        raise SafaError(f"cannot make the folder {path}: {problem.strerror}") from None
    return path


def _bias(arguments: argparse.Namespace) -> None:
    from safa.report.figures import save

    values = {name: getattr(arguments, name) for name in ("rounds", "clients", "repetitions", "seed")}
    setting = arguments.crash_a, arguments.crash_b, arguments.fraction, arguments.crash_rate
    report = bias_report(*setting, **values)
    folder = new_folder(Path(arguments.out) if arguments.out else next_folder("bias"), force=False)
    files = save(bias_figure(report).properties(width="container"), folder / "bias")
    console = Console(highlight=False)
    for line in describe(report):
        console.print(line, soft_wrap=True)
    headings, rows = table(report)
    shown = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        shown.add_row(*row)
    console.width = max(console.width, TABLE_WIDTH)
    console.print(shown)
    console.print(f"Plotted to {files[0]}", soft_wrap=True)


def _print_reproduction(found: Reproduction) -> None:
    """What was met, and what holds."""
    from safa.paper.findings import CLASS_HEAD, class_rows

    console = Console(highlight=False)
    claims = [[one.words, one.finding] for one in found.claims]
    for head, rows in ((CLASS_HEAD, class_rows(found)), (["claim", "finding"], claims)):
        table = Table(*head, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        if rows:
            console.print(table)
            console.print()
