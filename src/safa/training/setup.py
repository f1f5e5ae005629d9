"""What a run trains with, from its settings: the clients' samples, their optimiser, the trainer and the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from safa.errors import SafaError
from safa.runs.schedule import Schedule
from safa.runs.settings import Settings
from safa.streams import stream
from safa.tasks.partition import partition
from safa.tasks.problem import Problem
from safa.tasks.references import load_reference
from safa.training.local import LocalTraining
from safa.training.optimiser import Optimiser
from safa.training.trainer import Trainer, make_trainer

__all__ = ["find_device", "local_training", "make_optimiser", "make_schedule", "make_shards", "trainer_of"]


def make_shards(settings: Settings, problem: Problem, sizes: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """For every client, which training samples are its own."""
    return partition(settings.partition, problem.train[1].numpy(), sizes, stream(settings.seed, "partition"))


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


def trainer_of(
    settings: Settings, problem: Problem, shards: Sequence[NDArray[np.int64]], device: torch.device
) -> Trainer:
    """The trainer that the settings ask for."""
    return make_trainer(
        settings.trainer,
        problem,
        shards,
        batch_size=settings.batch_size,
        optimiser=make_optimiser(settings),
        device=device,
        memory_mb=settings.memory_mb,
        shuffle=settings.shuffle,
        seed=settings.seed,
    )


def make_schedule(settings: Settings) -> Schedule:
    """The learning rate by round; functions of one's own are imported."""
    return Schedule.parse(settings.schedule).with_functions(load_reference)


def local_training(
    settings: Settings,
    problem: Problem,
    shards: Sequence[NDArray[np.int64]],
    device: torch.device,
    *,
    own_models: bool,
) -> LocalTraining:
    """The updates of simulated clients, who start from models of their own or from versions of the global model."""
    return LocalTraining(
        trainer_of(settings, problem, shards, device),
        epochs=settings.epochs,
        local_steps=settings.local_steps,
        batches=np.array([-(-len(shard) // settings.batch_size) for shard in shards]),
        lr=settings.learning_rate,
        schedule=make_schedule(settings),
        rounds=settings.rounds,
        own_models=own_models,
    )


def find_device(name: str) -> torch.device:
    """Where to train, if that is to be had here."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError):
        raise SafaError(f"there is no device {name!r} here that torch can use; try --device cpu") from None
