"""Sweeps: a run for every combination of the given values, and one table with a row for each."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import weakref
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, BinaryIO, Unpack

import numpy as np

from safa.analysis import METRICS, TARGET_METRICS, client_metrics, score_metrics
from safa.errors import SafaError
from safa.experiments.callbacks import Callbacks
from safa.experiments.engines import Engine, LocalEngine, make_engine
from safa.experiments.results import Sweep, load_sweep, read_rows
from safa.experiments.simulate import Experiment, fleet_of, run_to_end, trainer_name
from safa.experiments.stack import group_runs, run_side_by_side
from safa.fleet import check_sizes
from safa.protocol import build
from safa.runs import Run, RunWriter
from safa.runs.options import SweepOptions
from safa.runs.settings import Settings, refuse_unused
from safa.runs.storage import append, write_atomically, writing
from safa.runs.sweep_folder import Keep, SweepFolder, finish_run, unfinished_path, write_run
from safa.runs.table import csv_line, parsed_row, row_of
from safa.runs.values import COLUMNS
from safa.simulation import run_rounds
from safa.tasks import UNNAMED, Task, find_task, given_task
from safa.trackers import Place, Tracking, find_trackers

if TYPE_CHECKING:
    from safa.tasks.problem import Problem
    from safa.training.setup import TrainerOf

__all__ = ["Out", "check_runs", "columns", "combinations", "one_thread", "run_one", "run_stack", "run_sweep", "sweep"]


@dataclass(frozen=True, kw_only=True)
class Out:
    """What becomes of a run besides its row."""

    path: Path | None = None
    """Its folder, if it has one."""
    keep: Keep = "records"
    track: Sequence[str] = ()
    """The names of its trackers."""
    place: Place | None = None
    """Which run it is to them."""

    def tracking(self, settings: Settings) -> Tracking:
        """What tells the trackers about the run with these settings."""
        tracking = Tracking(find_trackers(self.track))
        return tracking if self.place is None else tracking.begin(self.place, settings)


_NOWHERE = Out()
_Outcome = tuple[dict[str, Any] | Exception, dict[str, bytes]]
"""The row of a run, or the error that it ended with, and its files where they are still to be written."""
_WORLD = tuple(COLUMNS)
"""Settings that are a file, or numbers about the clients."""
_CURVE = "curve"
_ALIKE = ("task", "clients", "batch_size", "optimiser", "momentum", "shuffle", "device", "threads")
"""Settings on which it depends which trainer is the fastest."""


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
    return check_runs(made, known, {task.name: task.load() for task in tasks if isinstance(task, Task)})


def check_runs(
    made: Sequence[tuple[Settings, Sequence[str]]], tasks: Sequence[Task], problems: Mapping[str, Problem] | None = None
) -> list[Settings]:
    """The settings of these runs, as `Settings.combined` makes them, after all that can be checked beforehand."""
    refuse_unused(made)
    runs = [settings for settings, _ in made]
    samples, problems = {task.name: task.samples for task in tasks}, problems or {}
    for settings in _one_per_world(runs):
        fleet = fleet_of(settings, problems.get(settings.task))
        run_rounds(settings, fleet)
        if settings.train:
            check_sizes(settings, fleet, samples[settings.task])
            _check_aggregator(settings)
    return runs


def _check_aggregator(settings: Settings) -> None:
    """Refuse an aggregator or a server optimiser that makes no sense with the protocol; by default there is none."""
    if settings.aggregator != "auto" or settings.server_optimiser != "none" or settings.aggregator_options:
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


def run_one(settings: Settings, problem: Problem | None = None, out: Out = _NOWHERE) -> dict[str, Any]:
    """Simulate one run and return its row: settings and metrics."""
    with one_thread() if settings.train else contextlib.nullcontext():
        return _row_of_run(settings, problem, out=out)


def run_stack(
    runs: Sequence[Settings], outs: Sequence[Out], problem: Problem | None = None
) -> list[dict[str, Any] | Exception]:
    """The same for runs that are trained as one: the row of each, or the error that it ended with."""
    if len(runs) == 1:
        return [run_one(runs[0], problem, outs[0])]
    jobs = [partial(_row_of_run, settings, out=out) for settings, out in zip(runs, outs, strict=True)]
    return run_side_by_side(runs, jobs, problem)


def _row_of_run(
    settings: Settings, problem: Problem | None, trainer_of: TrainerOf | None = None, *, out: Out
) -> dict[str, Any]:
    experiment = Experiment(settings, problem, trainer_of)
    with out.tracking(experiment.settings) as tracking:
        callbacks = Callbacks([tracking])
        if out.path is None:
            for _ in run_to_end(experiment, None, callbacks):
                pass
            summary = experiment.summary()
        else:
            summary = _write_run(experiment, out.path, callbacks, with_model=out.keep == "models")
        callbacks.on_end(Run(settings=experiment.settings, summary=summary))
    more = {_CURVE: str(experiment.server.metrics.curve)} if out.keep == "curves" else {}
    return experiment.settings.values() | summary | more


def _write_run(experiment: Experiment, path: Path, callbacks: Callbacks, *, with_model: bool) -> dict[str, Any]:
    """Run an experiment to its end and write its folder, without checkpoints; return its metrics."""
    writer = RunWriter.begin(unfinished_path(path), experiment.settings, force=True)
    try:
        for record in run_to_end(experiment, None, callbacks):
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


def columns(runs: Sequence[Settings], keep: Keep) -> list[str]:
    """The columns of the table: settings first, then metrics, then curves where these are kept."""
    names = dict.fromkeys(name for settings in runs for name in settings.values())
    more: dict[str, str] = {}
    for run in runs:
        more |= score_metrics(run.metrics)
        more |= TARGET_METRICS if run.until else {}
        more |= client_metrics(run.metrics) if run.train and run.eval_clients else {}
    return [*names, *METRICS, *more, *([_CURVE] if keep == "curves" else [])]


def run_sweep(
    runs: Sequence[Settings],
    folder: Path,
    *,
    engine: Engine | None = None,
    stack: int = 1,
    keep: Keep = "records",
    force: bool = False,
    problem: Problem | None = None,
    track: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Simulate all runs, or those that are missing in the folder of this sweep, and give their rows in order.

    They are simulated in this process, or by an engine. The folder can be read at any moment. However often the sweep
    was stopped, and whatever the engine and its number of workers, the table in it ends with the same bytes. Up to
    `stack` runs at a time are trained as one. Each run is tracked by the trackers of these names.
    """
    engine = engine or LocalEngine()
    if stack < 1:
        raise SafaError(f"stack must be at least 1, not {stack}")
    if find_trackers(track) and not engine.shares_disk:
        raise SafaError("the runs of a sweep are tracked on this machine only: track needs the engine local")
    there = SweepFolder.of(folder, runs, keep)
    names = columns(runs, keep)

    def used(number: int) -> str | None:
        if number < len(finished):
            return str(finished[number][1]["trainer"])
        return there.run(number).settings.trainer if there.is_finished(number) else None

    with there.begin(force=force):
        finished = _finished(there, names)
        with _table(there.table, names, [line for line, _ in finished]) as file:
            yield from (row for _, row in finished)
            made = _with_trainers(runs, used, problem)
            job = partial(_job, folder=there, engine=engine, problem=problem, track=track)
            for row in _rows(made, there, engine, stack, len(finished), job):
                with writing(there.table):
                    append(file, csv_line([row.get(name) for name in names]))
                yield row


def _finished(folder: SweepFolder, names: Sequence[str]) -> list[tuple[bytes, dict[str, Any]]]:
    """The first runs of the plan, as many as are finished: their lines in the table, and their rows."""
    if not folder.keeps_runs:
        return [(csv_line(cells), parsed_row(names, cells)) for cells in read_rows(folder.table, names)]
    rows = (row_of(folder.run(number)) for number in itertools.takewhile(folder.is_finished, range(len(folder.varied))))
    return [(csv_line([row.get(name) for name in names]), row) for row in rows]


def _with_trainers(
    runs: Sequence[Settings], used: Callable[[int], str | None], problem: Problem | None
) -> list[Settings]:
    """The runs with their trainers named: once, so that it matters neither who makes a run nor when.

    What a finished run has `used`, by its number, goes before what a measurement says now.
    """
    left = {
        number: tuple(getattr(run, name) for name in _ALIKE)
        for number, run in enumerate(runs)
        if run.train and run.trainer == "auto"
    }
    known = {alike: kind for number, alike in left.items() if (kind := used(number)) is not None}
    for number, alike in left.items():
        if alike not in known:
            with one_thread():
                known[alike] = trainer_name(runs[number], problem)
    return [replace(run, trainer=known[left[number]]) if number in left else run for number, run in enumerate(runs)]


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


_Job = Callable[[Sequence[Settings], Sequence[int]], Callable[[], list[_Outcome]]]
"""What makes the job of a group of runs, of these settings and numbers."""


def _rows(
    runs: Sequence[Settings], folder: SweepFolder, engine: Engine, stack: int, skipped: int, job: _Job
) -> Iterator[dict[str, Any]]:
    """The rows of all runs but those that are skipped, in order; what is finished and kept is read."""
    numbers = range(skipped, len(runs))
    missing = [number for number in numbers if not folder.is_finished(number)]
    left, early = set(missing), dict[int, dict[str, Any]]()
    with contextlib.closing(_made(runs, group_runs(runs, missing, stack), folder, engine, job)) as made:
        for number in numbers:
            while number in left and number not in early:
                early |= [next(made)]
            yield early.pop(number) if number in left else row_of(folder.run(number))
        next(made, None)  # nothing is left, and it ends in the ordinary way


def _made(
    runs: Sequence[Settings],
    groups: Sequence[Sequence[int]],
    folder: SweepFolder,
    engine: Engine,
    job: _Job,
) -> Generator[tuple[int, dict[str, Any]]]:
    """The rows of runs that are simulated now, with their numbers, as they finish; those of a group as one."""
    members = {f"run {folder.run_path(group[0]).name}": group for group in groups}
    jobs = {name: job([runs[number] for number in group], group) for name, group in members.items()}
    for name, outcomes in engine.finished(jobs):
        for number, (outcome, files) in zip(members[name], outcomes, strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            if files:
                write_run(folder.run_path(number), files)
            yield number, outcome


def _job(
    runs: Sequence[Settings],
    numbers: Sequence[int],
    *,
    folder: SweepFolder,
    engine: Engine,
    problem: Problem | None,
    track: Sequence[str],
) -> Callable[[], list[_Outcome]]:
    """What simulates a group of runs."""
    if not engine.shares_disk:
        return partial(_run_elsewhere, runs, folder.keep, keeps_runs=folder.keeps_runs)
    return partial(_run_here, runs, [_out(folder, number, track) for number in numbers], problem)


def _out(folder: SweepFolder, number: int, track: Sequence[str]) -> Out:
    """What becomes of a run of a sweep on this machine."""
    path = folder.run_path(number)
    place = Place.of(folder.path).within(path.name) if track else None
    return Out(path=path if folder.keeps_runs else None, keep=folder.keep, track=track, place=place)


def _run_here(runs: Sequence[Settings], outs: Sequence[Out], problem: Problem | None) -> list[_Outcome]:
    """Simulate runs on this machine, and write their folders."""
    return [(outcome, {}) for outcome in run_stack(runs, outs, problem)]


def _run_elsewhere(runs: Sequence[Settings], keep: Keep, *, keeps_runs: bool) -> list[_Outcome]:
    """Simulate runs on a machine that may have another disk: for each its row, and the files of its folder."""
    with TemporaryDirectory(prefix="safa-run-") as place:
        paths = [Path(place, str(number)) if keeps_runs else None for number in range(len(runs))]
        outcomes = run_stack(runs, [Out(path=path, keep=keep) for path in paths])
        return [(outcome, _files_in(path)) for outcome, path in zip(outcomes, paths, strict=True)]


def _files_in(folder: Path | None) -> dict[str, bytes]:
    """All files of a folder, if it is there."""
    return {file.name: file.read_bytes() for file in folder.iterdir()} if folder and folder.exists() else {}


def sweep(
    task: str | Problem | Callable[[], Problem] | Sequence[str],
    *,
    out: str | Path | None = None,
    force: bool = False,
    preset: str | Path | None = None,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    stack: int = 1,
    keep: Keep = "records",
    track: str | Sequence[str] = (),
    **settings: Unpack[SweepOptions],
) -> Sweep:
    """Run every combination of settings, each of which may be a list of values, and return the sweep.

    `sweep("digits", protocol=["safa", "fedavg"], seed=range(5), until="accuracy=0.85")`. With `out` it is written to
    that folder, and resumed if it was stopped there; without, it is in a temporary folder that lasts as long as the
    object does. It runs in this process, or with several `workers` in processes of this machine; such a program needs
    the usual `if __name__ == "__main__":`. With the engine `ray` it runs on the Ray cluster at `address` or at
    RAY_ADDRESS, or else on a Ray that is started here; `workers` is then how many runs are made at a time at most. Up
    to `stack` runs at a time are trained as one, which pays on a GPU. `track` names trackers, one or several, which
    follow every run (`safa.trackers`).
    """
    if track and out is None:
        raise SafaError("track needs out, the folder of the sweep: trackers put their files beside it")
    own = None if isinstance(task, str | Sequence) else given_task(task)
    tasks: Sequence[str | Task] = [task] if isinstance(task, str) else task if isinstance(task, Sequence) else []
    given = {name: _listed(name, value) for name, value in settings.items()}
    runs = combinations(tasks if own is None else [own], given, preset=preset)
    here = engine == "local" and (workers or 1) == 1
    problem = own.load() if own is not None and here else None  # other processes load it by its name
    if own is not None and own.name == UNNAMED and not here:
        raise SafaError(
            "a problem that is given as an object runs with workers=1 and the engine local; "
            "name it as package.module:attribute"
        )
    chosen = make_engine(engine, runs, workers=workers, address=address)
    folder = Path(out if out is not None else mkdtemp(prefix="safa-sweep-"))
    try:
        track = [track] if isinstance(track, str) else track
        for _ in run_sweep(
            runs, folder, engine=chosen, stack=stack, keep=keep, force=force, problem=problem, track=track
        ):
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
