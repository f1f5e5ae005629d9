"""FedAsync (Xie et al., 2019): every update is mixed into the global model as it comes.

w := (1 - a) w + a * update, with a = mixing * s(lag), where lag is the number of versions made since the client was
sent its base. Every arrival makes a version.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.protocol.continuous import Continuous, Staleness
from safa.protocol.records import Ids

__all__ = ["FedAsync"]


class FedAsync(Continuous):
    """Every update is mixed in at once, the less the staler it is."""

    name = "fedasync"
    one_by_one = True

    def __init__(
        self,
        sizes: ArrayLike,
        *,
        fraction: float,
        mixing: float = 0.6,
        staleness: str = "polynomial",
        staleness_exponent: float = 0.5,
        hinge_slope: float = 10.0,
        hinge_lag: float = 4.0,
        round_limit_s: float = math.inf,
    ) -> None:
        """`mixing` is alpha; `staleness` is constant, polynomial ((1+lag)^-a) or hinge (1/(a(lag-b)+1) above b)."""
        if not 0 < mixing <= 1:
            raise SafaError(f"mixing must be above 0 and at most 1, not {mixing}")
        self.mixing = mixing
        self.staleness = Staleness(staleness, staleness_exponent, hinge_slope, hinge_lag)
        super().__init__(sizes, fraction=fraction, round_limit_s=round_limit_s)

    @property
    def aggregator(self) -> str:
        """Mixing: (1 - a) w + a u."""
        return "mixing"

    def _merge(self, clients: Ids, bases: Ids) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        into = self.version + 1 + np.arange(len(bases))
        self.version += len(bases)
        return self.mixing * self.staleness(into - 1 - bases), into, into
