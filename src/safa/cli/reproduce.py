"""`safa reproduce`: the tables and figures of the SAFA paper."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safa.cli.arguments import add_engine, engine_of
from safa.cli.console import Terminal
from safa.cli.live import LiveView
from safa.cli.progress import Progress
from safa.cli.show import print_table
from safa.errors import SafaError
from safa.experiments.engines import Engine
from safa.paper import grid
from safa.paper.collect import RESULTS, Results, collect
from safa.paper.grid import Job
from safa.tasks import find_task

if TYPE_CHECKING:
    from safa.paper.reproduction import Reproduction

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa reproduce` to the commands."""
    parser = commands.add_parser(
        "reproduce",
        help="reproduce the paper's tables and figures, and check its claims",
        description="Run the experiments of the SAFA paper with its own accounting and with corrected accounting, and "
        "write tables, figures and a page of both. To resume, give the same folder again.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--task", default="all", metavar=f"{'|'.join(grid.TASKS)}|all", help="which task, or several (default: all)"
    )
    parser.add_argument(
        "--what",
        default="all",
        metavar=f"{'|'.join(grid.PARTS)}|all",
        help="timing: Tables IV-IX, XI, XIII, XV; accuracy: Tables X, XII, XIV and Figures 6-8; lag: Figures 3 and 4; "
        "bias: Figure 5; or several (default: all)",
    )
    _add_numbers(parser)
    add_engine(parser)
    parser.add_argument("--device", default="cpu", help="where to train: cpu or cuda (default: cpu)")
    parser.add_argument("--out", metavar="DIR", required=True, help="a new folder, or that of an earlier reproduction")
    parser.add_argument("--quiet", action="store_true", help="no progress and no tables")
    parser.set_defaults(command=run)


def _add_numbers(parser: argparse.ArgumentParser) -> None:
    for flag, default, meaning in (
        ("--seeds", 5, "fleets in which models are trained (default: 5)"),
        ("--worlds", 30, "fleets in which rounds are timed, without training (default: 30)"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=meaning)


def run(arguments: argparse.Namespace) -> None:
    """Run what is missing of a reproduction, and write its tables, figures and page."""
    from safa.paper import reproduction

    jobs = _jobs(arguments)
    engine = engine_of(arguments, [job.settings for job in jobs])
    _check_training(jobs, arguments.device)
    folder = _folder(Path(arguments.out))
    _run_missing(arguments, folder, jobs, engine)
    with_bias = "bias" in _chosen("what", arguments.what, grid.PARTS) or reproduction.has_figure_5(folder)
    bias = reproduction.bias_of_figure_5() if with_bias else ()
    page = reproduction.write_reproduction(folder, bias=bias)
    if not arguments.quiet:
        _print(reproduction.Reproduction.read(folder, bias))
        Terminal(stderr=True).print(f"Written to {page}", soft_wrap=True)


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    """The runs that were asked for."""
    tasks = _chosen("task", arguments.task, grid.TASKS)
    parts = _chosen("what", arguments.what, grid.PARTS)
    for name in ("seeds", "worlds"):
        if getattr(arguments, name) < 1:
            raise SafaError(f"{name} must be at least 1, not {getattr(arguments, name)}")
    return grid.plan(tasks, parts, seeds=arguments.seeds, worlds=arguments.worlds, device=arguments.device)


def _check_training(jobs: Sequence[Job], device: str) -> None:
    """Find the device and the data before the first run, so that what is missing is reported at once."""
    tasks = dict.fromkeys(job.settings.task for job in jobs if job.settings.train)
    if tasks:
        from safa.training.setup import find_device

        find_device(device)
    for task in tasks:
        find_task(task).load()
    if device == "cpu" and "mnist" in tasks:
        print("safa: training Task 2 (mnist) takes days without a GPU; see --device and --task", file=sys.stderr)


def _run_missing(arguments: argparse.Namespace, folder: Path, jobs: Sequence[Job], engine: Engine) -> None:
    """Run the missing jobs, and record how long they took; the same command resumes."""
    results = Results(folder / RESULTS)
    missing = results.missing(jobs)
    start = time.perf_counter()
    before, work = len(jobs) - len(missing), sum(job.weight for job in jobs)
    worked = work - sum(job.weight for job in missing)
    progress = Progress(len(jobs), "run", done=before, work=work, worked=worked)
    try:
        with LiveView(progress, quiet=arguments.quiet) as view:
            for job in collect(missing, results, engine=engine):
                view.run((results.get(job) or {}).get("summary", {}), job.weight)
    except KeyboardInterrupt:
        kept = f"{progress.done} of {len(jobs)} runs are finished"
        raise KeyboardInterrupt(f"{kept} and kept in {folder}; the same command resumes") from None
    finally:
        if progress.done > before:
            _note_session(arguments, folder, progress.done - before, time.perf_counter() - start)


def _note_session(arguments: argparse.Namespace, folder: Path, done: int, seconds: float) -> None:
    from safa.paper import reproduction

    command = f"safa reproduce --task {arguments.task} --what {arguments.what} --seeds {arguments.seeds}"
    where = f" --device {arguments.device}" if arguments.device != "cpu" else ""
    where += f" --workers {arguments.workers}" if arguments.workers is not None else ""
    where += f" --engine {arguments.engine}" if arguments.engine != "local" else ""
    reproduction.note_session(
        folder,
        command=f"{command} --worlds {arguments.worlds}{where}",
        machine=reproduction.machine(arguments.device),
        runs=done,
        seconds=round(seconds, 1),
    )


def _chosen(name: str, text: str, known: Sequence[str]) -> list[str]:
    """One or several of the known names, or all."""
    chosen = list(known) if text == "all" else [part.strip() for part in text.split(",")]
    for part in chosen:
        if part not in known:
            raise SafaError(f"{name} must be one of {', '.join(known)} or all, not {part!r}")
    return chosen


def _folder(path: Path) -> Path:
    """A folder that is new, empty, or holds a reproduction already."""
    if path.is_dir() and any(path.iterdir()) and not (path / RESULTS).is_file():
        raise SafaError(f"{path} holds other files; choose a new folder, or that of an earlier reproduction")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / RESULTS).touch()
    except OSError as error:
        raise SafaError(f"cannot make the folder {path}: {error.strerror}") from None
    return path


def _print(found: Reproduction) -> None:
    """Print how many figures are met, and which claims hold."""
    from safa.paper.findings import CLASS_HEAD, class_rows

    claims = [[one.words, one.finding] for one in found.claims]
    for head, rows in ((CLASS_HEAD, class_rows(found)), (["claim", "finding"], claims)):
        if rows:
            print_table(head, rows)
            print()
