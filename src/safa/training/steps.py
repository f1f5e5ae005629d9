"""The mini-batches of many clients, step by step: laid out once for whole epochs, or gathered when their turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.tasks.problem import Problem
from safa.training.batches import Batches, Ids, Shards
from safa.training.kernels import Kernel, Step
from safa.training.trainer import Work

__all__ = ["Band", "Gathered", "lay_out_steps", "part_by_size"]


class Gathered:
    """The mini-batches of clients step by step: at each step of those who make that many."""

    def __init__(self, batches: Batches, work: Work, width: int, *, whole_batches: bool) -> None:
        """Whoever makes most steps comes first. With `whole_batches`, all clients have as many samples."""
        self._batches, self._work, self._width, self._whole = batches, work, width, whole_batches
        self._lengths, self._per_epoch = batches.lengths[work.clients], batches.per_epoch(work.clients)
        self._orders = np.zeros((len(work.clients), int(self._lengths.max())), dtype=np.int64)  # in the epoch of each
        self.steps = int(work.steps[0])
        """How many steps there are."""

    def part(self, first: int, count: int) -> Iterator[tuple[Ids, NDArray[np.float64]]]:
        """So many steps, fewer at the end: which samples are in the clients' mini-batches, and their weights.

        The first one must begin an epoch of every client.
        """
        return map(self._step, range(first, min(first + count, self.steps)))

    def _step(self, number: int) -> tuple[Ids, NDArray[np.float64]]:
        at_work = int(np.searchsorted(-self._work.steps, -number))
        epochs, places = np.divmod(number, self._per_epoch[:at_work])
        for k in np.flatnonzero(places == 0).tolist():
            order = self._batches.order(int(self._work.clients[k]), int(self._work.bases[k]), int(epochs[k]))
            self._orders[k, : len(order)] = order
        starts, lengths = places[:, None] * self._width, self._lengths[:at_work, None]
        sizes = np.minimum(self._width, lengths - starts)
        offsets = np.arange(int(sizes[0, 0]) if self._whole else self._width)
        samples = np.take_along_axis(self._orders[:at_work], np.minimum(starts + offsets, lengths - 1), axis=1)
        return samples, (offsets < sizes) / sizes


@dataclass(frozen=True, eq=False)
class Band:
    """Clients with batches of about the same size, and their mini-batches."""

    first: int
    """The place of the first of them among all clients, who are in order of their number of samples."""
    lengths: NDArray[np.int64]
    batch_size: int
    most: int
    """How many of them are trained at a time."""
    lay_out: Callable[[], list[Step]]
    join: Callable[[list[Step]], tuple[Tensor, Tensor] | None]

    @cached_property
    def steps(self) -> list[Step]:
        """The mini-batches of an epoch, step by step, laid out when they are first needed."""
        return self.lay_out()

    @cached_property
    def epoch(self) -> tuple[Tensor, Tensor] | None:
        """What an epoch amounts to, where it is affine."""
        return self.join(self.steps)

    def holds(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these places are of this band."""
        return (places >= self.first) & (places < self.first + len(self.lengths))

    def steps_of(self, places: NDArray[np.int64], device: torch.device, *, whole_batches: bool) -> list[Step]:
        """The mini-batches of these clients, step by step: at each step only those who have that many."""
        mine = places - self.first
        lengths = self.lengths[mine]
        steps = self.steps[: -(-lengths[0] // self.batch_size)]
        if len(mine) < len(self.lengths):
            index = torch.from_numpy(mine).to(device)
            counts = [int(np.searchsorted(-lengths, -start)) for start in range(0, lengths[0], self.batch_size)]
            steps = [
                (x[index[:count]], y[index[:count]], weight[index[:count]])
                for count, (x, y, weight) in zip(counts, steps, strict=True)
            ]
        if whole_batches:
            sizes = [lengths[0] - start for start in range(0, lengths[0], self.batch_size)]
            steps = [(x[:, :n], y[:, :n], weight[:, :n]) for n, (x, y, weight) in zip(sizes, steps, strict=True)]
        return steps


_MOST_PADDING = 4  # a client's batch is padded to at most so many times its size, unless it is the last of several


def part_by_size(batches: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Where to part clients, given the size of each one's first batch in falling order."""
    first = 0
    while first < len(batches):
        last = int(np.searchsorted(-batches, -batches[first] / _MOST_PADDING, side="right"))
        yield first, last
        first = last


def lay_out_steps(
    problem: Problem, shards: Shards, batch_size: int, kernel: Kernel, dtype: torch.dtype, device: torch.device
) -> list[Step]:
    """For every step of an epoch, the mini-batches of the clients that take part, as the kernel wants them."""
    inputs, targets = problem.train
    inputs = kernel.prepare(inputs)
    steps = []
    for start in range(0, len(shards[0]), batch_size):
        members = [shard[start : start + batch_size] for shard in shards if len(shard) > start]
        index = np.stack([np.pad(batch, (0, batch_size - len(batch)), mode="edge") for batch in members])
        sizes = np.array([[len(batch)] for batch in members])
        weight = torch.from_numpy((np.arange(batch_size) < sizes) / sizes).to(dtype)
        samples = torch.from_numpy(index)
        steps.append(kernel.pack((inputs[samples].to(device), targets[samples].to(device), weight.to(device))))
    return steps
