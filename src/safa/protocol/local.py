"""Fully local training, the paper's baseline without exchange: everyone trains alone, models meet once, at the end.

In every round a random C-fraction trains, each client on from its own last model. Nothing is exchanged until the last
round, in which the clients' models are summed by size.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.protocol.events import Dispatch
from safa.protocol.fedavg import FedAvg
from safa.protocol.machine import Settlement, nobody
from safa.protocol.records import Ids, Rule, Verdict

__all__ = ["Local"]


class Local(FedAvg):
    """No exchange until the last round."""

    name = "local"
    rule = Rule.OWN

    def __init__(self, sizes: ArrayLike, *, fraction: float, rounds: int, round_limit_s: float = math.inf) -> None:
        """`rounds` is r, the round in which the models are gathered."""
        if rounds < 1:
            raise SafaError(f"rounds must be a whole number, at least 1, not {rounds}")
        self.rounds = rounds
        self._has_model = np.empty(0, dtype=np.bool_)
        super().__init__(sizes, fraction=fraction, round_limit_s=round_limit_s)

    @property
    def aggregator(self) -> str:
        """The clients' own models."""
        return "own"

    def _fresh_client(self) -> dict[str, Any]:
        return super()._fresh_client() | {"_has_model": False}

    def _invite(self, draws: NDArray[np.float64], expected_s: NDArray[np.float64]) -> Dispatch:
        drawn = self._draw(draws)
        first_time = drawn[~self._has_model[drawn]]
        at_work = self._awaited.copy()  # not finished when the last round closed
        at_work[drawn] = True
        at_work[first_time] = False
        self._has_model[first_time] = True
        return Dispatch(
            sync=first_time,
            resume=np.flatnonzero(at_work & self.active),
            deprecated=nobody(),
            upload=self.round >= self.rounds,
        )

    def _accept(self, clients: Ids, bases: Ids) -> Ids:
        return nobody()

    def _settle(self, clients: Ids, late: NDArray[np.bool_]) -> Settlement:
        if self.round < self.rounds:
            kept = np.full(len(clients), Verdict.UNDRAFTED.value, dtype=np.int8)
            return kept, np.zeros(len(clients)), np.full(len(clients), -1, dtype=np.int64)
        self.version += 1
        return (
            np.full(len(clients), Verdict.PICKED.value, dtype=np.int8),
            self.sizes[clients] / self.sizes[self.active].sum(),
            np.full(len(clients), self.version, dtype=np.int64),
        )

    def _uploads(self, arrivals: int) -> int:
        return int(np.count_nonzero(self._has_model & self.active)) if self.round >= self.rounds else 0
