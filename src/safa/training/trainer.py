"""Local training: many clients as one batched computation, and one client after the other as the oracle.

Both trainers take the models that clients start from, as rows, and return what they make of them: E passes over the
client's own samples in mini-batches of B (Algorithm 2, the client's part), or so many mini-batch steps. Samples are
gone through in their given order, or in a new one every epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from safa.errors import MisuseError
from safa.tasks.problem import Problem
from safa.training.batches import Batches, Ids, Shards
from safa.training.choice import choose_kernel
from safa.training.kernels import Kernel, Step
from safa.training.layout import Layout
from safa.training.optimiser import Optimiser, RowOptimiser

__all__ = ["BatchedTrainer", "Group", "SerialTrainer", "Trainer", "make_trainer"]


class Trainer(Protocol):
    """Turns models that clients start from into their updates."""

    layout: Layout

    def train(
        self,
        clients: Ids,
        start: Tensor,
        *,
        epochs: int | None = None,
        steps: Ids | None = None,
        lr: NDArray[np.float64] | None = None,
        bases: Ids | None = None,
        correction: Tensor | None = None,
    ) -> Tensor:
        """The updates [K, d] of these K clients, who start from the rows of `start` [K, d].

        All of them make so many `epochs`, or each its own number of mini-batch `steps`. `lr` is the learning rate of
        each; without, all have that of the optimiser. `bases` are the versions that they start from, on which the order
        of shuffled samples depends. `correction` [K, d] is added to every gradient.
        """


@dataclass(frozen=True, eq=False)
class _Work:
    """What each of K clients is to do."""

    clients: Ids
    steps: Ids
    in_epochs: int
    """The same in epochs, where all clients make so many; 0 where they do not."""
    bases: Ids
    lr: Tensor | None
    """[K, 1]"""
    correction: Tensor | None
    """[K, trained numbers of a row]"""

    def __getitem__(self, part: Ids | slice) -> _Work:
        index = torch.from_numpy(part) if isinstance(part, np.ndarray) else part
        lr, correction = (None if values is None else values[index] for values in (self.lr, self.correction))
        return _Work(self.clients[part], self.steps[part], self.in_epochs, self.bases[part], lr, correction)


class _OwnTrainer(ABC):
    """What the trainers here have in common."""

    layout: Layout
    _batches: Batches

    def train(
        self,
        clients: Ids,
        start: Tensor,
        *,
        epochs: int | None = None,
        steps: Ids | None = None,
        lr: NDArray[np.float64] | None = None,
        bases: Ids | None = None,
        correction: Tensor | None = None,
    ) -> Tensor:
        """The updates [K, d] of these K clients; see `Trainer.train`."""
        return self._train(self._work(clients, start, epochs, steps, lr, bases, correction), start)

    def _work(
        self,
        clients: Ids,
        start: Tensor,
        epochs: int | None,
        steps: Ids | None,
        lr: NDArray[np.float64] | None,
        bases: Ids | None,
        correction: Tensor | None = None,
    ) -> _Work:
        if (epochs is None) == (steps is None):
            raise MisuseError("local work is given in epochs or in steps")
        return _Work(
            clients,
            self._batches.per_epoch(clients) * (epochs or 0) if steps is None else steps,
            epochs or 0,
            np.zeros_like(clients) if bases is None else bases,
            None if lr is None else torch.from_numpy(lr).to(start).unsqueeze(1),
            None if correction is None else correction[:, : self.layout.trained].to(start),
        )

    @abstractmethod
    def _train(self, work: _Work, start: Tensor) -> Tensor:
        """The updates [K, d] of clients that start from the rows of `start` and have this to do."""


class SerialTrainer(_OwnTrainer):
    """One client after the other, by torch's own modules and optimisers: slow, literal, the oracle."""

    def __init__(
        self,
        problem: Problem,
        shards: Shards,
        *,
        batch_size: int,
        optimiser: Optimiser,
        device: torch.device,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        self._module = problem.start_model(0).to(device)
        self.layout = Layout(self._module)
        self._problem, self._optimiser = problem, optimiser
        self._batches = Batches(shards, batch_size, shuffle=shuffle, seed=seed)
        self._inputs, self._targets = (part.to(device) for part in problem.train)

    def _train(self, work: _Work, start: Tensor) -> Tensor:
        """As the paper's Algorithm 2 has it."""
        return torch.stack([self._train_one(row, work[k : k + 1]) for k, row in enumerate(start)])

    def _train_one(self, row: Tensor, work: _Work) -> Tensor:
        module = self._module
        self.layout.load(module, row)
        anchor = [p.detach().clone() for p in module.parameters()]
        optimiser = self._optimiser.of(module, None if work.lr is None else float(work.lr))
        for samples in self._batches.of(int(work.clients[0]), int(work.bases[0]), int(work.steps[0])):
            index = torch.from_numpy(samples).to(self._targets.device)
            optimiser.zero_grad()
            loss = self._problem.loss(module(self._inputs[index]), self._targets[index])
            if self._optimiser.proximal:
                distance = sum(((p - a) ** 2).sum() for p, a in zip(module.parameters(), anchor, strict=True))
                loss = loss + self._optimiser.proximal / 2 * distance
            loss.backward()
            self._change_gradients(work.correction)
            optimiser.step()
        return self.layout.row(dict(module.named_parameters()) | dict(module.named_buffers()))

    def _change_gradients(self, correction: Tensor | None) -> None:
        """Add the correction of a client, and clip."""
        parameters = list(self._module.parameters())
        if correction is not None:
            parts = correction[0].split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter.grad is not None:
                    parameter.grad += part.view_as(parameter)
        if self._optimiser.clip:
            nn.utils.clip_grad_norm_(parameters, self._optimiser.clip)


class Group:
    """Clients at work side by side: their models so far, as rows, and what their optimisers remember."""

    def __init__(
        self, rows: Tensor, epochs: int, epoch: Callable[[Tensor, int], Tensor], optimiser: RowOptimiser | None = None
    ) -> None:
        """`epoch` takes the rows to where an epoch, counted from 0, takes them, in place or not."""
        self.rows, self.epochs, self.optimiser, self._epoch = rows, epochs, optimiser, epoch

    def epoch(self, number: int) -> None:
        """Every client goes through its samples once, in the last epoch perhaps not through all of them."""
        self.rows = self._epoch(self.rows, number)


class BatchedTrainer(_OwnTrainer):
    """All clients of a call at once, in groups that fit the memory budget.

    Clients are kept in order of their number of samples, the largest first. Step j of an epoch then concerns a leading
    part of them, and holds nobody who is finished. What is padded is at most the last batch of each client. Where a
    batch is larger than the data of many clients, clients of very different size are kept apart, in bands.

    Whole epochs in the given order are made of mini-batches that are laid out once. Where samples are shuffled, or
    clients make numbers of steps of their own, every mini-batch is gathered when its turn comes.

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
        shuffle: bool = False,
        seed: int = 0,
        first_client: int = 0,
    ) -> None:
        """`first_client` is the number of the client with the first shard, on which shuffling depends."""
        module = problem.start_model(0).to(device)
        self.layout = Layout(module)
        self._batches = Batches(shards, batch_size, shuffle=shuffle, seed=seed, first_client=first_client)
        order = np.argsort(-self._batches.lengths, kind="stable")
        self._place = np.empty_like(order)
        self._place[order] = np.arange(len(order))
        self._lengths = self._batches.lengths[order]
        batch_size = self._batches.size
        choice = choose_kernel(problem, module, self.layout, shards[order[0]], batch_size)
        self._kernel = choice.kernel
        self.note = choice.note
        """Why clients are trained one after the other, where they are; a line of the log says so, too."""
        self._optimiser, self._problem, self._device = optimiser, problem, device
        self._moved = self._moved_part(module, choice.without_gradient)
        sample = self._kernel.bytes_per_sample(problem.train[0][:1].to(device))
        row = 6 * self.layout.size * self.layout.dtype.itemsize
        self._bands = []
        for first, last in _bands(np.minimum(self._lengths, batch_size)):
            members = [shards[k] for k in order[first:last]]
            width = min(batch_size, max(1, len(members[0])))
            most = max(1, int(memory_mb * 2**20 / (width * sample + row)))
            lay_out = partial(_steps, problem, members, width, self._kernel, self.layout.dtype, device)
            self._bands.append(_Band(first, self._lengths[first:last], width, most, lay_out, self._affine))

    def _affine(self, steps: list[Step]) -> tuple[Tensor, Tensor] | None:
        return self._kernel.epoch(steps, self._optimiser.lr) if self._optimiser.is_plain and steps else None

    @cached_property
    def _pool(self) -> tuple[Tensor, Tensor]:
        """All samples as the kernel wants them, for mini-batches that are gathered."""
        inputs, targets = self._problem.train
        return self._kernel.prepare(inputs).to(self._device), targets.to(self._device)

    def _moved_part(self, module: nn.Module, without_gradient: set[str]) -> Tensor | None:
        """1 for every number of a row that has a gradient, as torch leaves alone what has none."""
        frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        still = frozen if self._optimiser.proximal else frozen | without_gradient
        if not still:
            return None
        part = torch.ones(1, self.layout.size, dtype=self.layout.dtype)
        for name in still:
            self.layout.views(part)[name].zero_()
        return part[0, : self.layout.trained].to(next(module.parameters()).device)

    def _train(self, work: _Work, start: Tensor) -> Tensor:
        """The clients' local training, side by side."""
        updates = torch.empty_like(start)
        for members in self._groups(work):
            index = torch.from_numpy(members).to(start.device)
            group = self._group(work[members], start[index])
            for epoch in range(group.epochs):
                group.epoch(epoch)
            updates[index] = group.rows
        return updates

    def _groups(self, work: _Work) -> list[Ids]:
        """Who is trained together, whoever makes most steps first: as many as fit.

        Where samples of a batch see each other, equal shards only.
        """
        place = self._place[work.clients]
        order = np.argsort(place, kind="stable")
        parts = [(band, order[band.holds(place[order])]) for band in self._bands]
        if self._kernel.needs_whole_batches:
            parts = [
                (band, equal)
                for band, part in parts
                for equal in np.split(part, np.flatnonzero(np.diff(self._lengths[place[part]])) + 1)
            ]
        parts = [(band, part[np.argsort(-work.steps[part], kind="stable")]) for band, part in parts]
        return [part[i : i + band.most] for band, part in parts for i in range(0, len(part), band.most)]

    def alone(
        self,
        client: int,
        start: Tensor,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        lr: float | None = None,
        base: int = 0,
    ) -> Group:
        """One client at work by itself, from a copy of its start model [d]."""
        clients = np.array([client])
        count, rate = (None if value is None else np.array([value]) for value in (steps, lr))
        work = self._work(clients, start, epochs, count, rate, np.array([base]))
        return self._group(work, start[None].clone(), at_a_time=int(self._batches.per_epoch(clients)[0]))

    def _group(self, work: _Work, rows: Tensor, *, at_a_time: int = 0) -> Group:
        """Clients of one band at work; their rows may be trained in place.

        Where mini-batches are gathered, an epoch of the group is `at_a_time` steps (0: all of them).
        """
        places = self._place[work.clients]
        band = next(band for band in self._bands if band.holds(places[:1]).all())
        gathered = self._batches.shuffle or not work.in_epochs
        if not gathered and band.epoch is not None and work.lr is None and work.correction is None:
            return _affine_group(
                band.epoch, torch.from_numpy(places - band.first).to(rows.device), rows, work.in_epochs
            )
        trained = rows[:, : self.layout.trained] if self.layout.buffers else rows
        optimiser = RowOptimiser(self._optimiser, trained, self._moved, lr=work.lr, correction=work.correction)

        def move(steps: Iterable[Step]) -> Tensor:
            for step in steps:
                at_work = slice(len(step[0]))
                gradients = self._kernel.gradients(rows[at_work], step)
                optimiser.step(trained[at_work], gradients[:, : self.layout.trained])
            return rows

        whole = self._kernel.needs_whole_batches
        if not gathered:
            laid_out = band.steps_of(places, rows.device, whole_batches=whole)
            return Group(rows, work.in_epochs, lambda rows, number: move(laid_out), optimiser)
        gathering = _Gathered(self._batches, work, band.batch_size, whole_batches=whole)
        most = max(1, at_a_time or gathering.steps)
        return Group(
            rows,
            -(-gathering.steps // most),
            lambda rows, number: move(map(self._gather, gathering.part(number * most, most))),
            optimiser,
        )

    def _gather(self, batch: tuple[Ids, NDArray[np.float64]]) -> Step:
        """A mini-batch of each of some clients from the pool, by the numbers and the weights of its samples."""
        index, weight = (torch.from_numpy(part).to(self._device) for part in batch)
        inputs, targets = self._pool
        return self._kernel.pack((inputs[index], targets[index], weight.to(self.layout.dtype)))


def _affine_group(whole: tuple[Tensor, Tensor], places: Tensor, rows: Tensor, epochs: int) -> Group:
    """Clients at work where a whole epoch is an affine map, made once for every client."""
    matrix, vector = (part[places] for part in whole)
    return Group(rows, epochs, lambda rows, number: torch.baddbmm(vector, matrix, rows.unsqueeze(2)).squeeze(2))


class _Gathered:
    """The mini-batches of clients step by step: at each step of those who make that many."""

    def __init__(self, batches: Batches, work: _Work, width: int, *, whole_batches: bool) -> None:
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
class _Band:
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
    shuffle: bool = False,
    seed: int = 0,
) -> Trainer:
    """The trainer of that name."""
    common: dict[str, Any] = {"batch_size": batch_size, "optimiser": optimiser, "device": device}
    common |= {"shuffle": shuffle, "seed": seed}
    if kind == "serial":
        return SerialTrainer(problem, shards, **common)
    return BatchedTrainer(problem, shards, memory_mb=memory_mb, **common)
