"""Clients side by side on the cores of a machine, in processes: none waits for the Python of another."""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.errors import SafaError
from safa.tasks.problem import Problem
from safa.training.batches import Ids, Shards
from safa.training.channels_last import takes_channels_last
from safa.training.forked import Forked, GoneError
from safa.training.threaded import RowTrainer
from safa.training.threads import torch_threads
from safa.training.trainer import LocalTrainer, Work

__all__ = ["ProcessesTrainer", "can_fork", "is_beside_grpc"]


def can_fork(device: torch.device) -> bool:
    """Whether there can be such a trainer at all: where torch sees a GPU, its autograd does not survive a fork."""
    return sys.platform == "linux" and device.type == "cpu" and not torch.cuda.is_available()


def is_beside_grpc() -> bool:
    """Whether gRPC may be at work in this process, alone or under Ray: its threads do not survive a fork."""
    return "grpc" in sys.modules or "ray" in sys.modules


class ProcessesTrainer(LocalTrainer):
    """As many processes as torch has threads, each with one. The updates are those of the threads, to the last bit.

    The processes are forked when they are needed first: they have the problem and the samples without being sent them.
    """

    def __init__(
        self, problem: Problem, shards: Shards, *, device: torch.device, memory_mb: float = 1024.0, **how: Any
    ) -> None:
        """`how` is what a serial trainer is made with; rows that are on their way take `memory_mb` at most."""
        if not can_fork(device):
            raise SafaError("the trainer processes needs Linux, the device cpu and no GPU in sight; try --trainer auto")
        self._trainer = RowTrainer(problem, shards, channels_last=takes_channels_last(problem), device=device, **how)
        self.layout, self._batches = self._trainer.layout, self._trainer._batches
        self._most = max(1, min(torch.get_num_threads(), len(shards)))
        size = (self.layout.size + self.layout.trained) * self.layout.dtype.itemsize
        fits = int(memory_mb * 2**20 / (size * self._most))
        self._part = max(1, min(fits, -(-len(shards) // self._most)))  # clients that a worker is given at a time
        self._workers: list[_Worker] = []

    def _train(self, work: Work, start: Tensor) -> Tensor:
        updates = torch.empty_like(start)
        try:
            with torch_threads(1):
                self._start_workers(work, start)
                self._share_out(work, start, updates)
        except BaseException:
            for worker in self._workers:
                worker.process.end()
            self._workers.clear()
            raise
        return updates

    def _start_workers(self, work: Work, start: Tensor) -> None:
        """Have as many as can be of use, all of them children of this process."""
        self._workers = [worker for worker in self._workers if worker.process.owner == os.getpid()]
        if len(start) and not self._workers:
            self._warm_up(work, start)
        while len(self._workers) < min(self._most, len(start)):
            self._workers.append(_Worker(self._trainer, self._part))

    def _warm_up(self, work: Work, start: Tensor) -> None:
        """Make a step of a client here: what torch loads or prepares when it is first used, no worker has to."""
        k = int(work.steps.argmax())
        with torch.random.fork_rng(devices=[]):
            self._trainer.train_one(start[k], replace(work[k : k + 1], steps=np.minimum(work.steps[k : k + 1], 1)))

    def _share_out(self, work: Work, start: Tensor, updates: Tensor) -> None:
        """Give every worker that is free the next clients, until all are trained; those of one that is lost, again."""
        job = _Job(work, start)
        left = deque(_parts(work.steps, len(self._workers), self._part))
        free, busy = list(self._workers), dict[Any, tuple[_Worker, Ids]]()
        lost: set[int] = set()
        while left or busy:
            while left and free:
                worker, part = free.pop(), left.popleft()
                worker.begin(job, part)
                busy[worker.process.pipe] = worker, part
            for pipe in wait(list(busy)):
                worker, part = busy.pop(pipe)
                try:
                    worker.finish(updates, part)
                    free.append(worker)
                except GoneError:
                    free.append(self._replaced(worker, work.clients[part], is_again=part[0] in lost))
                    left.appendleft(part)
                    lost.add(part[0])

    def _replaced(self, worker: _Worker, clients: Ids, *, is_again: bool) -> _Worker:
        """A new worker in the place of one that is gone, unless that happens with the same clients again."""
        how = worker.process.end()
        if is_again:
            words = signal.Signals(-how).name if how < 0 else f"exit code {how}"
            raise SafaError(
                f"a process that trained client {', '.join(map(str, clients[:5]))} ended twice ({words}); "
                "is there enough memory?"
            )
        new = _Worker(self._trainer, self._part)
        self._workers[self._workers.index(worker)] = new
        return new


class _Job:
    """Clients that are to be trained, with what each is told, as it is sent to a worker."""

    def __init__(self, work: Work, start: Tensor) -> None:
        self.start, self.correction = start, work.correction
        seeds = torch.randint(2**62, (len(start),)).numpy()  # for models that draw random numbers
        self.numbers = np.stack([work.clients, work.steps, work.bases, seeds])
        self.lr = None if work.lr is None else work.lr.double().numpy()


class _Worker:
    """A process that trains clients, and the memory that it shares with its parent."""

    def __init__(self, trainer: RowTrainer, count: int) -> None:
        """For so many clients at a time."""
        layout = trainer.layout
        self._rows, self._correction = (_shared(count, width, layout.dtype) for width in (layout.size, layout.trained))
        self.process = Forked(partial(_train_part, trainer, self._rows, self._correction, os.getpid()))

    def begin(self, job: _Job, part: Ids) -> None:
        """Let it train these clients of a job."""
        for place, k in enumerate(part.tolist()):
            self._rows[place] = job.start[k]
            if job.correction is not None:
                self._correction[place] = job.correction[k]
        lr = None if job.lr is None else job.lr[part]
        self.process.call(job.numbers[:, part], lr, job.correction is not None)

    def finish(self, updates: Tensor, part: Ids) -> None:
        """Wait for it, and put what it has made into the rows of these clients."""
        self.process.wait()
        for place, k in enumerate(part.tolist()):
            updates[k] = self._rows[place]


def _train_part(
    trainer: RowTrainer, rows: Tensor, correction: Tensor, parent: int,
    numbers: Ids, lr: NDArray[np.float64] | None, is_corrected: bool,
) -> None:  # fmt: skip
    """Turn the start models in the first rows into updates; in the child."""
    torch.set_num_threads(1)
    trainer.is_halted = lambda: os.getppid() != parent
    clients, steps, bases, seeds = numbers
    rates = None if lr is None else torch.from_numpy(lr).to(rows.dtype)
    work = Work(clients, steps, 0, bases, rates, correction if is_corrected else None)
    for place, seed in enumerate(seeds.tolist()):
        torch.default_generator.manual_seed(seed)
        rows[place] = trainer.train_one(rows[place], work[place : place + 1])


def _shared(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows that children see, too."""
    return torch.frombuffer(mmap.mmap(-1, count * width * dtype.itemsize), dtype=dtype).view(count, width)


def _parts(steps: Ids, workers: int, most: int) -> Iterator[Ids]:
    """Who is trained by one worker, of clients with so many steps: the longest first, and ever fewer at a time."""
    order = np.argsort(-steps, kind="stable")
    done = np.cumsum(steps[order] + 1)
    begin = 0
    while begin < len(order):
        before = done[begin - 1] if begin else 0
        share = before + (done[-1] - before) / (2 * workers)
        end = min(begin + most, int(np.searchsorted(done, share)) + 1)
        yield order[begin:end]
        begin = end
