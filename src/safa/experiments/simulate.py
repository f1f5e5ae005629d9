"""A whole run: a fleet drives a server through its rounds, and a model is trained."""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError
from safa.experiments.callbacks import NO_CALLBACKS, Callback, Callbacks
from safa.fleet import Fleet, check_sizes, client_speeds, make_fleet
from safa.protocol import Protocol, build
from safa.protocol.records import RoundRecord
from safa.runs import Checkpoint, Run, RunWriter, Settings, load_run
from safa.runs.options import SettingsOptions
from safa.runs.schedule import check_given
from safa.server import Server
from safa.server.resume import find_checkpoint
from safa.simulation import drive, run_rounds
from safa.tasks import TASKS, given_task, load_problem, problem_of
from safa.trackers import Tracker, find_trackers, track_folder

if TYPE_CHECKING:
    from torch import Tensor

    from safa.server.setup import Learning
    from safa.tasks.problem import Problem
    from safa.training.setup import TrainerOf

__all__ = [
    "Experiment",
    "fleet_of",
    "resume",
    "resume_run",
    "run_to_end",
    "simulate",
    "trainer_name",
    "with_learning_rate",
]

_DEPLOYED = "deploy.toml"


class Experiment:
    """Runs settings to their end, round by round, and can resume at a checkpoint."""

    def __init__(self, settings: Settings, problem: Problem | None = None, trainer_of: TrainerOf | None = None) -> None:
        """Everything that can be wrong is found here, before the first round.

        `trainer_of` makes the trainer; without, it is the one that the settings ask for.
        """
        self.settings = settings = _with_threads(settings)
        """Those that were given, with the number of threads, the trainer and the learning rate that are used."""
        self._fleet = fleet_of(settings, problem)
        self._learning: Learning | None = None
        notes: dict[str, str] = {}
        protocol = build(settings.protocol, self._fleet.sizes, settings.values(), settings.protocol_options)
        self.trainer_words = self.learning_rate_words = ""
        """How the trainer was chosen and the learning rate was found, where that was asked for."""
        if settings.train:
            problem = problem or load_problem(settings.task)
            settings = replace(settings, metrics=problem.directions)
            shards = _shards(settings, problem, self._fleet)
            settings, self.trainer_words = _with_trainer(settings, problem, shards)
            self.settings, self.learning_rate_words = with_learning_rate(settings, problem, shards)
            settings = self.settings
            self._learning = _learning(settings, problem, protocol, shards, trainer_of)
            notes = _about(problem)
        self.server = Server(
            protocol,
            seed=settings.seed,
            rounds=settings.rounds,
            learner=self._learning.learner if self._learning else None,
            checkpoint_every=settings.checkpoint_every,
            directions=settings.metrics,
            target=settings.target,
            notes=lambda: notes,
            repeats=True,
        )
        self._records = drive(self.server, self._fleet, settings)

    @property
    def caution(self) -> str:
        """What somebody who uses these settings has to know; empty as a rule."""
        return self._learning.aggregator.caution if self._learning else ""

    @property
    def doubt(self) -> str:
        """What speaks against the learning rate of a problem that is not built in: a loss that did not fall."""
        losses = [score["loss"] for score in self.server.metrics.scores]
        alone = len(losses) == 1 and math.isfinite(losses[0])
        if self.settings.task in TASKS or not losses or alone or losses[-1] < losses[0]:
            return ""
        advice = f"the learning rate, {self.settings.lr}, may be wrong, and lr = auto finds one"
        return (
            f"the loss on the test set did not fall: it was {losses[0]:.4g} when it was first evaluated and is "
            f"{losses[-1]:.4g} now; {self.learning_rate_words or advice}"
        )

    def resume(self, run: Run, checkpoint: Checkpoint) -> None:
        """Resume after the rounds of a checkpoint."""
        self.server.resume(run, checkpoint)

    def rounds(self) -> Iterator[RoundRecord]:
        """The rounds that are left to do; those before are simulated again, which takes no time to speak of."""
        while not self.is_over and (record := next(self._records, None)) is not None:
            if record.round > self.server.finished:
                yield record

    @property
    def is_over(self) -> bool:
        """Whether the target of the run has been held."""
        return self.server.metrics.target_held

    def model(self) -> dict[str, Tensor] | None:
        """The latest global model, as a module's state."""
        return self._learning.model() if self._learning else None

    def summary(self) -> dict[str, Any]:
        """The metrics of the rounds so far."""
        extra = self._learning.per_client() if self._learning and self.settings.eval_clients else {}
        return self.server.metrics.values() | extra


def fleet_of(settings: Settings, problem: Problem | None = None) -> Fleet:
    """The fleet of a run. Data are read only where the partition decides how much clients hold."""
    if not settings.decides_sizes:
        return make_fleet(settings)
    from safa.training.setup import own_sizes

    return make_fleet(settings, own_sizes(settings, problem or load_problem(settings.task), client_speeds(settings)))


Shards = Sequence[NDArray[np.int64]]


def _shards(settings: Settings, problem: Problem, fleet: Fleet) -> Shards:
    """Which training samples each client holds."""
    from safa.training.setup import make_shards

    check_sizes(settings, fleet, len(problem.train[1]) + len(problem.test[1]))
    return make_shards(settings, problem, np.asarray(fleet.sizes, dtype=np.float64), fleet.speeds)


def _with_trainer(settings: Settings, problem: Problem, shards: Shards) -> tuple[Settings, str]:
    """Settings that name a trainer, and how it was chosen, where it had to be measured."""
    from safa.training.auto import with_trainer

    return with_trainer(settings, problem, shards)


def trainer_name(settings: Settings, problem: Problem | None = None) -> str:
    """The trainer that a run with these settings takes."""
    settings, problem = _with_threads(settings), problem or load_problem(settings.task)
    return _with_trainer(settings, problem, _shards(settings, problem, fleet_of(settings, problem)))[0].trainer


def with_learning_rate(
    settings: Settings, problem: Problem | None = None, shards: Shards | None = None
) -> tuple[Settings, str]:
    """Settings with a learning rate that is a number, and how it was found, where a range test had to find it."""
    if settings.lr != "auto" or not settings.train:
        return settings, ""
    from safa.training.range_test import find_learning_rate

    problem = problem or load_problem(settings.task)
    held = _shards(settings, problem, fleet_of(settings, problem)) if shards is None else shards
    found = find_learning_rate(_with_trainer(settings, problem, held)[0], problem, held)
    return replace(settings, lr=found.lr), found.words


def _learning(
    settings: Settings, problem: Problem, protocol: Protocol, shards: Shards, trainer_of: TrainerOf | None
) -> Learning:
    """What the server of a simulation learns with: clients that hold their shards of the data."""
    from safa.server.setup import Learning
    from safa.training import setup

    return Learning(settings, problem, protocol, shards=shards, trainer_of=trainer_of or setup.trainer_of)


def run_to_end(
    experiment: Experiment,
    writer: RunWriter | None,
    callbacks: Callbacks = NO_CALLBACKS,
    last: RoundRecord | None = None,
) -> Iterator[RoundRecord]:
    """Run an experiment to its end, a record a round, and write its folder as it goes.

    `last` is the round after which it is resumed: the callbacks see it once more.
    """
    experiment.server.writer = writer
    try:
        stopped = last is not None and callbacks.on_round(last, experiment.server)
        for record in () if stopped else experiment.rounds():
            stopped = callbacks.on_round(record, experiment.server)
            yield record
            if stopped or experiment.is_over:
                break
    except BaseException:
        if writer is not None:
            writer.close()
        raise
    if writer is not None:
        writer.close(experiment.summary(), experiment.model())


def resume_run(
    folder: str | Path,
    problem: str | Problem | Callable[[], Problem] | None = None,
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
    needed = run.settings.train or run.settings.decides_sizes
    chosen = problem_of(run.settings.task, problem, how=how) if needed else None
    if run.has_rounds() and not found.rounds:
        _check_first_round(run, chosen)
    check_given(run.settings.schedule, schedule)
    if chosen and found.rounds:
        _check_problem(chosen, found.notes)
    experiment = Experiment(run.settings, chosen)
    if found.rounds:
        experiment.resume(run, found)
    writer = RunWriter.resume(run, found.rounds)
    for sentence in found.problems:
        tell(f"{sentence}; {f'resuming after round {found.rounds}' if found.rounds else 'starting again from round 1'}")
    return experiment, writer


def _check_first_round(run: Run, problem: Problem | None) -> None:
    """Complain about rounds that would be lost if the run was begun again, because its settings give others."""
    there = next(run.records(), None)
    if there is None:
        return
    if run.clients_at_start() == run.settings.clients:
        again = next(run_rounds(run.settings, fleet_of(run.settings, problem)))
        if replace(there, loss=None, metrics={}, diverged=0).to_json() == again.to_json():
            return
    raise SafaError(f"the rounds in {run.folder} were not made with the settings there; begin a new run instead")


def _about(problem: Problem) -> dict[str, str]:
    """What a problem's data and model look like: sizes, types and names, not the numbers, and who holds what."""
    data = {
        name: [f"{list(tensor.shape)} of {tensor.dtype}" for tensor in part]
        for name, part in (("train", problem.train), ("test", problem.test))
    }
    model = {name: list(tensor.shape) for name, tensor in problem.start_model(0).state_dict().items()}
    held = [] if problem.shards is None else [np.array([len(shard), *shard]) for shard in problem.shards]
    owners = {"shards": str(zlib.crc32(np.concatenate(held).tobytes()))} if held else {}
    return {"data": json.dumps(data), "model": json.dumps(model), **owners}


def _check_problem(problem: Problem, notes: Mapping[str, str]) -> None:
    """Complain about a problem that is not the one a checkpoint was made with, as far as that shows."""
    for name, value in _about(problem).items():
        there = notes.get(name, "")
        if value != there:
            words = {"model": "its model has other parameters", "shards": "its clients hold other samples"}
            what = words.get(name, f"its {name} are {value}, not {there}")
            raise SafaError(f"this is not the problem that the run was begun with: {what}")


def resume(
    folder: str | Path,
    problem: str | Problem | Callable[[], Problem] | None = None,
    *,
    schedule: str | Callable[[int], float] | None = None,
    callbacks: Sequence[Callback] = (),
    track: str | Sequence[str | Tracker] = (),
) -> Run:
    """Resume the run in a folder where it was stopped, run it to its end, and return it.

    It comes to the same bytes as if it had never been stopped. `problem` is needed where the task of the run is not
    built in: the problem itself, a function that makes it, or its name as `package.module:attribute`. `schedule` is
    needed where the schedule of the run is a function: that function, or the schedule as text. `callbacks` and `track`
    are as for `simulate`; a tracker continues the run that it has of this folder.
    """
    told, trackers = Callbacks(callbacks, load_run(folder).settings), find_trackers(track)
    experiment, writer = resume_run(folder, problem, schedule=schedule)
    last = _last_round(folder, experiment) if callbacks else None
    with track_folder(trackers, Path(folder)) as tracking:
        told = told.also(tracking)
        for _ in run_to_end(experiment, writer, told, last):
            pass
        return _ended(experiment, load_run(folder), told)


def _last_round(folder: str | Path, experiment: Experiment) -> RoundRecord | None:
    """The round after which a run is resumed; None where it begins again."""
    finished = experiment.server.finished
    return next(islice(load_run(folder).records(), finished - 1, None)) if finished else None


def _ended(experiment: Experiment, run: Run, callbacks: Callbacks) -> Run:
    """A run that is finished, after everybody was told."""
    if experiment.doubt:
        warnings.warn(experiment.doubt, stacklevel=3)
    callbacks.on_end(run)
    return run


def simulate(
    task: str | Problem | Callable[[], Problem],
    *,
    out: str | Path | None = None,
    force: bool = False,
    preset: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    track: str | Sequence[str | Tracker] = (),
    **settings: Unpack[SettingsOptions],
) -> Run:
    """Run a protocol on a task, on a problem of your own, or on one that a function of yours makes; return the run.

    Settings are those of the command line, by name: `simulate("boston", protocol="fedavg", fraction=0.3, seed=1)`. With
    `out` the run is written to that folder, too. `callbacks` are called after every round and at the end; see
    `safa.experiments.callbacks`. `track` names trackers (`safa.trackers`), whose files go beside the folder `out`.
    """
    trackers = find_trackers(track)
    if trackers and out is None:
        raise SafaError("track needs out, the folder of the run: trackers put their files beside it")
    named = given_task(task)
    chosen = Settings.of(named, preset=preset, **settings)
    experiment = Experiment(chosen, None if isinstance(task, str) else named.load())
    chosen = experiment.settings
    told = Callbacks(callbacks, chosen)
    writer = RunWriter.begin(Path(out), chosen, force=force) if out is not None else None
    folder = Path(out) if out is not None else None
    with track_folder(trackers, folder) as tracking:
        told = told.also(tracking)
        records = list(run_to_end(experiment, writer, told))
        summary, model = experiment.summary(), experiment.model()
        run = Run(settings=chosen, summary=summary, folder=folder, held_records=records, held_model=model)
        return _ended(experiment, run, told)


def _with_threads(settings: Settings) -> Settings:
    """Settings that name the number of torch's threads, on which the last bits of a model depend."""
    if settings.threads or not settings.train:
        return settings
    import torch

    return replace(settings, threads=torch.get_num_threads())
