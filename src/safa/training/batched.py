"""Many clients as one batched computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from safa.tasks.problem import Problem
from safa.training.batches import Batches, Ids, Shards
from safa.training.choice import choose_kernel
from safa.training.graphs import Recorded
from safa.training.kernels import General, Kernel, Step
from safa.training.layout import Layout
from safa.training.optimiser import Optimiser, RowOptimiser
from safa.training.steps import Band, Gathered, lay_out_steps, part_by_size
from safa.training.trainer import Amount, LocalTrainer, Work

__all__ = ["BatchedTrainer", "Group"]


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


class BatchedTrainer(LocalTrainer):
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
        seed: int | Ids = 0,
        first_client: int | Ids = 0,
        alone: bool = False,
        compile_: bool = False,
    ) -> None:
        """On `seed` and `first_client`, the number of the client with the first shard, shuffling depends.

        They may be given for every shard; see `Batches`. Clients that are trained `alone`, each in a call of its own,
        are differentiated in the plain way. With `compile_`, steps on a GPU are compiled; see `safa.training.graphs`.
        """
        module = problem.start_model(0).to(device)
        self.layout = Layout(module)
        self._batches = Batches(shards, batch_size, shuffle=shuffle, seed=seed, first_client=first_client)
        order = np.argsort(-self._batches.lengths, kind="stable")
        self._place = np.empty_like(order)
        self._place[order] = np.arange(len(order))
        self._lengths = self._batches.lengths[order]
        batch_size = self._batches.size
        choice = choose_kernel(problem, module, self.layout, shards[order[0]], batch_size, alone=alone)
        self._kernel: Kernel = choice.kernel
        self.note = choice.note
        """Why clients are trained one after the other, where they are; a line of the log says so, too."""
        self._optimiser, self._problem, self._device = optimiser, problem, device
        self._moved = self._moved_part(module, choice.without_gradient)
        sample = self._kernel.bytes_per_sample(problem.train[0][:1].to(device))
        row = 6 * self.layout.size * self.layout.dtype.itemsize
        self._bands: list[Band] = []
        for first, last in part_by_size(np.minimum(self._lengths, batch_size)):
            members = [shards[k] for k in order[first:last]]
            width = min(batch_size, max(1, len(members[0])))
            most = max(1, int(memory_mb * 2**20 / (width * sample + row)))
            lay_out = partial(lay_out_steps, problem, members, width, choice.kernel, self.layout.dtype, device)
            join = partial(_affine, choice.kernel, optimiser)
            self._bands.append(Band(first, self._lengths[first:last], width, most, lay_out, join))
        if device.type == "cuda" and isinstance(self._kernel, General):
            capacity = max(min(band.most, len(band.lengths)) for band in self._bands)
            self._kernel = Recorded(self._kernel, capacity, compile_=compile_)

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

    def _train(self, work: Work, start: Tensor) -> Tensor:
        """The clients' local training, side by side."""
        updates = torch.empty_like(start)
        for members in self._groups(work):
            index = torch.from_numpy(members).to(start.device)
            group = self._group(work[members], self._kernel.hold(start[index]))
            for epoch in range(group.epochs):
                group.epoch(epoch)
            updates[index] = group.rows
        return updates

    def _groups(self, work: Work) -> list[Ids]:
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
        amount: Amount = {"epochs": epochs, "steps": count, "lr": rate, "bases": np.array([base])}
        work = self._work(clients, start, amount)
        return self._group(work, start[None].clone(), at_a_time=int(self._batches.per_epoch(clients)[0]))

    def _group(self, work: Work, rows: Tensor, *, at_a_time: int = 0) -> Group:
        """Clients of one band at work; their rows may be trained in place.

        Where mini-batches are gathered, an epoch of the group is `at_a_time` steps (0: all of them).
        """
        places = self._place[work.clients]
        band = next(band for band in self._bands if band.holds(places[:1]).all())
        gathered = self._batches.shuffle or not work.in_epochs or self._is_scarce(band)
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
        gathering = Gathered(self._batches, work, band.batch_size, whole_batches=whole)
        most = max(1, at_a_time or gathering.steps)
        return Group(
            rows,
            -(-gathering.steps // most),
            lambda rows, number: move(map(self._gather, gathering.part(number * most, most))),
            optimiser,
        )

    def _is_scarce(self, band: Band) -> bool:
        """Whether the mini-batches of a band, a copy of its data, are not to be laid out; affine epochs need them."""
        return band.most < len(band.lengths) and type(self._kernel).epoch is Kernel.epoch

    def _gather(self, batch: tuple[Ids, NDArray[np.float64]]) -> Step:
        """A mini-batch of each of some clients from the pool, by the numbers and the weights of its samples."""
        index, weight = (torch.from_numpy(part).to(self._device) for part in batch)
        inputs, targets = self._pool
        return self._kernel.pack((inputs[index], targets[index], weight.to(self.layout.dtype)))


def _affine(kernel: Kernel, optimiser: Optimiser, steps: list[Step]) -> tuple[Tensor, Tensor] | None:
    """What these mini-batches amount to, where that is an affine map.

    Not a method: trainers hold much memory, on a GPU most of it, and one that a cycle refers to would be freed late.
    """
    return kernel.epoch(steps, optimiser.lr) if optimiser.is_plain and steps else None


def _affine_group(whole: tuple[Tensor, Tensor], places: Tensor, rows: Tensor, epochs: int) -> Group:
    """Clients at work where a whole epoch is an affine map, made once for every client."""
    matrix, vector = (part[places] for part in whole)
    return Group(rows, epochs, lambda rows, number: torch.baddbmm(vector, matrix, rows.unsqueeze(2)).squeeze(2))
