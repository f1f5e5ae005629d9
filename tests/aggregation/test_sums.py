"""Means, mixing and the buffer against their formulas, in one part and in several."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation import Aggregator, Updates
from safa.aggregation.buffer import Buffer
from safa.aggregation.mean import Mean, PopulationMean
from safa.aggregation.mixing import Mixing
from safa.protocol.records import Rule
from tests.aggregation.steps import begun, parts_of, step_of, updates

RNG = np.random.default_rng(3)
START = torch.from_numpy(RNG.normal(size=5))
ROWS = torch.from_numpy(RNG.normal(size=(6, 5)))
BASES = torch.from_numpy(RNG.normal(size=(6, 5)))
WEIGHTS = np.array([0.1, 0.05, 0.2, 0.15, 0.1, 0.1])
GIVEN = updates(range(6), WEIGHTS.tolist(), ROWS, start=BASES)


def naive(weights: NDArray[np.float64]) -> Tensor:
    return (1 - float(weights.sum())) * START + torch.from_numpy(weights) @ ROWS


@pytest.mark.parametrize("most", [6, 4, 1])
@pytest.mark.parametrize("aggregator", [Mean, PopulationMean, Mixing])
def test_the_old_model_has_what_the_weights_leave(aggregator: type[Aggregator], most: int) -> None:
    found = begun(aggregator(), START).step(step_of(1, Rule.AVERAGE, parts_of(GIVEN, most)))
    torch.testing.assert_close(found, naive(WEIGHTS), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("most", [6, 4, 1])
@pytest.mark.parametrize("rule", [Rule.DELTA, Rule.AVERAGE])
def test_the_buffer_adds_what_training_changed(rule: Rule, most: int) -> None:
    found = begun(Buffer(), START).step(step_of(1, rule, parts_of(GIVEN, most)))
    expected = START + torch.from_numpy(WEIGHTS) @ (ROWS - BASES)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("aggregator", [Mean, PopulationMean, Mixing, Buffer])
@pytest.mark.parametrize("parts", [[], [updates([], [], ROWS[:0])]])
def test_without_updates_the_model_stays(aggregator: type[Aggregator], parts: list[Updates]) -> None:
    step = step_of(1, Rule.AVERAGE, parts, weight=0.5)
    assert torch.equal(begun(aggregator(), START).step(step), START)


@pytest.mark.parametrize("most", [6, 4])
def test_participants_stand_in_for_one_that_diverged(most: int) -> None:
    found = begun(Mean(), START).step(step_of(1, Rule.AVERAGE, parts_of(GIVEN, most), weight=1.0))
    torch.testing.assert_close(found, naive(WEIGHTS / WEIGHTS.sum()), rtol=1e-13, atol=1e-13)
    part = begun(Mean(), START).step(step_of(1, Rule.AVERAGE, parts_of(GIVEN, most), weight=0.8))
    torch.testing.assert_close(part, naive(WEIGHTS / WEIGHTS.sum() * 0.8), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("aggregator", [PopulationMean, Mixing])
def test_the_old_model_replaces_one_that_diverged(aggregator: type[Aggregator]) -> None:
    found = begun(aggregator(), START).step(step_of(1, Rule.AVERAGE, [GIVEN], weight=1.0))
    torch.testing.assert_close(found, naive(WEIGHTS), rtol=1e-13, atol=1e-13)


def test_the_mean_over_shares_of_a_cache_is_over_those_that_were_picked() -> None:
    found = begun(Mean(), START).step(step_of(1, Rule.CACHE, [GIVEN]))
    torch.testing.assert_close(found, naive(WEIGHTS / WEIGHTS.sum()), rtol=1e-13, atol=1e-13)
    damped = begun(PopulationMean(), START).step(step_of(1, Rule.CACHE, [GIVEN]))
    torch.testing.assert_close(damped, naive(WEIGHTS), rtol=1e-13, atol=1e-13)


def test_rounding_of_the_weights_scales_nothing() -> None:
    """A sum of the same weights in another order is no reason to change them."""
    plain = begun(Mean(), START).step(step_of(1, Rule.AVERAGE, [GIVEN]))
    again = begun(Mean(), START).step(step_of(1, Rule.AVERAGE, [GIVEN], weight=float(WEIGHTS.sum()) * (1 + 1e-15)))
    assert torch.equal(plain, again)


def test_a_model_stays_in_its_precision() -> None:
    single = updates(range(6), WEIGHTS.tolist(), ROWS.float(), start=BASES.float())
    for aggregator in (Mean(), PopulationMean(), Mixing(), Buffer()):
        found = begun(aggregator, START.float()).step(step_of(1, Rule.AVERAGE, parts_of(single, 4)))
        assert found.dtype == torch.float32
