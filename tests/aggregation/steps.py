"""Steps of an aggregator, put together by hand or at random."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation import Aggregator, Step, Updates
from safa.aggregation.rows import Versions
from safa.protocol.records import Ids, Rule


def ids(numbers: Iterable[int]) -> Ids:
    return np.array(list(numbers), dtype=np.int64)


def updates(clients: Sequence[int], weights: Sequence[float], rows: Tensor, **given: Any) -> Updates:
    """Updates of these clients, all picked, from version 0, which is 0 throughout, unless something else is given."""
    count = len(clients)
    plain: dict[str, Any] = {
        "base": np.zeros(count, np.int64),
        "picked": np.ones(count, np.bool_),
        "start": torch.zeros_like(rows),
    }
    return Updates(client=ids(clients), weight=np.array(weights, dtype=np.float64), rows=rows, **plain | given)


def parts_of(whole: Updates, most: int) -> list[Updates]:
    """Updates in parts of at most so many."""
    places = (slice(first, first + most) for first in range(0, len(whole), most))
    return [Updates(**{name: value[place] for name, value in vars(whole).items()}) for place in places]


def step_of(
    version: int, rule: Rule, parts: Sequence[Updates], *, weight: float | None = None, deprecated: Iterable[int] = ()
) -> Step:
    asked = sum(float(part.weight.sum()) for part in parts) if weight is None else weight
    return Step(version, rule, asked, ids(deprecated), iter(parts))


def begun(
    aggregator: Aggregator, start: Tensor, sizes: Sequence[float] | NDArray[np.float64] = (), memory_mb: float = 64.0
) -> Aggregator:
    aggregator.begin(Versions(start), np.array(sizes, dtype=np.float64), memory_mb=memory_mb)
    return aggregator
