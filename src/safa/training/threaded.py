"""Clients side by side on the cores of a machine, one torch thread each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from safa.tasks.problem import Problem
from safa.training.batches import Shards
from safa.training.serial import SerialTrainer
from safa.training.threads import torch_threads
from safa.training.trainer import LocalTrainer, Work

__all__ = ["ThreadsTrainer"]


class ThreadsTrainer(LocalTrainer):
    """As many clients at a time as torch has threads, each trained like the serial trainer trains it, by one thread."""

    def __init__(self, problem: Problem, shards: Shards, **how: Any) -> None:
        """`how` is what a serial trainer is made with."""
        count = max(1, min(torch.get_num_threads(), len(shards)))
        self._trainers: SimpleQueue[SerialTrainer] = SimpleQueue()
        made = [SerialTrainer(problem, shards, **how) for _ in range(count)]
        for trainer in made:
            self._trainers.put(trainer)
        self._pool = ThreadPoolExecutor(count, "safa-trainer")
        self.layout, self._batches = made[0].layout, made[0]._batches

    def _train(self, work: Work, start: Tensor) -> Tensor:
        updates = torch.empty_like(start)

        def one(k: int) -> None:
            trainer = self._trainers.get()
            try:
                updates[k] = trainer._train(work[k : k + 1], start[k : k + 1])[0]
            finally:
                self._trainers.put(trainer)

        with torch_threads(1):
            for _ in self._pool.map(one, range(len(start))):
                pass
        return updates
