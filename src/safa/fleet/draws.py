"""How fast clients are and how much data they hold: drawn from a distribution, one value per client."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError
from safa.streams import stream

__all__ = ["draw_sizes", "draw_speeds"]

_MOST_REDRAWS = 1000

_Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


def draw_speeds(
    count: int, *, seed: int, distribution: str = "exponential", mean: float = 1.0, spread: float = 0.5, floor: float
) -> NDArray[np.float64]:
    """Client speeds s_k in mini-batches per second.

    `spread` is the standard deviation over the mean for `normal`, the sigma of the logarithm for `lognormal` (whose
    mean is kept), and without meaning for the others. A value below `floor` is drawn again, by itself.
    """
    draws: dict[str, _Draw] = {
        "exponential": lambda rng, n: rng.exponential(mean, n),
        "normal": lambda rng, n: rng.normal(mean, spread * mean, n),
        "lognormal": lambda rng, n: rng.lognormal(np.log(mean) - spread**2 / 2, spread, n),
        "constant": lambda rng, n: np.full(n, mean),
    }
    return _above_floor(draws, distribution, "speed", count, seed, floor)


def draw_sizes(
    count: int, *, seed: int, distribution: str = "normal", mean: float, spread: float = 0.3, floor: float
) -> NDArray[np.int64]:
    """Shard sizes n_k in samples: drawn, scaled to sum to mean*count, and rounded so that the sum still holds."""
    draws: dict[str, _Draw] = {
        "normal": lambda rng, n: rng.normal(mean, spread * mean, n),
        "exponential": lambda rng, n: rng.exponential(mean, n),
        "equal": lambda rng, n: np.full(n, mean),
    }
    values = _above_floor(draws, distribution, "size", count, seed, floor)
    total = round(mean * count)
    ends = np.rint(np.cumsum(values) * (total / values.sum())).astype(np.int64)
    return np.asarray(np.diff(ends, prepend=0), dtype=np.int64)


def _above_floor(
    draws: dict[str, _Draw], distribution: str, what: str, count: int, seed: int, floor: float
) -> NDArray[np.float64]:
    """One value per client, each drawn again until it is not below the floor; client k's value depends on k alone."""
    if distribution not in draws:
        raise SafaError(f"{what}_distribution must be one of {', '.join(draws)}, not {distribution!r}")
    values = draws[distribution](stream(seed, what, 0), count)
    for again in range(1, _MOST_REDRAWS):
        below = values < floor
        if not below.any():
            return values
        values[below] = draws[distribution](stream(seed, what, again), count)[below]
    raise SafaError(f"the {distribution} {what} distribution hardly ever reaches the floor of {floor}")
