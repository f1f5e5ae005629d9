"""The cache equals the naive sum over all entries, whatever is done to it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safa.learning.store import Cache, GlobalModels

CLIENTS, SIZE = 6, 3

steps = st.lists(
    st.tuples(st.sampled_from(["put", "refer", "aggregate", "state"]), st.sets(st.integers(0, CLIENTS - 1))),
    max_size=30,
)


@settings(max_examples=200)
@given(steps, st.integers(0, 10_000), st.sampled_from([1e-9, 100.0]))
def test_the_cache_equals_the_naive_sum(script: list[tuple[str, set[int]]], seed: int, memory_mb: float) -> None:
    """Eq. 6-8 on a plain matrix, beside the store, which is in memory or in a file."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 50, CLIENTS).astype(np.float64)
    models = GlobalModels(torch.from_numpy(rng.normal(size=SIZE)))
    cache = Cache(sizes, models, memory_mb=memory_mb, refresh=4)
    naive = np.tile(models[0].numpy(), (CLIENTS, 1))
    for what, chosen in script:
        clients = np.array(sorted(chosen), dtype=np.int64)
        if what == "put":
            rows = rng.normal(size=(len(clients), SIZE))
            naive[clients] = rows
            cache.put(clients, torch.from_numpy(rows))
        elif what == "refer":
            naive[clients] = models[models.latest].numpy()
            cache.refer(clients, models.latest)
        elif what == "aggregate":
            expected = (sizes / sizes.sum()) @ naive
            models.add(models.latest + 1, cache.aggregate())
            np.testing.assert_allclose(models[models.latest].numpy(), expected, rtol=1e-12, atol=1e-12)
            models.forget_all_but(cache.references)
        else:
            state = cache.state()
            cache = Cache(sizes, models_with_start(models), memory_mb=memory_mb, refresh=4)
            cache._models = models
            cache.restore(state)
        np.testing.assert_allclose(cache.entries(np.arange(CLIENTS)).numpy(), naive)


def models_with_start(models: GlobalModels) -> GlobalModels:
    """Any models that have a version 0, which a new cache starts from."""
    return GlobalModels(models[models.latest])


def test_drift_is_undone_by_the_exact_sum() -> None:
    models = GlobalModels(torch.zeros(SIZE))
    cache = Cache(np.ones(CLIENTS), models, memory_mb=1.0, refresh=5)
    cache.put(np.arange(CLIENTS), torch.ones(CLIENTS, SIZE))
    cache._sum += 1e-3  # as if rounding had gone wrong
    sums = [float(cache.aggregate()[0]) for _ in range(5)]
    assert sums[3] != 1.0
    assert sums[4] == 1.0


def test_an_entry_that_equals_a_global_model_takes_no_room() -> None:
    models = GlobalModels(torch.zeros(SIZE))
    cache = Cache(np.ones(CLIENTS), models, memory_mb=1.0)
    assert cache.state()["cache.rows"].shape == (0, SIZE)
    cache.put(np.array([2]), torch.ones(1, SIZE))
    assert cache.state()["cache.rows"].shape == (1, SIZE)
    models.add(7, torch.full((SIZE,), 5.0))
    cache.refer(np.array([2]), 7)
    assert cache.state()["cache.rows"].shape == (0, SIZE)
    assert cache.references == {0, 7}


def test_versions_that_nobody_needs_are_forgotten() -> None:
    models = GlobalModels(torch.zeros(SIZE))
    for version in range(1, 6):
        models.add(version, torch.full((SIZE,), float(version)))
    models.forget_all_but({2})
    assert [version for version, _ in models.items()] == [2, 5]
    assert models.rows(np.array([5, 2, 5]))[:, 0].tolist() == [5.0, 2.0, 5.0]
