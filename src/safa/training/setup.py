"""What a run trains with, from its settings: the clients' samples, their optimiser, the trainer and the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from safa.errors import SafaError
from safa.runs.settings import Settings
from safa.streams import stream
from safa.tasks import Samples, partition
from safa.tasks.problem import Problem
from safa.training.optimiser import Optimiser
from safa.training.trainer import Trainer, make_trainer

__all__ = ["find_device", "make_optimiser", "make_shards", "own_sizes", "trainer_of"]


def make_shards(settings: Settings, problem: Problem, sizes: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """For every client, which training samples are its own."""
    inputs, targets = (tensor.numpy() for tensor in problem.train)
    samples = Samples(targets=targets, sizes=sizes, columns=problem.columns, inputs=inputs, shards=problem.shards)
    return partition(settings.partition, samples, stream(settings.seed, "partition"))


def own_sizes(settings: Settings, problem: Problem) -> NDArray[np.float64] | None:
    """How many training samples every client holds, where the partition decides that; None: the fleet draws it."""
    if not settings.decides_sizes:
        return None
    shards = make_shards(settings, problem, np.ones(settings.clients))
    return np.array([len(shard) for shard in shards], dtype=np.float64)


def make_optimiser(settings: Settings) -> Optimiser:
    """The clients' optimiser."""
    return Optimiser(
        kind=settings.optimiser,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        proximal=settings.proximal,
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
    )


def find_device(name: str) -> torch.device:
    """Where to train, if that is to be had here."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError):
        raise SafaError(f"there is no device {name!r} here that torch can use; try --device cpu") from None
