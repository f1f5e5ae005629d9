"""FedCS (Nishio and Yonetani, ICC 2019), as in the SAFA paper: FedAvg without clients that are too slow.

From the random C-fraction, clients that are not expected to make the round's time limit are dropped before training.
The estimate is the caller's; how wrong it may be is a property of the world (`estimate_error`), not of these rules.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from safa.protocol.events import Dispatch
from safa.protocol.fedavg import FedAvg
from safa.protocol.machine import nobody

__all__ = ["FedCS"]


class FedCS(FedAvg):
    """FedAvg that leaves out clients which it does not expect to finish in time."""

    name = "fedcs"

    def _invite(self, draws: NDArray[np.float64], expected_s: NDArray[np.float64]) -> Dispatch:
        drawn = self._draw(draws)
        in_time = self._capped_s(drawn) <= self.round_limit_s
        return Dispatch(sync=drawn[in_time], resume=nobody(), deprecated=nobody(), dropped=drawn[~in_time])
