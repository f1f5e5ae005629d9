"""`lr = auto`: a learning rate that learns, found by a short test before the first round.

First a single model makes a few steps from w(0) on a sample of all clients' data, with every learning rate of a grid.
What suits one model on all data may be too high for models that are trained apart and averaged. So the learning rates
around the best one are then tried by a small federation: a few clients train on data of their own, their models are
averaged, and that is repeated a few times. The one with the lowest loss in the end, on a sample of all clients'
training data, is taken. The test set is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.runs.settings import Settings
from safa.streams import stream
from safa.tasks.problem import Problem
from safa.training.evaluation import Evaluator
from safa.training.setup import find_device, trainer_of
from safa.training.threads import torch_threads

__all__ = ["RangeTest", "find_learning_rate"]

_GRID = [10 ** (half / 2) for half in range(-10, 3)]
_CLIENTS, _ROUNDS, _STEPS, _SAMPLES = 12, 4, 20, 2000
_AROUND = (-2, -1, 0, 1)  # places of the grid, seen from the best of the first part, that go into the second


@dataclass(frozen=True)
class RangeTest:
    """What came out of a range test."""

    lr: float
    before: float
    """The loss of w(0)."""
    after: float
    """The lowest loss that was reached, with `lr`."""

    @property
    def words(self) -> str:
        """The outcome in a sentence."""
        found = f"learning rate {self.lr:.3g}, found by a range test"
        if self.after < self.before:
            return f"{found} in which the training loss fell from {self.before:.3g} to {self.after:.3g}"
        return f"{found} in which none from {_GRID[0]:g} to {_GRID[-1]:g} made the training loss fall"


def find_learning_rate(settings: Settings, problem: Problem, shards: Sequence[NDArray[np.int64]]) -> RangeTest:
    """A learning rate for the clients of a run with these settings, who hold these shards."""
    rng = stream(settings.seed, "range test")
    members = [shards[k] for k in np.sort(rng.permutation(len(shards))[:_CLIENTS])]
    sample = rng.permutation(np.concatenate(list(shards)))[: max(_SAMPLES, _STEPS * settings.batch_size)]
    with torch_threads(settings.threads):
        federation = _Federation(settings, problem, [sample[: _STEPS * settings.batch_size], *members])
        losses = federation.losses(sample[:_SAMPLES])
        pooled = {lr: losses(federation.alone(lr)) for lr in _GRID}
        best = _GRID.index(min(pooled, key=lambda lr: pooled[lr]))
        near = [_GRID[best + step] for step in _AROUND if 0 <= best + step < len(_GRID)]
        found = {lr: losses(federation.rounds(lr)) for lr in near}
        lr = min(found, key=lambda lr: found[lr])
        return RangeTest(lr, losses(federation.start), found[lr])


class _Federation:
    """A few clients whose models are averaged after every round; the first shard is not theirs, but a pool of all."""

    def __init__(self, settings: Settings, problem: Problem, shards: Sequence[NDArray[np.int64]]) -> None:
        self._problem, self._device = problem, find_device(settings.device)
        self._trainer = trainer_of(replace(settings, lr=_GRID[0]), problem, shards, self._device)
        sizes = np.array([len(shard) for shard in shards])
        self._weights = torch.from_numpy(sizes[1:] / sizes[1:].sum())
        full = settings.local_steps or settings.epochs * -(-sizes // settings.batch_size)
        self._steps = np.minimum(full, _STEPS)
        module = problem.start_model(settings.seed)
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        self.start = self._trainer.layout.row(state).to(self._device)

    def losses(self, sample: NDArray[np.int64]) -> Callable[[Tensor], float]:
        """The loss of a model on some of the training samples; what is no number counts as infinite."""
        inputs, targets = (part[torch.from_numpy(sample)] for part in self._problem.train)
        evaluator = Evaluator(replace(self._problem, test=(inputs, targets), metrics={}), device=self._device)

        def loss(row: Tensor) -> float:
            value = evaluator.evaluate(row).loss
            return value if math.isfinite(value) else math.inf

        return loss

    def alone(self, lr: float) -> Tensor:
        """What a single client makes of w(0) that has samples of all."""
        return self._train(np.zeros(1, dtype=np.int64), self.start, lr)[0]

    def rounds(self, lr: float) -> Tensor:
        """What the clients make of w(0) together."""
        row = self.start
        for _ in range(_ROUNDS):
            rows = self._train(np.arange(1, len(self._steps)), row, lr)
            row = self._weights.to(rows) @ rows
        return row

    def _train(self, clients: NDArray[np.int64], row: Tensor, lr: float) -> Tensor:
        rates, start = np.full(len(clients), lr), row.repeat(len(clients), 1)
        return self._trainer.train(clients, start, steps=np.maximum(1, self._steps[clients]), lr=rates)
