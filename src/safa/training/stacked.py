"""Several runs that train as one: the clients of all of them are the clients of one batched trainer.

Client k of a run is client first + k of the stack, where the clients of the runs before it come first. What the work of
a client depends on is that of its own run: its samples, its learning rate, and the order in which it goes through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, TypeVar, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.tasks.problem import Problem
from safa.training.batched import BatchedTrainer
from safa.training.batches import Ids, Shards
from safa.training.layout import Layout
from safa.training.optimiser import Optimiser
from safa.training.trainer import Amount

__all__ = ["Member", "Request", "StackedTrainer"]

_Number = TypeVar("_Number", np.int64, np.float64)


@dataclass(frozen=True, eq=False)
class Request:
    """What a run asks its trainer for: the updates of clients who start from these rows."""

    run: int
    clients: Ids
    start: Tensor
    amount: Amount


class Member:
    """The trainer of one run of a stack: it hands over what it is asked for, and waits for the updates."""

    def __init__(self, run: int, layout: Layout, ask: Callable[[Request], Tensor]) -> None:
        self.layout, self._run, self._ask = layout, run, ask

    def train(self, clients: Ids, start: Tensor, **amount: Unpack[Amount]) -> Tensor:
        """The updates [K, d] of these K clients, who start from the rows of `start` [K, d]."""
        return self._ask(Request(self._run, clients, start, amount))


class StackedTrainer:
    """Trains what several runs of one problem ask for in one computation."""

    def __init__(self, problem: Problem, optimiser: Optimiser, **how: Any) -> None:
        """`how` is what a batched trainer is made with besides; the learning rate is that of each run."""
        self._problem, self._optimiser, self._how = problem, optimiser, how
        self._layout = Layout(problem.start_model(0))
        self._shards: list[Shards] = []
        self._seeds: list[int] = []
        self._rates: list[float] = []

    def add(self, shards: Shards, ask: Callable[[Request], Tensor], *, seed: int, lr: float) -> Member:
        """A trainer for one more run, whose clients hold these shards; nothing may have been trained yet."""
        self._shards.append(shards)
        self._seeds.append(seed)
        self._rates.append(lr)
        return Member(len(self._shards) - 1, self._layout, ask)

    @cached_property
    def _first(self) -> list[int]:
        """The number of every run's first client."""
        return [0, *accumulate(map(len, self._shards))][:-1]

    @cached_property
    def _trainer(self) -> BatchedTrainer:
        counts = list(map(len, self._shards))
        shards = [shard for held in self._shards for shard in held]
        seed, first = np.repeat(self._seeds, counts), np.repeat(self._first, counts)
        return BatchedTrainer(
            self._problem, shards, optimiser=self._optimiser, seed=seed, first_client=-first, **self._how
        )

    def train(self, requests: Iterable[Request]) -> dict[int, Tensor]:
        """The updates that each of these runs asked for, by run; a run asks once."""
        found: dict[int, Tensor] = {}
        asked = sorted(map(self._with_rates, requests), key=_kind)
        for _, alike in groupby(asked, key=_kind):
            found |= self._train_alike(list(alike))
        return found

    def _with_rates(self, request: Request) -> Request:
        """A request that names learning rates where the runs have different ones."""
        if request.amount.get("lr") is not None or len(set(self._rates)) == 1:
            return request
        rates = np.full(len(request.clients), self._rates[request.run])
        return Request(request.run, request.clients, request.start, {**request.amount, "lr": rates})

    def _train_alike(self, requests: Sequence[Request]) -> Iterator[tuple[int, Tensor]]:
        """The updates of runs whose clients are asked for the same kind of work."""
        clients = np.concatenate([self._first[request.run] + request.clients for request in requests])
        start = torch.cat([request.start for request in requests]) if len(requests) > 1 else requests[0].start
        updates = self._trainer.train(clients, start, **_joined(requests))
        parts = updates.split([len(request.clients) for request in requests])
        return zip((request.run for request in requests), parts, strict=True)


def _kind(request: Request) -> tuple[int, bool, bool]:
    """What requests must have in common to be trained in one call."""
    amount = request.amount
    return amount.get("epochs") or 0, amount.get("lr") is None, amount.get("correction") is None


def _joined(requests: Sequence[Request]) -> Amount:
    """The amounts of work of several requests of one kind, end to end."""
    amounts = [request.amount for request in requests]
    correction = [own for amount in amounts if (own := amount.get("correction")) is not None]
    return {
        "epochs": amounts[0].get("epochs"),
        "steps": _end_to_end(amount.get("steps") for amount in amounts),
        "lr": _end_to_end(amount.get("lr") for amount in amounts),
        "bases": _end_to_end(_bases(request) for request in requests),
        "correction": torch.cat(correction) if correction else None,
    }


def _bases(request: Request) -> Ids:
    bases = request.amount.get("bases")
    return np.zeros_like(request.clients) if bases is None else bases


def _end_to_end(arrays: Iterable[NDArray[_Number] | None]) -> NDArray[_Number] | None:
    given = [array for array in arrays if array is not None]
    return np.concatenate(given) if given else None
