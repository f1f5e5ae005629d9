"""Local training: many clients as one batched computation, and one client after the other as the oracle.

Both trainers take the models that clients start from, as rows, and return what they make of them: E passes over the
client's own samples in their given order, in mini-batches of B, without shuffling (Algorithm 2, the client's part).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.learning.kernels import Kernel, Step, find_kernel
from safa.learning.layout import Layout
from safa.learning.optimiser import Optimiser, RowOptimiser
from safa.records import Ids
from safa.tasks.problem import Problem

__all__ = ["BatchedTrainer", "Group", "SerialTrainer", "Trainer", "make_trainer"]

Shards = Sequence[NDArray[np.int64]]
"""For every client, which training samples are its own, in the order in which it goes through them."""


class Trainer(Protocol):
    """Turns models that clients start from into their updates."""

    layout: Layout

    def train(self, clients: Ids, start: Tensor, *, epochs: int) -> Tensor:
        """The updates [K, d] of these K clients, who start from the rows of `start` [K, d]."""


class SerialTrainer:
    """One client after the other, by torch's own modules and optimisers: slow, literal, the oracle."""

    def __init__(
        self, problem: Problem, shards: Shards, *, batch_size: int, optimiser: Optimiser, device: torch.device
    ) -> None:
        self._module = problem.start_model(0).to(device)
        self.layout = Layout(self._module)
        self._problem, self._optimiser, self._batch_size = problem, optimiser, batch_size
        inputs, targets = problem.train
        self._data = [(inputs[shard].to(device), targets[shard].to(device)) for shard in map(torch.from_numpy, shards)]

    def train(self, clients: Ids, start: Tensor, *, epochs: int) -> Tensor:
        """As the paper's Algorithm 2 has it."""
        return torch.stack([self._train_one(int(k), row, epochs) for k, row in zip(clients, start, strict=True)])

    def _train_one(self, client: int, row: Tensor, epochs: int) -> Tensor:
        module = self._module
        module.load_state_dict(self.layout.state(row), strict=False)
        anchor = [p.detach().clone() for p in module.parameters()]
        optimiser = self._optimiser.of(module)
        inputs, targets = self._data[client]
        for _ in range(epochs):
            for x, y in zip(inputs.split(self._batch_size), targets.split(self._batch_size), strict=True):
                optimiser.zero_grad()
                loss = self._problem.loss(module(x), y)
                if self._optimiser.proximal:
                    distance = sum(((p - a) ** 2).sum() for p, a in zip(module.parameters(), anchor, strict=True))
                    loss = loss + self._optimiser.proximal / 2 * distance
                loss.backward()
                optimiser.step()
        return self.layout.row(dict(module.named_parameters()) | dict(module.named_buffers()))


class Group:
    """Clients at work side by side: their models so far, as rows, and what their optimisers remember."""

    def __init__(self, rows: Tensor, epoch: Callable[[Tensor], Tensor], optimiser: RowOptimiser | None = None) -> None:
        """`epoch` takes the rows to where an epoch takes them, in place or not."""
        self.rows, self.optimiser, self._epoch = rows, optimiser, epoch

    def epoch(self) -> None:
        """Every client goes through its samples once."""
        self.rows = self._epoch(self.rows)


class BatchedTrainer:
    """All clients of a call at once, in groups that fit the memory budget.

    Clients are kept in order of their number of batches, the longest first. Step j of an epoch then concerns a leading
    part of them, and holds nobody who is finished. What is padded is at most the last batch of each client.
    """

    def __init__(
        self,
        problem: Problem,
        shards: Shards,
        *,
        batch_size: int,
        optimiser: Optimiser,
        device: torch.device,
        memory_mb: float = 1024.0,
    ) -> None:
        module = problem.start_model(0).to(device)
        self.layout = Layout(module)
        self._kernel = find_kernel(problem, module, self.layout)
        self._optimiser = optimiser
        lengths = np.array([len(shard) for shard in shards])
        order = np.argsort(-lengths, kind="stable")
        self._place = np.empty_like(order)
        self._place[order] = np.arange(len(order))
        self._lengths = lengths[order]
        self._batch_size = batch_size
        self._steps = _steps(problem, [shards[k] for k in order], batch_size, self._kernel, device)
        self._epoch = self._kernel.epoch(self._steps, optimiser.lr) if optimiser.is_plain else None
        sample = self._kernel.bytes_per_sample(problem.train[0][:1].to(device))
        row = 6 * self.layout.size * self.layout.dtype.itemsize
        self._most = max(1, int(memory_mb * 2**20 / (batch_size * sample + row)))

    def train(self, clients: Ids, start: Tensor, *, epochs: int) -> Tensor:
        """The clients' local training, side by side."""
        place = self._place[clients]
        updates = torch.empty_like(start)
        for members in self._groups(place):
            index = torch.from_numpy(members).to(start.device)
            updates[index] = self._train_group(place[members], start[index], epochs)
        return updates

    def _groups(self, place: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Who is trained together: as many as fit; where samples of a batch see each other, equal shards only."""
        order = np.argsort(place, kind="stable")
        parts = [order]
        if self._kernel.needs_whole_batches:
            parts = np.split(order, np.flatnonzero(np.diff(self._lengths[place[order]])) + 1)
        return [part[i : i + self._most] for part in parts for i in range(0, len(part), self._most)]

    def alone(self, client: int, start: Tensor) -> Group:
        """One client at work by itself, from a copy of its start model [d]."""
        return self._group(self._place[[client]], start[None].clone())

    def _train_group(self, places: NDArray[np.int64], rows: Tensor, epochs: int) -> Tensor:
        group = self._group(places, rows)
        for _ in range(epochs):
            group.epoch()
        return group.rows

    def _group(self, places: NDArray[np.int64], rows: Tensor) -> Group:
        """Clients at work, standing in order of their number of batches; their rows may be trained in place."""
        if self._epoch is not None:
            return self._group_by_epochs(torch.from_numpy(places).to(rows.device), rows)
        trained = rows[:, : self.layout.trained] if self.layout.buffers else rows
        optimiser = RowOptimiser(self._optimiser, trained)
        # Step by step: who is at work, the part of their rows that is trained, and their mini-batches.
        program = [
            (rows[: len(step[0])], trained[: len(step[0])], step) for step in self._steps_of(places, rows.device)
        ]

        def epoch(rows: Tensor) -> Tensor:
            for at_work, moving, step in program:
                optimiser.step(moving, self._kernel.gradients(at_work, step)[:, : self.layout.trained])
            return rows

        return Group(rows, epoch, optimiser)

    def _group_by_epochs(self, places: Tensor, rows: Tensor) -> Group:
        """The same where a whole epoch is an affine map, made once for every client."""
        assert self._epoch is not None
        matrix, vector = (part[places] for part in self._epoch)
        return Group(rows, lambda rows: torch.baddbmm(vector, matrix, rows.unsqueeze(2)).squeeze(2))

    def _steps_of(self, places: NDArray[np.int64], device: torch.device) -> list[Step]:
        """The mini-batches of these clients, step by step: at each step only those who have that many."""
        lengths = self._lengths[places]
        steps = self._steps[: -(-lengths[0] // self._batch_size)]
        if len(places) < len(self._place):
            index = torch.from_numpy(places).to(device)
            counts = [int(np.searchsorted(-lengths, -start)) for start in range(0, lengths[0], self._batch_size)]
            steps = [
                (x[index[:count]], y[index[:count]], weight[index[:count]])
                for count, (x, y, weight) in zip(counts, steps, strict=True)
            ]
        if self._kernel.needs_whole_batches:
            sizes = [lengths[0] - start for start in range(0, lengths[0], self._batch_size)]
            steps = [(x[:, :n], y[:, :n], weight[:, :n]) for n, (x, y, weight) in zip(sizes, steps, strict=True)]
        return steps


def _steps(problem: Problem, shards: Shards, batch_size: int, kernel: Kernel, device: torch.device) -> list[Step]:
    """For every step of an epoch, the mini-batches of the clients that take part, as the kernel wants them."""
    inputs, targets = problem.train
    inputs = kernel.prepare(inputs)
    steps = []
    for start in range(0, len(shards[0]), batch_size):
        members = [shard[start : start + batch_size] for shard in shards if len(shard) > start]
        index = np.stack([np.pad(batch, (0, batch_size - len(batch)), mode="edge") for batch in members])
        sizes = np.array([[len(batch)] for batch in members])
        weight = torch.from_numpy((np.arange(batch_size) < sizes) / sizes).to(inputs.dtype)
        samples = torch.from_numpy(index)
        steps.append(kernel.pack((inputs[samples].to(device), targets[samples].to(device), weight.to(device))))
    return steps


def make_trainer(
    kind: str,
    problem: Problem,
    shards: Shards,
    *,
    batch_size: int,
    optimiser: Optimiser,
    device: torch.device,
    memory_mb: float = 1024.0,
) -> Trainer:
    """The trainer of that name."""
    if kind == "serial":
        return SerialTrainer(problem, shards, batch_size=batch_size, optimiser=optimiser, device=device)
    return BatchedTrainer(
        problem, shards, batch_size=batch_size, optimiser=optimiser, device=device, memory_mb=memory_mb
    )
