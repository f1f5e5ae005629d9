"""One device: it joins a run, and trains when it is asked to. Knows nothing of how messages are transported.

**It may be switched off at any moment.** The training in progress stands in one file of its folder,
`state.safetensors`: the base model, the model so far, and the state of the optimiser. A device that is started again
and gets the same request resumes from there, and its update is the same to the last bit. A finished request is answered
again without any training. Two requests are the same if the digests of their base models and their shares of the
local work are, and where samples are shuffled or the learning rate changes, their versions and rounds, too.

**What the server decides.** The settings are the server's. Which code is imported and which data are read is decided on
the device: without a task of its own it accepts the built-in tasks alone.

torch is loaded only where it is needed, because Flower handles every message in a new process.
"""

from __future__ import annotations

import json
import time
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from safa.deploy.exchange.codec import decode, delta, encode, spec_of
from safa.deploy.exchange.messages import Failure, JoinReply, JoinRequest, ModelMissing, TrainRequest, Update, digest_of
from safa.deploy.exchange.screening import Rejected
from safa.errors import SafaError
from safa.fleet import client_speeds, make_fleet
from safa.runs.schedule import Schedule
from safa.runs.settings import Settings
from safa.runs.storage import read_sealed, write_sealed
from safa.tasks import TASKS, load_problem

if TYPE_CHECKING:
    from torch import Tensor

    from safa.tasks.problem import Problem
    from safa.training import Attempt, Layout

__all__ = ["FILE", "Device", "check_schedule"]

FILE = "state.safetensors"
"""The training in progress, in the folder of a device."""


@dataclass(kw_only=True)
class _Job:
    """A request that was accepted: enough to resume it, or to answer it again."""

    deployment: str
    version: int
    digest: str
    """That of the model to start from."""
    round: int
    """By which the learning rate goes."""
    work: float
    """The share of the full local work."""
    base: Tensor
    """The model to start from, as a row."""
    training: dict[str, Tensor] = field(default_factory=dict)
    """`Attempt.state()`; empty before the training has begun."""
    seconds: float = 0.0
    """How long it has been worked on."""
    finished: bool = False


class Device:
    """One device, with a name and a folder of its own. No two processes may work for it at a time."""

    def __init__(
        self,
        name: str,
        state: Path,
        *,
        task: str | None = None,
        partition: int | None = None,
        pause_s: float = 0.0,
        save_every_s: float = 1.0,
    ) -> None:
        """`task` is the only one that it will train, and may be one's own; without, any that is built in.

        Its data are the part `partition` of the task's, as a simulation deals them; without, all that the task has.
        `pause_s` makes it slow: so many seconds are added to every request, spread over its epochs. While it trains,
        its state is written after an epoch if it was not in the last `save_every_s` seconds.
        """
        self.name, self._path = name, state / FILE
        self._task, self._partition = task, partition
        self._pause_s, self._save_every_s = pause_s, save_every_s

    def join(self, request: JoinRequest) -> JoinReply | Failure:
        """Reply with its name and the size of its data."""
        try:
            settings = self._settings(request.config)
            size = len(self._shard(settings, load_problem(settings.task)))
        except SafaError as error:
            return Failure(why=str(error))
        details = {} if self._partition is None else {"partition": self._partition}
        return JoinReply(name=self.name, size=float(size), details=details)

    def train(self, request: TrainRequest) -> Update | ModelMissing | Failure:
        """Train as requested, from where it was interrupted, or answer again what is finished."""
        from safa.training import Layout

        try:
            settings = self._settings(request.config)
            problem = load_problem(settings.task)
            layout = Layout(problem.start_model(settings.seed))
            job = self._job(request, layout, settings)
            if job is None:
                return ModelMissing(attempt=request.attempt)
            if not job.finished:
                self._train(job, request, settings, problem)
            return _update(request, job, layout)
        except SafaError as error:
            return Failure(why=str(error))

    # -- settings of the server, and data of the device ------------------------------------------------------------

    def _settings(self, config: str) -> Settings:
        """The server's settings, if this device can take part in such a run."""
        try:
            settings = Settings(**tomllib.loads(config))
        except TypeError:
            raise SafaError("the server's settings are not those of this version of safa") from None
        except (ValueError, OverflowError) as error:
            raise SafaError(f"the server's settings cannot be used here: {error}") from None
        if self._task is not None and settings.task != self._task:
            raise SafaError(f"this device is for the task {self._task!r}, but the server's is {settings.task!r}")
        if self._task is None and settings.task not in list(TASKS):
            raise SafaError(f"the server's task {settings.task!r} is not built in: it must be named on the device, too")
        if self._partition is not None and not 0 <= self._partition < settings.clients:
            there_are = f"there are {settings.clients}, counted from 0"
            raise SafaError(f"this device is for partition {self._partition} of the data, but {there_are}")
        check_schedule(settings)
        return settings

    def _shard(self, settings: Settings, problem: Problem) -> NDArray[np.int64]:
        """Which of the task's training samples are its own."""
        if self._partition is None:
            return np.arange(len(problem.train[0]))
        from safa.training.setup import make_shards

        sizes = np.ones(settings.clients) if settings.decides_sizes else _sizes(settings)
        speeds = None if isinstance(settings.speeds, str) else client_speeds(settings)  # no file that a server names
        return make_shards(settings, problem, sizes, speeds)[self._partition]

    def _job(self, request: TrainRequest, layout: Layout, settings: Settings) -> _Job | None:
        """The job that it holds, or a new one; None where it lacks the base model."""
        held = _read(self._path, layout)
        if held is not None and held.deployment != request.deployment:
            held = None
        if held is not None and held.digest == request.digest:
            if _is_same(held, request, settings):
                return held
            base = held.base
        elif held is not None and request.own and _result_digest(held, layout) == request.digest:
            base = held.training["row"]
        elif request.model is not None:
            base = _received(request, layout)
        else:
            return None
        return _Job(
            deployment=request.deployment,
            version=request.version,
            digest=request.digest,
            round=request.round,
            work=request.work,
            base=base,
        )

    # -- training ----------------------------------------------------------------------------------------------------

    def _train(self, job: _Job, request: TrainRequest, settings: Settings, problem: Problem) -> None:
        """Train to the end, from wherever the job stands."""
        attempt = _attempt(job, request, settings, problem, self._shard(settings, problem))
        began = time.monotonic() - job.seconds
        saved = self._save(job, attempt, began)
        while attempt.done < attempt.epochs:
            time.sleep(self._pause_s / attempt.epochs)
            attempt.epoch()
            if attempt.done < attempt.epochs and time.monotonic() - saved >= self._save_every_s:
                saved = self._save(job, attempt, began)
        job.finished = True
        self._save(job, attempt, began)

    def _save(self, job: _Job, attempt: Attempt, began: float) -> float:
        """Write down how far a job has come, and return the time when that was."""
        job.training = attempt.state()
        job.seconds = time.monotonic() - began
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write(self._path, job)
        except OSError as error:
            raise SafaError(f"the device cannot write {self._path}: {error.strerror}") from None
        return time.monotonic()


def _sizes(settings: Settings) -> NDArray[np.float64]:
    """How much data the clients of a simulation hold relative to each other; no other file of the world is needed."""
    try:
        fleet = make_fleet(replace(settings, speeds=None, links=None, trace=None))
    except SafaError:
        if not isinstance(settings.sizes, str):
            raise
        # The server must not learn what is in the file: it could name any.
        raise SafaError(f"the device has no file of sizes {settings.sizes} that it could use") from None
    return np.asarray(fleet.sizes, dtype=np.float64)


def _is_same(job: _Job, request: TrainRequest, settings: Settings) -> bool:
    """Whether a job from the same base model comes to the update that is asked for."""
    only_the_model_counts = not settings.shuffle and settings.schedule == "constant"
    same_time = (job.version, job.round) == (request.version, request.round)
    return job.work == request.work and (only_the_model_counts or same_time)


def check_schedule(settings: Settings) -> None:
    """Refuse a schedule that is a function of somebody's own: a device imports nothing that a server names."""
    functions = Schedule.parse(settings.schedule).functions
    if functions:
        raise SafaError(f"a schedule of your own cannot be deployed: devices do not import {functions[0]}")


def _attempt(
    job: _Job, request: TrainRequest, settings: Settings, problem: Problem, shard: NDArray[np.int64]
) -> Attempt:
    """The training of a job where it stands; the state of another optimiser is discarded."""
    import torch

    from safa.training.setup import make_attempt

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
    attempt = make_attempt(
        settings,
        problem,
        shard,
        job.base,
        client=request.client,
        base=job.version,
        round_=job.round,
        work=job.work,
        own_models=request.own,
    )
    if job.training:
        try:
            attempt.restore(job.training)
        except SafaError:
            job.seconds = 0.0
    return attempt


# -- models ----------------------------------------------------------------------------------------------------------


def _received(request: TrainRequest, layout: Layout) -> Tensor:
    """The model that came with an request, as a row."""
    import torch

    assert request.model is not None
    tensors = decode(request.model, spec_of(_tensors(layout, torch.zeros(layout.size, dtype=layout.dtype))))
    if isinstance(tensors, Rejected):
        raise SafaError(f"the server's model does not fit this task: {tensors.why}")
    if digest_of(tensors) != request.digest:
        raise SafaError(f"the server's model of version {request.version} is not the one that its digest names")
    return layout.row({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})


def _update(request: TrainRequest, job: _Job, layout: Layout) -> Update:
    """The reply to a finished request."""
    tensors = _tensors(layout, job.training["row"])
    if request.codec != "float32":
        tensors = delta(tensors, _tensors(layout, job.base))
    encoded = encode(tensors, request.codec)
    return Update(attempt=request.attempt, version=request.version, seconds=job.seconds, encoded=encoded)


def _result_digest(job: _Job, layout: Layout) -> str | None:
    return digest_of(_tensors(layout, job.training["row"])) if job.finished else None


def _tensors(layout: Layout, row: Tensor) -> dict[str, NDArray[Any]]:
    """A row as the tensors of a model."""
    return {name: tensor.numpy() for name, tensor in layout.state(row).items()}


# -- the file --------------------------------------------------------------------------------------------------------

_HEAD = ("deployment", "version", "digest", "round", "work", "seconds", "finished")


def _write(path: Path, job: _Job) -> None:
    tensors = {"base": job.base} | {f"attempt.{name}": tensor for name, tensor in job.training.items()}
    write_sealed(path, tensors, {"head": json.dumps({name: getattr(job, name) for name in _HEAD})})


def _read(path: Path, layout: Layout) -> _Job | None:
    """The job that a file holds; None where there is none, where it is damaged or of another model."""
    try:
        notes, tensors = read_sealed(path)
        training = {name.removeprefix("attempt."): tensor for name, tensor in tensors.items() if name != "base"}
        job = _Job(**json.loads(notes["head"]), base=tensors["base"], training=training)
        rows = job.base, training["row"]
    except (KeyError, TypeError, ValueError):  # a SafaError is a ValueError
        return None
    return job if all(row.shape == (layout.size,) and row.dtype == layout.dtype for row in rows) else None
