"""REFL's staleness weights against their formula."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import exp

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from safa.aggregation.refl import Refl
from safa.aggregation.rows import Versions
from safa.protocol.records import Rule
from safa.testing import TakenStep, check_aggregator
from tests.aggregation.steps import begun, ids, step_of, updates

Row = NDArray[np.float64]


def refl(steps: Sequence[TakenStep]) -> Row:
    """Abdelmoniem et al. 2023, as written: L compares the mean of the fresh ones with and without a stale one."""
    step = steps[-1]
    if not len(step.client):
        return step.before
    deltas, lag = step.rows - step.start, step.version - 1 - step.base
    fresh = deltas[lag == 0] if (lag == 0).any() else deltas
    mean, count = fresh.mean(0), len(fresh)
    deviation = [
        np.sum((mean - (delta + count * mean) / (count + 1)) ** 2) / np.sum(mean**2) if late else 0.0
        for delta, late in zip(deltas, lag, strict=True)
    ]
    largest = max(deviation) or 1.0
    weight = np.array(
        [
            0.65 / (late + 1) + 0.35 * (1 - exp(-apart / largest)) if late else 1.0
            for apart, late in zip(deviation, lag, strict=True)
        ]
    )
    return np.asarray(step.before + step.weight.sum() * (weight / weight.sum()) @ deltas)


@pytest.mark.slow
def test_refl_keeps_the_contract_and_its_formula() -> None:
    wrong = [partial(Refl, beta=value) for value in (-0.1, 1.1, float("nan"))]
    check_aggregator(Refl, naive=refl, refused=wrong, scripts=4)


def test_of_two_that_are_equally_stale_the_one_that_differs_counts_more() -> None:
    aggregator = Refl()
    aggregator.begin(Versions(torch.zeros(2)), np.ones(3), memory_mb=1.0)
    aggregator.versions.add(4, torch.zeros(2))
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    some = updates([0, 1, 2], [1 / 3] * 3, rows, base=ids([4, 0, 0]))
    like, unlike = aggregator.step(step_of(5, Rule.DELTA, [some])).tolist()
    alike, other = 0.65 / 5, 0.65 / 5 + 0.35 * (1 - exp(-1))
    assert [like, unlike] == pytest.approx([(1 + alike) / (1 + alike + other), other / (1 + alike + other)])


def test_fresh_updates_count_alike() -> None:
    some = updates([0, 1], [0.9, 0.1], torch.tensor([[1.0], [3.0]]))
    assert begun(Refl(), torch.zeros(1)).step(step_of(1, Rule.AVERAGE, [some])).tolist() == [2.0]
