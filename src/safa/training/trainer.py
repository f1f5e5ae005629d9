"""Local training: many clients as one batched computation, and one client after the other as the oracle.

Both trainers take the models that clients start from, as rows, and return what they make of them: E passes over the
client's own samples in their given order, in mini-batches of B, without shuffling (Algorithm 2, the client's part).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from safa.protocol.records import Ids
from safa.tasks.problem import Problem
from safa.training.choice import choose_kernel
from safa.training.kernels import Kernel, Step
from safa.training.layout import Layout
from safa.training.optimiser import Optimiser, RowOptimiser

__all__ = ["BatchedTrainer", "Group", "LocalTraining", "SerialTrainer", "Trainer", "make_trainer"]

Shards = Sequence[NDArray[np.int64]]
"""For every client, which training samples are its own, in the order in which it goes through them."""


class Trainer(Protocol):
    """Turns models that clients start from into their updates."""

    layout: Layout

    def train(self, clients: Ids, start: Tensor, *, epochs: int) -> Tensor:
        """The updates [K, d] of these K clients, who start from the rows of `start` [K, d]."""


class LocalTraining:
    """The updates of simulated clients, which are trained when they are asked for."""

    def __init__(self, trainer: Trainer, *, epochs: int) -> None:
        """Every update takes so many epochs."""
        self._trainer, self._epochs = trainer, epochs

    def updates(self, clients: Ids, bases: Ids, start: Tensor) -> Tensor:
        """The updates [K, d] of these clients, who start from the rows of `start`."""
        return self._trainer.train(clients, start, epochs=self._epochs)

    def train(self, clients: Ids, start: Tensor, epochs: int) -> Tensor:
        """The same with another number of epochs."""
        return self._trainer.train(clients, start, epochs=epochs)

    def discard(self, clients: Ids, bases: Ids) -> None:
        """These updates will never be asked for: there is nothing to do."""

    def state(self) -> dict[str, Tensor]:
        """There is nothing to be kept."""
        return {}

    def tables(self) -> dict[str, Any]:
        """There are no rows to be kept."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """There was nothing to be kept."""


class SerialTrainer:
    """One client after the other, by torch's own modules and optimisers: slow, literal, the oracle."""

    def __init__(
        self, problem: Problem, shards: Shards, *, batch_size: int, optimiser: Optimiser, device: torch.device
    ) -> None:
        self._module = problem.start_model(0).to(device)
        self.layout = Layout(self._module)
        self._problem, self._optimiser = problem, optimiser
        self._batch_size = min(batch_size, max([1, *map(len, shards)]))
        inputs, targets = problem.train
        self._data = [(inputs[shard].to(device), targets[shard].to(device)) for shard in map(torch.from_numpy, shards)]

    def train(self, clients: Ids, start: Tensor, *, epochs: int) -> Tensor:
        """As the paper's Algorithm 2 has it."""
        return torch.stack([self._train_one(int(k), row, epochs) for k, row in zip(clients, start, strict=True)])

    def _train_one(self, client: int, row: Tensor, epochs: int) -> Tensor:
        module = self._module
        self.layout.load(module, row)
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

    Clients are kept in order of their number of samples, the largest first. Step j of an epoch then concerns a leading
    part of them, and holds nobody who is finished. What is padded is at most the last batch of each client. Where a
    batch is larger than the data of many clients, clients of very different size are kept apart, in bands.

    Clients whose model `torch.func` cannot train side by side are trained one after the other; `note` then says why.
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
        lengths = np.array([len(shard) for shard in shards])
        order = np.argsort(-lengths, kind="stable")
        self._place = np.empty_like(order)
        self._place[order] = np.arange(len(order))
        self._lengths = lengths[order]
        batch_size = min(batch_size, max(1, int(self._lengths[0])))
        choice = choose_kernel(problem, module, self.layout, shards[order[0]], batch_size)
        self._kernel = choice.kernel
        self.note = choice.note
        """Why clients are trained one after the other, where they are; a line of the log says so, too."""
        self._optimiser = optimiser
        self._decayed = self._decayed_part(module, choice.without_gradient)
        sample = self._kernel.bytes_per_sample(problem.train[0][:1].to(device))
        row = 6 * self.layout.size * self.layout.dtype.itemsize
        self._bands = []
        for first, last in _bands(np.minimum(self._lengths, batch_size)):
            members = [shards[k] for k in order[first:last]]
            width = min(batch_size, max(1, len(members[0])))
            steps = _steps(problem, members, width, self._kernel, self.layout.dtype, device)
            epoch = self._kernel.epoch(steps, optimiser.lr) if optimiser.is_plain and steps else None
            most = max(1, int(memory_mb * 2**20 / (width * sample + row)))
            self._bands.append(_Band(first, self._lengths[first:last], width, steps, epoch, most))

    def _decayed_part(self, module: nn.Module, without_gradient: set[str]) -> Tensor | None:
        """1 for every number of a row that weight decay concerns, as torch leaves alone what has no gradient."""
        frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        still = frozen if self._optimiser.proximal else frozen | without_gradient
        if not still:
            return None
        part = torch.ones(1, self.layout.size, dtype=self.layout.dtype)
        for name in still:
            self.layout.views(part)[name].zero_()
        return part[0, : self.layout.trained].to(next(module.parameters()).device)

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
        parts = [(band, order[band.holds(place[order])]) for band in self._bands]
        if self._kernel.needs_whole_batches:
            parts = [
                (band, equal)
                for band, part in parts
                for equal in np.split(part, np.flatnonzero(np.diff(self._lengths[place[part]])) + 1)
            ]
        return [part[i : i + band.most] for band, part in parts for i in range(0, len(part), band.most)]

    def alone(self, client: int, start: Tensor) -> Group:
        """One client at work by itself, from a copy of its start model [d]."""
        return self._group(self._place[[client]], start[None].clone())

    def _train_group(self, places: NDArray[np.int64], rows: Tensor, epochs: int) -> Tensor:
        group = self._group(places, rows)
        for _ in range(epochs):
            group.epoch()
        return group.rows

    def _group(self, places: NDArray[np.int64], rows: Tensor) -> Group:
        """Clients of one band at work, the largest first; their rows may be trained in place."""
        band = next(band for band in self._bands if band.holds(places[:1]).all())
        if band.epoch is not None:
            return self._group_by_epochs(band.epoch, torch.from_numpy(places - band.first).to(rows.device), rows)
        trained = rows[:, : self.layout.trained] if self.layout.buffers else rows
        optimiser = RowOptimiser(self._optimiser, trained, self._decayed)
        # Step by step: who is at work, the part of their rows that is trained, and their mini-batches.
        steps = band.steps_of(places, rows.device, whole_batches=self._kernel.needs_whole_batches)
        program = [(rows[: len(step[0])], trained[: len(step[0])], step) for step in steps]

        def epoch(rows: Tensor) -> Tensor:
            for at_work, moving, step in program:
                optimiser.step(moving, self._kernel.gradients(at_work, step)[:, : self.layout.trained])
            return rows

        return Group(rows, epoch, optimiser)

    @staticmethod
    def _group_by_epochs(whole: tuple[Tensor, Tensor], places: Tensor, rows: Tensor) -> Group:
        """The same where a whole epoch is an affine map, made once for every client."""
        matrix, vector = (part[places] for part in whole)
        return Group(rows, lambda rows: torch.baddbmm(vector, matrix, rows.unsqueeze(2)).squeeze(2))


@dataclass(frozen=True, eq=False)
class _Band:
    """Clients with batches of about the same size, and their mini-batches."""

    first: int
    """The place of the first of them among all clients, who are in order of their number of samples."""
    lengths: NDArray[np.int64]
    batch_size: int
    steps: list[Step]
    epoch: tuple[Tensor, Tensor] | None
    """What an epoch amounts to, where it is affine."""
    most: int
    """How many of them are trained at a time."""

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


def _bands(batches: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Where to part clients, given the size of each one's first batch in falling order."""
    first = 0
    while first < len(batches):
        last = int(np.searchsorted(-batches, -batches[first] / _MOST_PADDING, side="right"))
        yield first, last
        first = last


def _steps(
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
