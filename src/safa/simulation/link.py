"""The server's own link: copies of the model leave it at a finite rate, and one sending waits for the one before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["ServerLink"]


class ServerLink:
    """When copies of the model have left the server."""

    def __init__(self, copy_s: float) -> None:
        self._copy_s = copy_s
        self._free_s = 0.0

    def broadcast(self, copies: int, *, now: float) -> float:
        """Send to many at once, in parallel: all have left T_dist (Eq. 19) after the link was free."""
        self._free_s = max(now, self._free_s) + copies * self._copy_s
        return self._free_s

    def queue(self, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Send one copy at each of these times, in order, each as soon as the one before has left."""
        left_s = np.asarray(at_s + self._copy_s, dtype=np.float64)
        if self._free_s > at_s[0] or np.any(left_s[:-1] > at_s[1:]):
            left_s = np.array([self.broadcast(1, now=now) for now in at_s.tolist()])
        self._free_s = float(left_s[-1])
        return left_s
