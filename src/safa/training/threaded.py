"""Clients side by side on the cores of a machine, one torch thread each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor

from safa.tasks.problem import Problem
from safa.training.batches import Shards
from safa.training.channels_last import filters, shaped, takes_channels_last
from safa.training.optimiser import RowOptimiser
from safa.training.serial import SerialTrainer
from safa.training.threads import side_by_side
from safa.training.trainer import LocalTrainer, Work

__all__ = ["RowTrainer", "ThreadsTrainer"]


class ThreadsTrainer(LocalTrainer):
    """As many clients at a time as torch has threads, each trained by one; the results do not depend on how many."""

    def __init__(self, problem: Problem, shards: Shards, **how: Any) -> None:
        """`how` is what a serial trainer is made with."""
        count = max(1, min(torch.get_num_threads(), len(shards)))
        self._halted = Event()
        channels_last = takes_channels_last(problem)
        self._workers = [
            RowTrainer(problem, shards, is_halted=self._halted.is_set, channels_last=channels_last, **how)
            for _ in range(count)
        ]
        self.layout, self._batches = self._workers[0].layout, self._workers[0]._batches

    def _train(self, work: Work, start: Tensor) -> Tensor:
        updates = torch.empty_like(start)

        def one(worker: RowTrainer, k: int) -> None:
            updates[k] = worker.train_one(start[k], work[k : k + 1])

        self._halted.clear()
        longest_first = np.argsort(-work.steps, kind="stable").tolist()
        side_by_side(self._workers[: max(1, len(start))], longest_first, one, self._halted.set)
        return updates


class RowTrainer(SerialTrainer):
    """Trains like its base class, with little for Python to do in a step: while it does, other threads wait.

    The parameters of the module are parts of one tensor, which a step moves as a whole. The filters of convolutions lie
    with their channels innermost where the model takes that, which is faster.
    """

    def __init__(
        self,
        problem: Problem,
        shards: Shards,
        *,
        is_halted: Callable[[], bool] = lambda: False,
        channels_last: bool = False,
        **how: Any,
    ) -> None:
        super().__init__(problem, shards, **how)
        self.is_halted = is_halted
        """Asked before every step; once it is so, training ends in the middle."""
        self._parameters: list[Tensor] = list(self._module.parameters())
        self._innermost = set(map(id, filters(self._module))) if channels_last else set()
        self._is_usual = {(p.dtype, p.requires_grad) for p in self._parameters} == {(self.layout.dtype, True)}
        if self._is_usual:
            self._row, self._gradient = (self._parameters[0].new_empty(1, self.layout.trained) for _ in range(2))
            self._gradients = self._places(self._gradient)
            for parameter, place in zip(self._parameters, self._places(self._row), strict=True):
                parameter.data = place

    def _places(self, row: Tensor) -> list[Tensor]:
        """Where the parameters lie in a tensor [1, trained numbers]."""
        parts = row[0].split([p.numel() for p in self._parameters])
        return [shaped(part, p, id(p) in self._innermost) for part, p in zip(parts, self._parameters, strict=True)]

    def train_one(self, row: Tensor, work: Work) -> Tensor:
        """The update of one client; where a parameter has no gradient, by its base class from the start."""
        if not (self._is_usual and self._train_row(row, work)):
            return super().train_one(row, work)
        return self._state()

    def _train_row(self, row: Tensor, work: Work) -> bool:
        """Train the module from this row; whether every parameter had a gradient in every step."""
        self.layout.load(self._module, row)
        correction = None if work.correction is None else self._reordered(work.correction)
        optimiser = RowOptimiser(self._optimiser, self._row, lr=work.lr, correction=correction)
        is_plain = self._optimiser.is_plain and work.lr is None and correction is None
        for samples in self._batches.of(int(work.clients[0]), int(work.bases[0]), int(work.steps[0])):
            if self.is_halted():
                raise CancelledError
            found = torch.autograd.grad(self._loss(samples), self._parameters, allow_unused=True)
            if any(part is None for part in found):
                return False
            with torch.no_grad():
                if is_plain:
                    torch._foreach_add_(self._parameters, found, alpha=-self._optimiser.lr)
                else:
                    torch._foreach_copy_(self._gradients, found)
                    optimiser.step(self._row, self._gradient)
        return True

    def _reordered(self, values: Tensor) -> Tensor:
        """Numbers in the order of a row [1, trained], in the order in which the parameters lie in memory."""
        parts = values[0].split([p.numel() for p in self._parameters])
        found = torch.empty_like(values)
        for place, part in zip(self._places(found), parts, strict=True):
            place.copy_(part.view(place.shape))
        return found
