"""FedAvg (McMahan et al., AISTATS 2017): select a random C-fraction, train, wait for all of it, average.

Two averages are known under this name. McMahan's own is over the clients that took part. The SAFA paper's experiments
summed over the whole population, with the old global model in place of everyone else's update, which damps every step
by the share of clients that took part.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.protocol.events import Dispatch
from safa.protocol.machine import Protocol, Settlement, nobody
from safa.protocol.records import Ids, Verdict

__all__ = ["AVERAGINGS", "FedAvg"]

AVERAGINGS = ("participants", "population")


class FedAvg(Protocol):
    """A random C-fraction is chosen before training; the round waits for all of it."""

    name = "fedavg"

    def __init__(
        self, sizes: ArrayLike, *, fraction: float, averaging: str = "participants", round_limit_s: float = math.inf
    ) -> None:
        """`averaging` is over the `participants` of the round or the whole `population`."""
        if averaging not in AVERAGINGS:
            raise SafaError(f"averaging must be one of {', '.join(AVERAGINGS)}, not {averaging!r}")
        self.averaging = averaging
        super().__init__(sizes, fraction=fraction, round_limit_s=round_limit_s)

    @property
    def aggregator(self) -> str:
        """The mean over whatever the weights are shares of."""
        return "mean" if self.averaging == "participants" else "population"

    def _draw(self, draws: NDArray[np.float64]) -> Ids:
        """The C-fraction of the clients with the smallest random numbers, in order of their numbers."""
        candidates = np.flatnonzero(self.active)
        order = np.argsort(draws[candidates], kind="stable")
        return np.sort(candidates[order[: self.quota]])

    def _invite(self, draws: NDArray[np.float64], expected_s: NDArray[np.float64]) -> Dispatch:
        return Dispatch(sync=self._draw(draws), resume=nobody(), deprecated=nobody())

    def _settle(self, clients: Ids, late: NDArray[np.bool_]) -> Settlement:
        self.version = self.round
        counted = clients if self.averaging == "participants" else np.flatnonzero(self.active)
        weight = self.sizes[clients] / self.sizes[counted].sum() if len(clients) else np.empty(0)
        return (
            np.full(len(clients), Verdict.PICKED.value, dtype=np.int8),
            weight,
            np.full(len(clients), self.version, dtype=np.int64),
        )
