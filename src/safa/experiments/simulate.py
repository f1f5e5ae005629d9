"""A whole run: a fleet drives a server through its rounds, and a model is trained."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from safa.analysis import Metrics
from safa.errors import SafaError
from safa.fleet import Fleet, check_sizes, make_fleet
from safa.protocol import Protocol, build
from safa.protocol.records import RoundRecord
from safa.runs import Checkpoint, Run, RunWriter, Settings, load_run
from safa.runs.schedule import check_given
from safa.server import Server
from safa.server.resume import find_checkpoint
from safa.simulation import drive, run_rounds
from safa.tasks import UNNAMED, load_problem, problem_of, task_of

if TYPE_CHECKING:
    from torch import Tensor

    from safa.server.setup import Learning
    from safa.tasks.problem import Problem

__all__ = ["Experiment", "resume", "resume_run", "run_to_end", "simulate"]

_DEPLOYED = "deploy.toml"


class Experiment:
    """Runs settings to their end, round by round, and can resume at a checkpoint."""

    def __init__(self, settings: Settings, problem: Problem | None = None) -> None:
        """Everything that can be wrong is found here, before the first round."""
        self.settings = settings = _with_threads(settings)
        """Those that were given, with the number of threads that is used."""
        self._fleet = make_fleet(settings)
        self._learning: Learning | None = None
        self._notes: dict[str, str] = {}
        protocol = build(settings.protocol, self._fleet.sizes, settings.values(), settings.protocol_options)
        if settings.train:
            problem = problem or load_problem(settings.task)
            self.settings = settings = replace(settings, metrics=problem.directions)
            self._learning, self._notes = _learning(settings, problem, self._fleet, protocol), _about(problem)
        self.server = Server(
            protocol,
            seed=settings.seed,
            rounds=settings.rounds,
            learner=self._learning.learner if self._learning else None,
            checkpoint_every=settings.checkpoint_every,
            metrics=Metrics(settings.metrics, settings.target),
            notes=lambda: self._notes,
            repeats=True,
        )
        self._records = drive(self.server, self._fleet, settings)

    @property
    def caution(self) -> str:
        """What somebody who uses these settings has to know; empty as a rule."""
        return self._learning.aggregator.caution if self._learning else ""

    def resume(self, run: Run, checkpoint: Checkpoint) -> None:
        """Resume after the rounds of a checkpoint."""
        self.server.resume(run, checkpoint)

    def rounds(self) -> Iterator[RoundRecord]:
        """The rounds that are left to do; those before are simulated again, which takes no time to speak of."""
        if not self.is_over:
            yield from (record for record in self._records if record.round > self.server.finished)

    @property
    def is_over(self) -> bool:
        """Whether the target of the run has been held."""
        reached = self.server.metrics.reached
        return reached is not None and reached.held

    def model(self) -> dict[str, Tensor] | None:
        """The latest global model, as a module's state."""
        return self._learning.model() if self._learning else None

    def summary(self) -> dict[str, Any]:
        """The metrics of the rounds so far."""
        extra = self._learning.per_client() if self._learning and self.settings.eval_clients else {}
        return self.server.metrics.values() | extra


def _learning(settings: Settings, problem: Problem, fleet: Fleet, protocol: Protocol) -> Learning:
    """What the server of a simulation learns with: clients that hold their shards of the data."""
    from safa.server.setup import Learning
    from safa.training.setup import make_shards

    check_sizes(settings, fleet, len(problem.train[1]) + len(problem.test[1]))
    shards = make_shards(settings, problem, np.asarray(fleet.sizes, dtype=np.float64))
    return Learning(settings, problem, protocol, shards=shards)


def run_to_end(experiment: Experiment, writer: RunWriter | None) -> Iterator[RoundRecord]:
    """Run an experiment to its end, a record a round, and write its folder as it goes."""
    experiment.server.writer = writer
    try:
        for record in experiment.rounds():
            yield record
            if experiment.is_over:
                break
    except BaseException:
        if writer is not None:
            writer.close()
        raise
    if writer is not None:
        writer.close(experiment.summary(), experiment.model())


def resume_run(
    folder: str | Path,
    problem: str | Problem | None = None,
    *,
    schedule: str | Callable[[int], float] | None = None,
    tell: Callable[[str], object] = warnings.warn,
    how: Callable[[str], str] = lambda task: f"safa.resume(folder, {task!r})",
) -> tuple[Experiment, RunWriter]:
    """An experiment that continues where the run in this folder was stopped.

    Nothing in the folder is changed before everything has been read and checked. A schedule that is a function of
    one's own must be given again, as a task that is not built in. `tell` is given a sentence for every
    checkpoint that could not be used.
    """
    run = load_run(folder)
    if (Path(folder) / _DEPLOYED).exists():
        raise SafaError(
            f"the run in {folder} is a deployment; resume it with safa deploy server (or local) --resume {folder}"
        )
    found = find_checkpoint(run)
    if run.has_rounds() and not found.rounds:
        _check_first_round(run)
    check_given(run.settings.schedule, schedule)
    chosen = problem_of(run.settings.task, problem, how=how) if run.settings.train else None
    if chosen and found.rounds:
        _check_problem(chosen, found.notes)
    experiment = Experiment(run.settings, chosen)
    if found.rounds:
        experiment.resume(run, found)
    writer = RunWriter.resume(run, found.rounds)
    for sentence in found.problems:
        tell(f"{sentence}; {f'resuming after round {found.rounds}' if found.rounds else 'starting again from round 1'}")
    return experiment, writer


def _check_first_round(run: Run) -> None:
    """Complain about rounds that would be lost if the run was begun again, because its settings give others."""
    there = next(run.records(), None)
    if there is None:
        return
    if run.clients_at_start() == run.settings.clients:
        again = next(run_rounds(run.settings))
        if replace(there, loss=None, metrics={}, diverged=0).to_json() == again.to_json():
            return
    raise SafaError(f"the rounds in {run.folder} were not made with the settings there; begin a new run instead")


def _about(problem: Problem) -> dict[str, str]:
    """What a problem's data and model look like: sizes, types and names, not the numbers."""
    data = {
        name: [f"{list(tensor.shape)} of {tensor.dtype}" for tensor in part]
        for name, part in (("train", problem.train), ("test", problem.test))
    }
    model = {name: list(tensor.shape) for name, tensor in problem.start_model(0).state_dict().items()}
    return {"data": json.dumps(data), "model": json.dumps(model)}


def _check_problem(problem: Problem, notes: Mapping[str, str]) -> None:
    """Complain about a problem that is not the one a checkpoint was made with, as far as that shows."""
    for name, value in _about(problem).items():
        there = notes.get(name, "")
        if value != there:
            what = f"its {name} are {value}, not {there}" if name == "data" else "its model has other parameters"
            raise SafaError(f"this is not the problem that the run was begun with: {what}")


def resume(
    folder: str | Path,
    problem: str | Problem | None = None,
    *,
    schedule: str | Callable[[int], float] | None = None,
) -> Run:
    """Resume the run in a folder where it was stopped, run it to its end, and return it.

    It comes to the same bytes as if it had never been stopped. `problem` is needed where the task of the run is not
    built in: the problem itself, or its name as `package.module:attribute`. `schedule` is needed where the schedule of
    the run is a function: that function, or the schedule as text.
    """
    experiment, writer = resume_run(folder, problem, schedule=schedule)
    for _ in run_to_end(experiment, writer):
        pass
    return load_run(folder)


def simulate(
    task: str | Problem,
    *,
    out: str | Path | None = None,
    force: bool = False,
    preset: str | Path | None = None,
    **settings: Any,
) -> Run:
    """Run a protocol on a task, or on a problem of your own, and return the run.

    Settings are those of the command line, by name: `simulate("boston", protocol="fedavg", fraction=0.3, seed=1)`. With
    `out` the run is written to that folder, too.
    """
    problem = None if isinstance(task, str) else task
    named = task if isinstance(task, str) else task_of(task, UNNAMED)
    chosen = Settings.of(named, preset=preset, **settings)
    experiment = Experiment(chosen, problem)
    chosen = experiment.settings
    writer = RunWriter.begin(Path(out), chosen, force=force) if out is not None else None
    records = list(run_to_end(experiment, writer))
    return Run(
        settings=chosen,
        summary=experiment.summary(),
        folder=Path(out) if out is not None else None,
        held_records=records,
        held_model=experiment.model(),
    )


def _with_threads(settings: Settings) -> Settings:
    """Settings that name the number of torch's threads, on which the last bits of a model depend."""
    if settings.threads or not settings.train:
        return settings
    import torch

    return replace(settings, threads=torch.get_num_threads())
