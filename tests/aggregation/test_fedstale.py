"""FedStale against its formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from safa.aggregation.fedstale import FedStale
from safa.protocol.records import Rule
from safa.testing import TakenStep, check_aggregator
from safa.testing.aggregators import check_formula
from tests.aggregation.steps import begun, ids, step_of, updates

Row = NDArray[np.float64]


def fedstale(beta: float) -> Callable[[Sequence[TakenStep]], Row]:
    """Rodio and Neglia 2024, with p_i counted, and the length of the step from the record."""

    def model(steps: Sequence[TakenStep]) -> Row:
        h: dict[int, Row] = {}
        came, took_part = Counter[int](), Counter[int]()
        for step in steps:
            n = sum(step.present.values())
            came.update(step.present.keys())
            deltas = list(zip(step.client.tolist(), step.picked, step.rows - step.start, strict=True))
            h |= {k: delta for k, picked, delta in deltas if not picked}
            direction = sum((step.present[k] / n * beta * h[k] for k in step.present if k in h), np.zeros(5))
            for k, picked, delta in deltas:
                if picked:
                    took_part[k] += 1
                    direction += step.present[k] / n * (delta - beta * h.get(k, 0.0)) * came[k] / took_part[k]
            h |= {k: delta for k, _, delta in deltas}
        return np.asarray(steps[-1].before + steps[-1].weight.sum() * direction)

    return model


@pytest.mark.slow
def test_fedstale_keeps_the_contract_and_its_formula() -> None:
    wrong = [partial(FedStale, beta=value) for value in (-0.1, 1.1, float("nan"))]
    check_aggregator(FedStale, naive=fedstale(0.5), refused=wrong, scripts=4)


def test_beta_is_how_much_an_entry_counts() -> None:
    for beta in (0.0, 0.2, 1.0):
        check_formula(partial(FedStale, beta=beta), fedstale(beta), seed=1)


def test_a_client_that_takes_part_in_every_other_step_counts_twice() -> None:
    cache = begun(FedStale(beta=0.0), torch.zeros(1), [1.0, 1.0])
    cache.step(step_of(1, Rule.DELTA, [updates([0], [1.0], torch.tensor([[1.0]]))]))
    both = updates([0, 1], [0.5, 0.5], torch.tensor([[0.0], [1.0]]))
    assert cache.step(step_of(2, Rule.DELTA, [both])).tolist() == [0.5 * 2]


def test_steps_before_a_client_came_do_not_count() -> None:
    cache = begun(FedStale(beta=0.0), torch.zeros(1), [1.0])
    for version in (1, 2, 3):
        cache.step(step_of(version, Rule.DELTA, [updates([0], [1.0], torch.tensor([[0.0]]))]))
    cache.follow(ids([1]), np.ones(1), ids([]))
    one = updates([1], [1.0], torch.tensor([[1.0]]))
    assert cache.step(step_of(4, Rule.DELTA, [one])).tolist() == [0.5]
