"""What a run trains with, from its settings: the clients' samples, their optimiser, the trainer and the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.errors import SafaError
from safa.runs.schedule import Schedule
from safa.runs.settings import Settings
from safa.streams import stream
from safa.tasks import Samples, partition
from safa.tasks.problem import Problem
from safa.tasks.references import load_reference
from safa.training.attempt import Attempt
from safa.training.batched import BatchedTrainer
from safa.training.batches import Shards
from safa.training.local import LocalTraining
from safa.training.on_ray import RayTrainer
from safa.training.optimiser import Optimiser
from safa.training.processes import ProcessesTrainer, is_beside_grpc
from safa.training.serial import SerialTrainer
from safa.training.stacked import StackedTrainer
from safa.training.threaded import ThreadsTrainer
from safa.training.trainer import Trainer

__all__ = [
    "TrainerOf",
    "find_device",
    "local_training",
    "make_attempt",
    "make_optimiser",
    "make_schedule",
    "make_shards",
    "make_trainer",
    "memory_for",
    "own_sizes",
    "stacked_trainer",
    "trainer_of",
]


TrainerOf = Callable[[Settings, Problem, Shards, torch.device], Trainer]
"""Makes the trainer of a run."""


def make_shards(
    settings: Settings, problem: Problem, sizes: NDArray[np.float64], speeds: NDArray[np.float64] | None = None
) -> list[NDArray[np.int64]]:
    """For every client, which training samples are its own; `sizes` count where the partition does not decide them."""
    inputs, targets = problem.train
    sizes = np.ones(settings.clients) if settings.decides_sizes else sizes
    samples = Samples(
        targets=targets.numpy(),
        sizes=sizes,
        columns=problem.columns,
        inputs=inputs,
        shards=problem.shards,
        speeds=speeds,
    )
    return partition(settings.partition, samples, stream(settings.seed, "partition"))


def own_sizes(settings: Settings, problem: Problem, speeds: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """How many training samples every client holds, where the partition decides that."""
    shards = make_shards(settings, problem, np.ones(settings.clients), speeds)
    return np.array([len(shard) for shard in shards], dtype=np.float64)


def make_optimiser(settings: Settings) -> Optimiser:
    """The clients' optimiser."""
    return Optimiser(
        kind=settings.optimiser,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        proximal=settings.proximal,
        clip=settings.clip,
    )


def make_trainer(
    kind: str,
    problem: Problem,
    shards: Shards,
    *,
    batch_size: int,
    optimiser: Optimiser,
    device: torch.device,
    memory_mb: float = 1024.0,
    shuffle: bool = False,
    seed: int = 0,
    compile_: bool = False,
) -> Trainer:
    """The trainer of that name, which is not `auto`."""
    common: dict[str, Any] = {"batch_size": batch_size, "optimiser": optimiser, "device": device}
    common |= {"shuffle": shuffle, "seed": seed}
    if kind == "serial":
        return SerialTrainer(problem, shards, **common)
    if kind == "threads" or (kind == "processes" and is_beside_grpc()):  # they come to the same bytes
        return ThreadsTrainer(problem, shards, **common)
    if kind == "processes":
        return ProcessesTrainer(problem, shards, memory_mb=memory_mb, **common)
    if kind == "ray":
        return RayTrainer(problem, shards, memory_mb=memory_mb, **common)
    return BatchedTrainer(problem, shards, memory_mb=memory_mb, compile_=compile_, **common)


def trainer_of(settings: Settings, problem: Problem, shards: Shards, device: torch.device) -> Trainer:
    """The trainer that the settings ask for."""
    return make_trainer(
        settings.trainer,
        problem,
        shards,
        batch_size=settings.batch_size,
        optimiser=make_optimiser(settings),
        device=device,
        memory_mb=memory_for(settings, device),
        shuffle=settings.shuffle,
        seed=settings.seed,
        compile_=settings.compile,
    )


def stacked_trainer(settings: Settings, problem: Problem) -> StackedTrainer:
    """A trainer for several runs that have these settings in common, seed and learning rate excepted."""
    device = find_device(settings.device)
    return StackedTrainer(
        problem,
        make_optimiser(settings),
        batch_size=settings.batch_size,
        device=device,
        memory_mb=memory_for(settings, device),
        shuffle=settings.shuffle,
        compile_=settings.compile,
    )


def make_schedule(settings: Settings) -> Schedule:
    """The learning rate by round; functions of one's own are imported, and tried for every round of the run."""
    schedule = Schedule.parse(settings.schedule)
    if not schedule.functions:
        return schedule
    found = schedule.with_functions(load_reference)
    found.factor(np.arange(1, settings.rounds + 1), settings.rounds)
    return found


def local_training(
    settings: Settings,
    problem: Problem,
    shards: Shards,
    device: torch.device,
    *,
    own_models: bool,
    trainer_of: TrainerOf = trainer_of,
) -> LocalTraining:
    """The updates of simulated clients, who start from models of their own or from versions of the global model."""
    trainer = trainer_of(settings, problem, shards, device)
    return _local_training(settings, trainer, shards, own_models=own_models)


def _local_training(settings: Settings, trainer: Trainer, shards: Shards, *, own_models: bool) -> LocalTraining:
    return LocalTraining(
        trainer,
        epochs=settings.epochs,
        local_steps=settings.local_steps,
        batches=np.array([-(-len(shard) // settings.batch_size) for shard in shards]),
        lr=settings.learning_rate,
        schedule=make_schedule(settings),
        rounds=settings.rounds,
        own_models=own_models,
    )


def make_attempt(
    settings: Settings,
    problem: Problem,
    shard: NDArray[np.int64],
    start: Tensor,
    *,
    client: int,
    base: int,
    round_: int,
    work: float = 1.0,
    own_models: bool = False,
) -> Attempt:
    """One client's training, to be done in pieces: the update that a simulation makes of this version and round."""
    device = find_device(settings.device)
    trainer = BatchedTrainer(
        problem,
        [shard],
        batch_size=settings.batch_size,
        optimiser=make_optimiser(settings),
        device=device,
        shuffle=settings.shuffle,
        seed=settings.seed,
        first_client=client,
        alone=True,
    )
    training = _local_training(settings, trainer, [shard], own_models=own_models)
    amount = training.amount(np.zeros(1, np.int64), np.array([base]), np.array([round_]), np.array([work]))
    steps, lr, bases = amount["steps"], amount["lr"], amount["bases"]
    assert bases is not None
    return Attempt(
        trainer,
        start.to(device),
        epochs=amount["epochs"],
        steps=None if steps is None else int(steps[0]),
        lr=None if lr is None else float(lr[0]),
        base=int(bases[0]),
    )


def memory_for(settings: Settings, device: torch.device) -> float:
    """How much memory models and updates may take there."""
    if settings.memory_mb:
        return settings.memory_mb
    return torch.cuda.get_device_properties(device).total_memory / 2**22 if device.type == "cuda" else 4096.0


def find_device(name: str) -> torch.device:
    """Where to train, if that is to be had here."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError):
        raise SafaError(f"there is no device {name!r} here that torch can use; try --device cpu") from None
