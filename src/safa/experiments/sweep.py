"""Sweeps: a run for every combination of the given values, and one table with a row for each."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, BinaryIO, Unpack

import numpy as np

from safa.analysis import METRICS, TARGET_METRICS, client_metrics, score_metrics
from safa.errors import SafaError
from safa.experiments.results import Sweep, load_sweep, read_rows, row_of
from safa.experiments.simulate import Experiment, fleet_of, run_to_end
from safa.experiments.stack import group_runs, run_side_by_side
from safa.experiments.workers import pool
from safa.fleet import check_sizes
from safa.protocol import build
from safa.runs import RunWriter
from safa.runs.options import SweepOptions
from safa.runs.settings import Settings, refuse_unused
from safa.runs.storage import append, write_atomically, writing
from safa.runs.sweep_folder import Keep, SweepFolder, finish_run, unfinished_path
from safa.runs.table import csv_line, parsed_row
from safa.runs.values import COLUMNS
from safa.simulation import run_rounds
from safa.tasks import UNNAMED, Task, find_task, given_task

if TYPE_CHECKING:
    from safa.tasks.problem import Problem
    from safa.training.setup import TrainerOf

__all__ = ["columns", "combinations", "one_thread", "run_one", "run_stack", "run_sweep", "sweep"]

_Job = Callable[["Problem | None"], list[dict[str, Any] | Exception]]
_WORLD = tuple(COLUMNS)
"""Settings that are a file, or numbers about the clients."""


def combinations(
    tasks: Sequence[str | Task], given: Mapping[str, Sequence[Any]], *, preset: str | Path | None = None
) -> list[Settings]:
    """The settings of every run of a sweep, all checked, the last list varying fastest.

    What is given must have an effect in one of the runs at least: `lag_tolerance` may be given for safa and fedavg.
    """
    known = [task if isinstance(task, Task) else find_task(task) for task in tasks]
    for name, listed in {"task": [task.name for task in known], **given}.items():
        _check_listed(name, listed)
    made = [
        Settings.combined(task, preset=preset, **dict(zip(given, values, strict=True)))
        for task in known
        for values in itertools.product(*given.values())
    ]
    refuse_unused(made)
    runs = [settings for settings, _ in made]
    samples = {task.name: task.samples for task in known}
    problems = {task.name: task.load() for task in tasks if isinstance(task, Task)}
    for settings in _one_per_world(runs):
        fleet = fleet_of(settings, problems.get(settings.task))
        run_rounds(settings, fleet)
        if settings.train:
            check_sizes(settings, fleet, samples[settings.task])
            _check_aggregator(settings)
    return runs


def _check_aggregator(settings: Settings) -> None:
    """Refuse an aggregator or a server optimiser that makes no sense with the protocol; by default there is none."""
    if settings.aggregator != "auto" or settings.server_optimiser != "none":
        from safa.server.setup import make_aggregator

        make_aggregator(settings, build(settings.protocol, [1.0], settings.values(), settings.protocol_options))


def _check_listed(name: str, values: Sequence[Any]) -> None:
    """Refuse a list without values, and one that contains a value twice: the runs would be the same."""
    if not values:
        raise SafaError(f"{name} lists no value")
    seen = set()
    for value in values:
        key = value if isinstance(value, Hashable) else repr(value)
        if key in seen:
            raise SafaError(f"{name} lists {value} twice, and the runs would be the same")
        seen.add(key)


def _one_per_world(runs: Sequence[Settings]) -> list[Settings]:
    """A selection of runs that reads every file and builds every protocol under every clock."""
    names = ("task", "train", "protocol", "clock", "clients", "partition", *_WORLD, "aggregator", "server_optimiser")
    return list({tuple(getattr(run, name) for name in names): run for run in runs}.values())


def run_one(
    settings: Settings, problem: Problem | None = None, *, path: Path | None = None, with_model: bool = False
) -> dict[str, Any]:
    """Simulate one run and return its row: settings and metrics. With `path`, its folder is written, too."""
    with one_thread() if settings.train else contextlib.nullcontext():
        return _row_of_run(settings, problem, path=path, with_model=with_model)


def run_stack(
    runs: Sequence[Settings],
    problem: Problem | None = None,
    *,
    paths: Sequence[Path | None],
    with_model: bool = False,
) -> list[dict[str, Any] | Exception]:
    """The same for runs that are trained as one: the row of each, or the error that it ended with."""
    if len(runs) == 1:
        return [run_one(runs[0], problem, path=paths[0], with_model=with_model)]
    jobs = [
        partial(_row_of_run, settings, path=path, with_model=with_model)
        for settings, path in zip(runs, paths, strict=True)
    ]
    return run_side_by_side(runs, jobs, problem)


def _row_of_run(
    settings: Settings,
    problem: Problem | None,
    trainer_of: TrainerOf | None = None,
    *,
    path: Path | None,
    with_model: bool,
) -> dict[str, Any]:
    experiment = Experiment(settings, problem, trainer_of)
    if path is None:
        for _ in run_to_end(experiment, None):
            pass
        summary = experiment.summary()
    else:
        summary = _write_run(experiment, path, with_model=with_model)
    return experiment.settings.values() | summary


def _write_run(experiment: Experiment, path: Path, *, with_model: bool) -> dict[str, Any]:
    """Run an experiment to its end and write its folder, without checkpoints; return its metrics."""
    writer = RunWriter.begin(unfinished_path(path), experiment.settings, force=True)
    try:
        for record in run_to_end(experiment, None):
            writer.add(record)
    except BaseException:
        writer.close()
        raise
    summary = experiment.summary()
    writer.close(summary, experiment.model() if with_model else None)
    finish_run(path)
    return summary


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for a run of a sweep, so that its result does not depend on the number of workers.

    A run whose settings say how many threads it uses, uses those.
    """
    from safa.training import torch_threads

    with torch_threads(1):
        yield


def columns(runs: Sequence[Settings]) -> list[str]:
    """The columns of the table: settings first, then metrics."""
    names = dict.fromkeys(name for settings in runs for name in settings.values())
    more: dict[str, str] = {}
    for run in runs:
        more |= score_metrics(run.metrics)
        more |= TARGET_METRICS if run.until else {}
        more |= client_metrics(run.metrics) if run.train and run.eval_clients else {}
    return [*names, *METRICS, *more]


def run_sweep(
    runs: Sequence[Settings],
    folder: Path,
    *,
    workers: int = 1,
    stack: int = 1,
    keep: Keep = "records",
    force: bool = False,
    problem: Problem | None = None,
) -> Iterator[dict[str, Any]]:
    """Simulate all runs, or those that are missing in the folder of this sweep, and give their rows in order.

    The folder can be read at any moment. However often the sweep was stopped, and whatever the number of workers, the
    table in it ends with the same bytes. Up to `stack` runs at a time are trained as one.
    """
    if stack < 1:
        raise SafaError(f"stack must be at least 1, not {stack}")
    there = SweepFolder.of(folder, runs, keep)
    names = columns(runs)
    with there.begin(force=force):
        finished = _finished(there, names)
        with _table(there.table, names, [line for line, _ in finished]) as file:
            yield from (row for _, row in finished)
            for row in _rows(runs, there, workers, stack, len(finished), problem):
                with writing(there.table):
                    append(file, csv_line([row.get(name) for name in names]))
                yield row


def _finished(folder: SweepFolder, names: Sequence[str]) -> list[tuple[bytes, dict[str, Any]]]:
    """The first runs of the plan, as many as are finished: their lines in the table, and their rows."""
    if folder.keep == "nothing":
        return [(csv_line(cells), parsed_row(names, cells)) for cells in read_rows(folder.table, names)]
    rows = (row_of(folder.run(number)) for number in itertools.takewhile(folder.is_finished, range(len(folder.varied))))
    return [(csv_line([row.get(name) for name in names]), row) for row in rows]


@contextlib.contextmanager
def _table(path: Path, names: Sequence[str], lines: Sequence[bytes]) -> Iterator[BinaryIO]:
    """The table with its first lines, to be continued."""
    begun = b"".join((csv_line(names), *lines))
    with writing(path):
        if not path.exists() or path.read_bytes() != begun:
            write_atomically(path, begun)
        file = path.open("ab", buffering=0)
    with file:
        yield file


def _rows(
    runs: Sequence[Settings], folder: SweepFolder, workers: int, stack: int, skipped: int, problem: Problem | None
) -> Iterator[dict[str, Any]]:
    """The rows of all runs but those that are skipped, in order; what is finished and kept is read."""
    numbers = range(skipped, len(runs))
    missing = [number for number in numbers if not folder.is_finished(number)]
    left = set(missing)
    with _made(runs, group_runs(runs, missing, stack), folder, workers, problem) as made:
        for number in numbers:
            yield next(made) if number in left else row_of(folder.run(number))


@contextlib.contextmanager
def _made(
    runs: Sequence[Settings],
    groups: Sequence[Sequence[int]],
    folder: SweepFolder,
    workers: int,
    problem: Problem | None,
) -> Iterator[Iterator[dict[str, Any]]]:
    """The rows of runs that are simulated now, those of a group as one."""
    work = [_job(runs, group, folder) for group in groups]
    if problem is not None or min(workers, len(work)) < 2:
        yield _sound(job(problem) for job in work)
        return
    several = max(1, min(8, len(work) // (4 * workers)))  # short runs are sent to the workers several at a time
    with pool(min(workers, len(work))) as processes:
        yield _sound(processes.map(_call, work, chunksize=1 if runs[0].train else several))


def _job(runs: Sequence[Settings], group: Sequence[int], folder: SweepFolder) -> _Job:
    """What simulates a group of runs."""
    paths = [None if folder.keep == "nothing" else folder.run_path(number) for number in group]
    return partial(run_stack, [runs[number] for number in group], paths=paths, with_model=folder.keep == "models")


def _call(job: _Job) -> list[dict[str, Any] | Exception]:
    return job(None)


def _sound(outcomes: Iterable[list[dict[str, Any] | Exception]]) -> Iterator[dict[str, Any]]:
    """The rows of groups of runs, up to the first run that ended with an error."""
    for outcome in itertools.chain.from_iterable(outcomes):
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome


def sweep(
    task: str | Problem | Callable[[], Problem] | Sequence[str],
    *,
    out: str | Path | None = None,
    force: bool = False,
    preset: str | Path | None = None,
    workers: int = 1,
    stack: int = 1,
    keep: Keep = "records",
    **settings: Unpack[SweepOptions],
) -> Sweep:
    """Run every combination of settings, each of which may be a list of values, and return the sweep.

    `sweep("digits", protocol=["safa", "fedavg"], seed=range(5), until="accuracy=0.85")`. With `out` it is written to
    that folder, and resumed if it was stopped there; without, it is in a temporary folder that lasts as long as the
    object does. A program that asks for several `workers` needs the usual `if __name__ == "__main__":`. Up to `stack`
    runs at a time are trained as one, which pays on a GPU.
    """
    own = None if isinstance(task, str | Sequence) else given_task(task)
    tasks: Sequence[str | Task] = [task] if isinstance(task, str) else task if isinstance(task, Sequence) else []
    given = {name: _listed(name, value) for name, value in settings.items()}
    runs = combinations(tasks if own is None else [own], given, preset=preset)
    problem = own.load() if own is not None and workers == 1 else None  # several workers load it by its name
    if own is not None and own.name == UNNAMED and workers > 1:
        raise SafaError("a problem that is given as an object runs with workers=1; name it as package.module:attribute")
    folder = Path(out if out is not None else mkdtemp(prefix="safa-sweep-"))
    try:
        for _ in run_sweep(runs, folder, workers=workers, stack=stack, keep=keep, force=force, problem=problem):
            pass
        found = load_sweep(folder)
    except BaseException:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if out is None:
        weakref.finalize(found, shutil.rmtree, folder, ignore_errors=True)
    return found


def _listed(name: str, value: Any) -> list[Any]:
    """The values of a setting: a list or a range has several, anything else is one.

    Numbers about the clients are a list themselves: several of those are a list of lists, of arrays or of files.
    """
    if not isinstance(value, list | tuple | range):
        return [value]
    is_one = name in _WORLD and len(value) > 0 and not all(_is_world(name, item) for item in value)
    return [value] if is_one else list(value)


def _is_world(name: str, item: Any) -> bool:
    """Whether it is a whole value of such a setting: a file, a frame, or numbers of all clients."""
    if isinstance(item, str | os.PathLike) or hasattr(item, "columns"):
        return True
    dimensions = 1 if len(COLUMNS[name]) == 1 else 2
    return np.ndim(item) >= dimensions
