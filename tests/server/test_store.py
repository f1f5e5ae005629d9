"""The cache equals the naive sum over all entries, whatever is done to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from safa.errors import SafaError
from safa.protocol.records import Ids
from safa.server.store import Cache, GlobalModels, _mapped

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


class Fleet:
    """The oracle: a dictionary of models, of sizes and of who is there, summed from scratch."""

    def __init__(self, sizes: NDArray[np.float64], start: NDArray[np.float64]) -> None:
        self.size = dict(enumerate(sizes))
        self.entry = dict.fromkeys(self.size, start)
        self.there = set(self.size)
        self.latest = start

    def join(self, client: int, size: float) -> None:
        self.size[client] = size
        self.entry.setdefault(client, self.latest)
        self.there.add(client)

    def aggregate(self) -> None:
        if self.there:
            total = sum(self.size[client] for client in self.there)
            parts = [self.size[client] / total * self.entry[client] for client in sorted(self.there)]
            self.latest = np.sum(parts, axis=0)


moves = st.tuples(
    st.sampled_from(["put", "refer", "leave", "return", "enrol", "come and go", "go and come", "aggregate", "state"]),
    st.sets(st.integers(0, 9), max_size=5),
)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(moves, max_size=30), st.integers(0, 10_000), st.sampled_from([1e-9, 1e-4, 100.0]), st.integers(0, 4))
def test_the_cache_follows_the_fleet(
    script: list[tuple[str, set[int]]], seed: int, memory_mb: float, clients: int
) -> None:
    """Clients come and go, many or all of them; a checkpoint goes back into a cache made for those at the start."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 50, clients).astype(np.float64)
    models = GlobalModels(torch.from_numpy(rng.normal(size=SIZE)))
    cache = Cache(sizes, models, memory_mb=memory_mb, refresh=4)
    fleet = Fleet(sizes, models[0].numpy())
    for what, chosen in script:
        known = [client for client in sorted(chosen) if client in fleet.size]
        if what == "put":
            rows = rng.normal(size=(len(known), SIZE))
            fleet.entry |= dict(zip(known, rows, strict=True))
            cache.put(ids(known), torch.from_numpy(rows))
        elif what == "refer":
            fleet.entry |= dict.fromkeys(known, fleet.latest)
            cache.refer(ids(known), models.latest)
        elif what == "aggregate":
            fleet.aggregate()
            models.add(models.latest + 1, cache.aggregate())
            np.testing.assert_allclose(models[models.latest].numpy(), fleet.latest, rtol=1e-12, atol=1e-12)
            models.forget_all_but(cache.references)
        elif what == "state":
            state = cache.state()
            cache = Cache(sizes, models_with_start(models), memory_mb=memory_mb, refresh=4)
            cache._models = models
            cache.restore(state)
        else:
            move(what, known, len(chosen), fleet, cache, rng)
        expected = np.array([fleet.entry[client] for client in sorted(fleet.size)]).reshape(-1, SIZE)
        np.testing.assert_allclose(cache.entries(np.arange(len(fleet.size))).numpy(), expected, rtol=1e-12, atol=1e-12)
        if fleet.there:
            torch.testing.assert_close(cache._sum, cache.exact_sum(), rtol=1e-12, atol=1e-12)


def move(what: str, known: list[int], count: int, fleet: Fleet, cache: Cache, rng: np.random.Generator) -> None:
    """Let clients come and go between two rounds, in the oracle one by one, in the cache as a record has it."""
    there = [client for client in known if client in fleet.there]
    away = [client for client in known if client not in fleet.there]
    new = list(range(len(fleet.size), len(fleet.size) + count))
    joined = {"return": away, "enrol": new, "come and go": new + away, "go and come": there}.get(what, [])
    left = {"leave": there, "come and go": new + away, "go and come": there}.get(what, [])
    sizes = rng.integers(1, 50, len(joined)).astype(np.float64)
    for client, size in zip(joined, sizes, strict=True):
        fleet.join(client, size)
    if what != "go and come":
        fleet.there -= set(left)
    cache.follow(ids(joined), sizes, ids(left))


def ids(clients: list[int]) -> Ids:
    return np.array(clients, dtype=np.int64)


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


def test_while_nobody_is_there_the_model_stays_as_it_was() -> None:
    models = GlobalModels(torch.zeros(SIZE))
    cache = Cache(np.ones(2), models, memory_mb=1.0)
    cache.put(np.array([0, 1]), torch.tensor([[1.0] * SIZE, [3.0] * SIZE]))
    models.add(1, cache.aggregate())
    cache.follow(ids([]), np.empty(0), ids([0, 1]))
    models.add(2, cache.aggregate())
    assert models[2].tolist() == [2.0] * SIZE
    cache.follow(ids([1]), np.ones(1), ids([]))
    assert cache.aggregate().tolist() == [3.0] * SIZE


def test_the_file_of_rows_grows() -> None:
    models = GlobalModels(torch.zeros(SIZE, dtype=torch.float64))
    cache = Cache(np.ones(2), models, memory_mb=2 * SIZE * 8 / 2**20)  # room for two rows, a third goes to a file
    cache.put(np.array([1]), torch.ones(1, SIZE, dtype=torch.float64))
    for client in (2, 3):
        cache.follow(ids([client]), np.ones(1), ids([]))
        cache.put(ids([client]), torch.full((1, SIZE), float(client), dtype=torch.float64))
    assert cache.entries(np.arange(4))[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert cache.aggregate()[0] == 1.5


def test_versions_that_do_not_fit_the_memory_are_held_in_files() -> None:
    models = GlobalModels(torch.zeros(SIZE), memory_mb=4 * 2 * SIZE * 4 / 2**20)  # room for two
    for version in range(1, 40):
        models.add(version, torch.full((SIZE,), float(version)))
        assert len(models._models) <= 2
        assert models[version][0] == version
    assert models.rows(np.array([39, 3, 0, 3]))[:, 0].tolist() == [39.0, 3.0, 0.0, 3.0]
    early = models[5]
    models.forget_all_but({3, 30})
    models.add(40, torch.full((SIZE,), 40.0))
    models.add(40, torch.full((SIZE,), 41.0))  # in place of the one before
    for version in range(50, 60):
        models.add(version, torch.full((SIZE,), float(version)))
    assert [version for version, _ in models.items()] == [3, 30, 39, 40, *range(50, 60)]
    assert [float(row[0]) for _, row in models.items()] == [3, 30, 39, 41, *range(50, 60)]
    assert early.tolist() == [5.0] * SIZE  # whoever still holds a model that was forgotten holds the same


def test_a_file_that_finds_no_room_is_refused_in_a_sentence() -> None:
    with pytest.raises(SafaError, match=r"models of \d+ MB do not fit memory_mb and cannot be held in a file in "):
        _mapped(2**40, torch.zeros(2**10))
