"""CA2FL against its formula, and what it makes of FedBuff's weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from safa.aggregation.buffer import Buffer
from safa.aggregation.ca2fl import Ca2fl
from safa.protocol.records import Rule
from safa.testing import TakenStep, check_aggregator
from tests.aggregation.steps import begun, step_of, updates

Row = NDArray[np.float64]


def ca2fl(steps: Sequence[TakenStep]) -> Row:
    """Wang et al. 2024, Algorithm 2, with the weights a_i of the record; what was undrafted is an entry before."""
    h: dict[int, Row] = {}
    for step in steps:
        arrived = list(zip(step.client.tolist(), step.weight, step.rows - step.start, step.picked, strict=True))
        h |= {k: delta for k, _, delta, picked in arrived if not picked}
        calibration = sum(n * h[k] for k, n in step.present.items() if k in h) / sum(step.present.values())
        change = np.zeros_like(step.before)
        for k, a, delta, picked in arrived:
            if picked:
                change += a * (delta - h.get(k, 0.0) + calibration)
        h |= {k: delta for k, _, delta, _ in arrived}
    return np.asarray(steps[-1].before + change)


@pytest.mark.slow
def test_ca2fl_keeps_the_contract_and_its_formula() -> None:
    check_aggregator(Ca2fl, naive=ca2fl, scripts=4)


def test_before_there_are_entries_it_is_fedbuff() -> None:
    some = updates([0, 1], [0.5, 0.3], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    made = [begun(kind(), torch.zeros(2), [1, 2, 3]).step(step_of(1, Rule.DELTA, [some])) for kind in (Buffer, Ca2fl)]
    assert torch.equal(*made)


def test_a_client_that_sends_the_same_again_moves_the_model_by_the_mean_of_all_entries() -> None:
    cache = begun(Ca2fl(), torch.zeros(1), [1.0, 3.0])
    both = updates([0, 1], [0.5, 0.5], torch.tensor([[4.0], [8.0]]))
    cache.step(step_of(1, Rule.DELTA, [both]))
    again = updates([0], [0.5], torch.tensor([[4.0]]))
    assert cache.step(step_of(2, Rule.DELTA, [again])).tolist() == [0.5 * (1 * 4.0 + 3 * 8.0) / 4]
