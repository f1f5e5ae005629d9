"""Caches of updates, against the formulas of their papers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from safa.aggregation.aggregator import Step, Updates
from safa.aggregation.rows import Versions
from safa.aggregation.update_cache import FedVarp, Mifa, UpdateCache
from safa.protocol.records import Ids, Rule
from safa.testing import TakenStep, check_aggregator
from safa.testing.aggregators import check_formula

Row = NDArray[np.float64]


def mean_of(entries: dict[int, Row], present: dict[int, float]) -> Row | float:
    return sum(n * entries[k] for k, n in present.items() if k in entries) / sum(present.values())


def mifa(steps: Sequence[TakenStep], server_step: float = 1.0) -> Row:
    """Gu et al. 2021: the mean of the latest delta of everybody who is there."""
    latest: dict[int, Row] = {}
    for step in steps:
        latest |= dict(zip(step.client.tolist(), step.rows - step.start, strict=True))
    return np.asarray(steps[-1].before + server_step * mean_of(latest, dict(steps[-1].present)))


def fedvarp(steps: Sequence[TakenStep], server_step: float = 1.0) -> Row:
    """Jhunjhunwala et al. 2022; what was undrafted is an entry before the step."""
    y: dict[int, Row] = {}
    for step in steps:
        delta = dict(zip(step.client.tolist(), step.rows - step.start, strict=True))
        weight = dict(zip(step.client.tolist(), step.weight.tolist(), strict=True))
        drafted = step.client[step.picked].tolist()
        y |= {k: row for k, row in delta.items() if k not in drafted}
        whole = sum(weight[i] for i in drafted)
        direction = mean_of(y, dict(step.present))
        for i in drafted:
            direction = direction + weight[i] / whole * (delta[i] - y.get(i, 0.0))
        y |= delta
    return np.asarray(steps[-1].before + server_step * direction)


BAD_STEPS = (0.0, -1.0, float("nan"), float("inf"))


@pytest.mark.slow
def test_mifa_keeps_the_contract_and_its_formula() -> None:
    check_aggregator(Mifa, naive=mifa, refused=[partial(Mifa, server_step=value) for value in BAD_STEPS], scripts=4)


@pytest.mark.slow
def test_fedvarp_keeps_the_contract_and_its_formula() -> None:
    refused = [partial(FedVarp, server_step=value) for value in BAD_STEPS]
    check_aggregator(FedVarp, naive=fedvarp, refused=refused, scripts=4)


def test_a_server_step_scales_the_direction() -> None:
    for seed in range(3):
        check_formula(lambda: Mifa(server_step=0.3), lambda steps: mifa(steps, 0.3), seed=seed)
        check_formula(lambda: FedVarp(server_step=0.3), lambda steps: fedvarp(steps, 0.3), seed=seed)


def test_rows_are_only_made_for_those_that_sent_something() -> None:
    cache = begun(Mifa(), clients=1000)
    take(cache, [7, 990])
    assert cache.tables()["updates"].numbers.tolist() == [7, 990]
    assert torch.equal(cache.entries(np.array([3, 7])), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def test_joining_and_leaving_reads_only_the_rows_of_those_concerned(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = begun(Mifa(), clients=10)
    take(cache, list(range(10)))
    read: list[int] = []
    table = cache.tables()["updates"]
    get = table.get

    def noted(numbers: Ids) -> torch.Tensor:
        read.extend(numbers.tolist())
        return get(numbers)

    monkeypatch.setattr(table, "get", noted)
    cache.follow(np.array([4, 12]), np.array([9.0, 1.0]), np.array([4, 8]))
    assert sorted(read) == [4, 8]


def test_the_running_sum_does_not_drift() -> None:
    """A huge entry that comes and goes swallows a small one in a running sum, until the next exact one."""
    cache = begun(Mifa(), clients=2)
    moved = []
    for client, by in [(0, 1e9), (1, 1e-9), (0, 0.0), *[(0, 0.0)] * 17]:
        cache.versions.add(cache.versions.latest, torch.zeros(2))
        moved.append(float(take(cache, [client], by=by)[0]))
    assert moved[2:19] == [0.0] * 17
    assert moved[19] == pytest.approx(0.5e-9)


def test_a_deprecated_client_keeps_its_entry() -> None:
    cache = begun(Mifa(), clients=2)
    take(cache, [0])
    before = cache.entries(np.array([0]))
    take(cache, [1], deprecated=[0])
    assert torch.equal(cache.entries(np.array([0])), before)


def test_with_nobody_there_the_model_stays() -> None:
    for cache in (begun(Mifa(), clients=1), begun(FedVarp(), clients=1)):
        take(cache, [0])
        cache.follow(np.empty(0, np.int64), np.empty(0), np.array([0]))
        before = cache.versions.model
        assert torch.equal(take(cache, []), before)


def test_of_several_updates_of_a_client_the_last_is_its_entry() -> None:
    for cache in (begun(Mifa(), clients=2), begun(FedVarp(), clients=2)):
        take(cache, [0, 0, 1], by=[1.0, 3.0, 5.0])
        assert cache.entries(np.array([0, 1]))[:, 0].tolist() == [3.0, 5.0]
        assert torch.allclose(cache.exact_sum(), torch.tensor([8.0, 8.0], dtype=torch.float64))


def begun(cache: UpdateCache, *, clients: int) -> UpdateCache:
    cache.begin(Versions(torch.zeros(2)), np.ones(clients), memory_mb=1.0)
    return cache


def take(
    cache: UpdateCache, clients: list[int], *, by: float | list[float] = 1.0, deprecated: Sequence[int] = ()
) -> torch.Tensor:
    """A step whose updates change every number of the model by so much."""
    ids, count = np.array(clients, dtype=np.int64), len(clients)
    start = cache.versions.model.expand(count, -1)
    change = torch.tensor(by).expand(count)[:, None]
    weight, picked = np.full(count, 1 / max(1, count)), np.ones(count, dtype=np.bool_)
    updates = Updates(ids, np.zeros_like(ids), weight, picked, start + change, start)
    version = cache.versions.latest + 1
    model = cache.step(Step(version, Rule.CACHE, 1.0, np.array(deprecated, dtype=np.int64), iter([updates])))
    cache.versions.add(version, model)
    return model
