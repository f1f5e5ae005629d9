"""A whole run: a protocol meets a fleet, and the rounds train a model."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from safa.analysis import Metrics
from safa.errors import SafaError
from safa.fleet import check_sizes, make_fleet
from safa.protocol import registry
from safa.protocol.records import RoundRecord
from safa.runs import Run, RunWriter, load_run
from safa.runs.settings import Settings
from safa.simulation import run_rounds
from safa.tasks import UNNAMED, load_problem, problem_of, task_of

if TYPE_CHECKING:
    from torch import Tensor

    from safa.tasks.problem import Problem
    from safa.training import Trainer

__all__ = [
    "CLIENT_METRICS",
    "Experiment",
    "Learning",
    "resume",
    "resume_run",
    "run_to_end",
    "simulate",
]

_DEPLOYED = "deploy.toml"

CLIENT_METRICS: dict[str, str] = {
    "client_accuracy_mean": "mean accuracy on the clients' own data",
    "client_accuracy_spread": "its standard deviation over the clients",
    "client_accuracy_worst_decile": "its mean over the worst-served tenth",
}
"""What `eval_clients` adds to the metrics, with what each one says."""


class Experiment:
    """Runs settings to their end, round by round; what it learns can be taken out and put back at any round."""

    def __init__(self, settings: Settings, problem: Problem | None = None) -> None:
        """Everything that can be wrong is found here, before the first round."""
        self.settings = settings = _with_threads(settings)
        """Those that were given, with the number of threads that is used."""
        fleet = make_fleet(settings)
        self._records = run_rounds(settings, fleet)
        self._metrics = Metrics()
        self.finished = 0
        """Rounds that were done before this object took over."""
        self._learning = None
        self._problem = None
        if settings.train:
            self._problem = problem = problem or load_problem(settings.task)
            check_sizes(settings, fleet, len(problem.train[1]) + len(problem.test[1]))
            sizes = np.asarray(fleet.sizes, dtype=np.float64)
            from safa.training.setup import make_shards

            self._learning = Learning(settings, problem, sizes, shards=make_shards(settings, problem, sizes))

    def resume(self, finished: Iterable[RoundRecord], state: dict[str, Tensor]) -> None:
        """Go on behind rounds that were finished earlier, with what had been learnt by then."""
        for record in finished:
            self._metrics.add(record)
            self.finished += 1
        if self._learning is not None:
            self._learning.learner.restore(state)

    def rounds(self) -> Iterator[RoundRecord]:
        """The rounds that are left to do; those before are simulated again, which takes no time to speak of."""
        for record in itertools.islice(self._records, self.finished, None):
            learnt = self._learning.learner.apply(record) if self._learning else record
            self._metrics.add(learnt)
            yield learnt

    def state(self) -> dict[str, Tensor]:
        """What has been learnt so far, as named tensors."""
        return self._learning.learner.state() if self._learning else {}

    def notes(self) -> dict[str, str]:
        """What is kept with `state`, so that it is not resumed with another problem."""
        return _about(self._problem) if self._problem else {}

    def model(self) -> dict[str, Tensor] | None:
        """The latest global model, as a module's state."""
        return self._learning.model() if self._learning else None

    def summary(self) -> dict[str, Any]:
        """The metrics of the rounds so far."""
        extra = self._learning.per_client() if self._learning and self.settings.eval_clients else {}
        return self._metrics.values() | extra


def run_to_end(experiment: Experiment, writer: RunWriter | None) -> Iterator[RoundRecord]:
    """Run an experiment to its end, a record a round, and write its folder as it goes."""
    settings = experiment.settings
    try:
        for record in experiment.rounds():
            if writer is not None:
                writer.add(record)
                if settings.train and record.round % settings.checkpoint_every == 0 and record.round < settings.rounds:
                    writer.checkpoint(record.round, experiment.state(), experiment.notes())
            yield record
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
    tell: Callable[[str], object] = warnings.warn,
    how: Callable[[str], str] = lambda task: f"safa.resume(folder, {task!r})",
) -> tuple[Experiment, RunWriter]:
    """An experiment that goes on where the run in this folder was stopped.

    Nothing in the folder is changed before everything has been read and checked. `tell` is given a sentence for every
    checkpoint that could not be used.
    """
    run = load_run(folder)
    if (Path(folder) / _DEPLOYED).exists():
        raise SafaError(f"the run in {folder} is a deployment; safa deploy server (or local) --resume {folder} goes on")
    if run.summary is not None:
        raise SafaError(f"the run in {folder} came to its end; there is nothing to resume")
    there = sum(1 for _ in run.records()) if run.has_rounds() else 0
    found = run.load_checkpoint(most=there)
    if found.other_settings:
        raise SafaError(found.problems[-1])
    if there and not found.rounds:
        _check_first_round(run)
    chosen = problem_of(run.settings.task, problem, how=how) if run.settings.train else None
    if chosen and found.rounds:
        _check_problem(chosen, found.notes)
    experiment = Experiment(run.settings, chosen)
    if found.rounds:
        experiment.resume(itertools.islice(run.records(), found.rounds), found.state)
    writer = RunWriter.resume(run, found.rounds)
    from_there = f"goes on behind round {found.rounds}" if found.rounds else "starts again from its beginning"
    for sentence in found.problems:
        tell(f"{sentence}; the run {from_there}")
    return experiment, writer


def _check_first_round(run: Run) -> None:
    """Complain about rounds that would be lost if the run was begun again, because its settings give others."""
    if run.clients_at_start() == run.settings.clients:
        there, again = next(run.records()), next(run_rounds(run.settings))
        if replace(there, loss=None, accuracy=None, diverged=0).to_json() == again.to_json():
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


def resume(folder: str | Path, problem: str | Problem | None = None) -> Run:
    """Go on with the run in a folder where it was stopped, to its end, and return it.

    It comes to the same bytes as if it had never been stopped. `problem` is needed where the task of the run is not
    built in: the problem itself, or its name as `package.module:attribute`.
    """
    experiment, writer = resume_run(folder, problem)
    for _ in run_to_end(experiment, writer):
        pass
    return load_run(folder)


def simulate(
    task: str | Problem,
    *,
    out: str | Path | None = None,
    force: bool = False,
    preset: str | None = None,
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


class Learning:
    """The learning side of a run: a learner, what it trains with and what it is judged by.

    It computes with as many threads as the settings say; where they say 0, with as many as torch has.
    """

    def __init__(
        self,
        settings: Settings,
        problem: Problem,
        sizes: NDArray[np.float64],
        *,
        shards: Sequence[NDArray[np.int64]] = (),
        trainer: Trainer | None = None,
    ) -> None:
        """`sizes` are n_k of the clients at the start. They train on `shards`, or by a `trainer` of another kind."""
        import torch

        from safa.server.learner import Learner
        from safa.training import Evaluator, torch_threads
        from safa.training.setup import find_device, trainer_of

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
        device = find_device(settings.device)
        self._threads = settings.threads
        with torch_threads(settings.threads):
            if trainer is None:
                trainer = trainer_of(settings, problem, shards, device)
            module = problem.start_model(settings.seed)
            self._shards = shards
            self._layout = trainer.layout
            self._evaluator = Evaluator(problem, device=device)
            self.learner = Learner(
                trainer,
                self._evaluator,
                self._layout.row(dict(module.named_parameters()) | dict(module.named_buffers())).to(device),
                sizes,
                rule=registry.find(settings.protocol).rule,
                epochs=settings.epochs,
                eval_every=settings.eval_every,
                keep_best=settings.keep_best,
                warm_start=settings.warm_start,
                memory_mb=settings.memory_mb,
                threads=settings.threads,
            )

    def model(self) -> dict[str, Tensor]:
        """The latest global model, as a module's state."""
        return {name: tensor.contiguous().cpu() for name, tensor in self._layout.state(self.learner.model).items()}

    def per_client(self) -> dict[str, float]:
        """How the last model serves the clients: mean, spread, and the mean of the worst tenth."""
        from safa.training import torch_threads

        with torch_threads(self._threads):
            accuracies = np.sort(self._evaluator.per_client(self.learner.model, self._shards))
        worst = accuracies[: max(1, len(accuracies) // 10)]
        values = float(accuracies.mean()), float(accuracies.std()), float(worst.mean())
        return dict(zip(CLIENT_METRICS, values, strict=True))
