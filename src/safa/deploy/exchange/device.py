"""One device: it says who it is, and trains when it is told to. Knows nothing of how letters travel.

**It may be switched off at any moment.** What it is at work on stands in one file of its folder, `state.safetensors`:
the model that it started from, the model so far, and what the optimiser remembers. A device that comes back and gets
the same order again goes on where it was, and its update is the same to the last bit. Once it has finished, the same
order is answered without any work. Whether an order is the same, the digest of its start model decides.

**Whose word counts.** The settings are the server's. What is imported and which data are read is for the device to say:
without a word from its owner it knows the built-in tasks alone.

torch is loaded only where it is needed, because Flower handles every letter in a new process.
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

from safa.deploy.exchange.codec import change, like, pack, unpack
from safa.deploy.exchange.messages import Failure, Introduction, Invitation, Missing, Order, Update, digest_of
from safa.deploy.exchange.screening import Refused
from safa.errors import SafaError
from safa.fleet import make_fleet
from safa.runs.settings import Settings
from safa.runs.storage import read_sealed, write_sealed
from safa.tasks import TASKS, load_problem

if TYPE_CHECKING:
    from torch import Tensor

    from safa.tasks.problem import Problem
    from safa.training import Attempt, Layout

__all__ = ["FILE", "Device"]

FILE = "state.safetensors"
"""Where a device keeps what it is at work on, in its folder."""


@dataclass(kw_only=True)
class _Job:
    """An order that was taken: enough to go on with it, or to answer it once more."""

    deployment: str
    version: int
    digest: str
    """That of the model to start from."""
    base: Tensor
    """The model to start from, as a row."""
    training: dict[str, Tensor] = field(default_factory=dict)
    """What `Attempt.state` says; empty before it was begun."""
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
        `pause_s` makes it slow: so many seconds are added to every order, spread over its epochs. While it trains, its
        state is written after an epoch if it was not in the last `save_every_s` seconds.
        """
        self.name, self._path = name, state / FILE
        self._task, self._partition = task, partition
        self._pause_s, self._save_every_s = pause_s, save_every_s

    def introduce(self, invitation: Invitation) -> Introduction | Failure:
        """Say who it is and how much data it has."""
        try:
            settings = self._settings(invitation.config)
            size = len(self._shard(settings, load_problem(settings.task)))
        except SafaError as wrong:
            return Failure(why=str(wrong))
        details = {} if self._partition is None else {"partition": self._partition}
        return Introduction(name=self.name, size=float(size), details=details)

    def work(self, order: Order) -> Update | Missing | Failure:
        """Train as ordered, or go on with it, or answer once more what was finished."""
        from safa.training import Layout

        try:
            settings = self._settings(order.config)
            problem = load_problem(settings.task)
            layout = Layout(problem.start_model(settings.seed))
            job = self._job(order, layout)
            if job is None:
                return Missing(attempt=order.attempt)
            if not job.finished:
                self._train(job, settings, problem)
            return _update(order, job, layout)
        except SafaError as wrong:
            return Failure(why=str(wrong))

    # -- what the server says, and what is the device's own ----------------------------------------------------------

    def _settings(self, config: str) -> Settings:
        """The server's settings, if this device can take part in such a run."""
        try:
            settings = Settings(**tomllib.loads(config))
        except TypeError:
            raise SafaError("the server's settings are not those of this version of safa") from None
        except (ValueError, OverflowError) as problem:
            raise SafaError(f"the server's settings cannot be used here: {problem}") from None
        if self._task is not None and settings.task != self._task:
            raise SafaError(f"this device is for the task {self._task!r}, but the server's is {settings.task!r}")
        if self._task is None and settings.task not in list(TASKS):
            raise SafaError(f"the server's task {settings.task!r} is not built in: it must be named on the device, too")
        if self._partition is not None and not 0 <= self._partition < settings.clients:
            there_are = f"there are {settings.clients}, counted from 0"
            raise SafaError(f"this device is for partition {self._partition} of the data, but {there_are}")
        return settings

    def _shard(self, settings: Settings, problem: Problem) -> NDArray[np.int64]:
        """Which of the task's training samples are its own."""
        if self._partition is None:
            return np.arange(len(problem.train[0]))
        from safa.training.setup import make_shards

        return make_shards(settings, problem, _sizes(settings))[self._partition]

    def _job(self, order: Order, layout: Layout) -> _Job | None:
        """What is to be done: the job that it holds, or a new one; None where it lacks the model to start from."""
        held = _read(self._path, layout)
        if held is not None and held.deployment != order.deployment:
            held = None
        if held is not None and held.digest == order.digest:
            return held
        if held is not None and order.own and _result_digest(held, layout) == order.digest:
            base = held.training["row"]
        elif order.model is not None:
            base = _received(order, layout)
        else:
            return None
        return _Job(deployment=order.deployment, version=order.version, digest=order.digest, base=base)

    # -- training ----------------------------------------------------------------------------------------------------

    def _train(self, job: _Job, settings: Settings, problem: Problem) -> None:
        """Train to the end, from wherever the job stands."""
        attempt = _attempt(job, settings, problem, self._shard(settings, problem))
        began = time.monotonic() - job.seconds
        saved = self._save(job, attempt, began)
        while attempt.done < settings.epochs:
            time.sleep(self._pause_s / settings.epochs)
            attempt.epoch()
            if attempt.done < settings.epochs and time.monotonic() - saved >= self._save_every_s:
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
        except OSError as problem:
            raise SafaError(f"the device cannot write {self._path}: {problem.strerror}") from None
        return time.monotonic()


def _sizes(settings: Settings) -> NDArray[np.float64]:
    """How much data the clients of a simulation hold relative to each other; no other file of the world is needed."""
    try:
        fleet = make_fleet(replace(settings, speeds=None, links=None, trace=None))
    except SafaError:
        if settings.sizes is None:
            raise
        # What is in the file is not for the server to know: it could name any.
        raise SafaError(f"the device has no file of sizes {settings.sizes} that it could use") from None
    return np.asarray(fleet.sizes, dtype=np.float64)


def _attempt(job: _Job, settings: Settings, problem: Problem, shard: NDArray[np.int64]) -> Attempt:
    """The training of a job where it stands; what another optimiser left is begun anew."""
    import torch

    from safa.training import Attempt, BatchedTrainer
    from safa.training.setup import find_device, make_optimiser

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
    device = find_device(settings.device)
    trainer = BatchedTrainer(
        problem, [shard], batch_size=settings.batch_size, optimiser=make_optimiser(settings), device=device
    )
    attempt = Attempt(trainer, job.base.to(device))
    if job.training:
        try:
            attempt.restore(job.training)
        except SafaError:
            job.seconds = 0.0
    return attempt


# -- models ----------------------------------------------------------------------------------------------------------


def _received(order: Order, layout: Layout) -> Tensor:
    """The model that came with an order, as a row."""
    import torch

    assert order.model is not None
    tensors = unpack(order.model, like(_tensors(layout, torch.zeros(layout.size, dtype=layout.dtype))))
    if isinstance(tensors, Refused):
        raise SafaError(f"the server's model is not one of this task: {tensors.why}")
    if digest_of(tensors) != order.digest:
        raise SafaError(f"the server's model of version {order.version} is not the one that its digest names")
    return layout.row({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})


def _update(order: Order, job: _Job, layout: Layout) -> Update:
    """The answer to an order that is finished."""
    tensors = _tensors(layout, job.training["row"])
    if order.wire != "float32":
        tensors = change(tensors, _tensors(layout, job.base))
    parcel = pack(tensors, order.wire)
    return Update(attempt=order.attempt, version=order.version, seconds=job.seconds, parcel=parcel)


def _result_digest(job: _Job, layout: Layout) -> str | None:
    return digest_of(_tensors(layout, job.training["row"])) if job.finished else None


def _tensors(layout: Layout, row: Tensor) -> dict[str, NDArray[Any]]:
    """A row as the tensors of a model."""
    return {name: tensor.numpy() for name, tensor in layout.state(row).items()}


# -- the file --------------------------------------------------------------------------------------------------------

_HEAD = ("deployment", "version", "digest", "seconds", "finished")


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
