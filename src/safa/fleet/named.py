"""Fleets by name: speeds and links with the spread of public figures, or of a textbook case.

Client k's numbers are at place k of their streams, so a client keeps them when the fleet grows.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError
from safa.streams import stream

__all__ = ["phone_mbps", "speeds_of"]

_SCORES = (511.0, 4638.0, 30229.0)
"""AI Benchmark scores of phones: 5% of them are below the first, half below the second, 95% below the third."""
_MEDIAN_MBPS, _LOW_MBPS, _LOW_SHARE = 6.1, 3.0, 0.26
"""Bandwidths of phones: the median, and the share of phones below a low one."""
_SLOW_SHARE, _SLOWER = 0.2, 10.0
_SIGMA = 1.0


def speeds_of(fleet: str, count: int, *, seed: int, mean: float) -> NDArray[np.float64]:
    """The speeds of a fleet other than the paper's, in mini-batches per second."""
    if fleet == "phones":
        return mean * _score_ratios(stream(seed, "phone speed").standard_normal(count))
    if fleet == "two-speed":
        slow = stream(seed, "slow client").random(count) < _SLOW_SHARE
        return np.where(slow, mean / _SLOWER, mean)
    if fleet == "lognormal":
        return stream(seed, "lognormal speed").lognormal(np.log(mean) - _SIGMA**2 / 2, _SIGMA, count)
    raise SafaError(f"there is no fleet {fleet!r} with speeds of its own")


def phone_mbps(count: int, *, seed: int) -> NDArray[np.float64]:
    """The bandwidths of phones, the same either way: lognormal, with the median and the low share above."""
    sigma = np.log(_LOW_MBPS / _MEDIAN_MBPS) / NormalDist().inv_cdf(_LOW_SHARE)
    return stream(seed, "phone link").lognormal(np.log(_MEDIAN_MBPS), sigma, count)


def _score_ratios(normal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores over their median: lognormal on either side of it, each with the sigma that meets its quantile."""
    low, median, high = np.log(_SCORES)
    sigma = np.where(normal < 0, median - low, high - median) / NormalDist().inv_cdf(0.95)
    return np.asarray(np.exp(sigma * normal))
