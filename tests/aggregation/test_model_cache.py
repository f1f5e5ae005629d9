"""The cache of models equals the naive sum over all entries, whoever comes, leaves, returns or changes its size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from safa.aggregation import Updates
from safa.aggregation.model_cache import ModelCache
from safa.aggregation.own_models import OwnModels
from safa.aggregation.rows import Versions
from safa.protocol.records import Rule
from tests.aggregation.steps import ids, step_of, updates

SIZE = 3


class Quick(ModelCache):
    refresh = 4


class Naive:
    """The oracle: dictionaries of entries, sizes and coefficients, summed from scratch."""

    def __init__(self, sizes: NDArray[np.float64], start: NDArray[np.float64]) -> None:
        self.size = {client: float(size) for client, size in enumerate(sizes)}
        self.entry = dict.fromkeys(self.size, start)
        self.present = set(self.size)
        self.latest = start
        self.share()

    def share(self) -> None:
        whole = sum(self.size[client] for client in self.present)
        self.weight = {client: self.size[client] / whole for client in self.present}

    def follow(self, joined: list[int], sizes: NDArray[np.float64], left: list[int]) -> None:
        before = set(self.present)
        for client, size in zip(joined, sizes, strict=True):
            self.size[client] = float(size)
            self.entry.setdefault(client, self.latest)
        self.present = (before | set(joined)) - (set(left) - (set(joined) & before))
        if joined or left:
            self.share()

    def aggregate(self) -> None:
        whole = sum(self.weight.values())
        if whole:
            parts = [weight / whole * self.entry[client] for client, weight in sorted(self.weight.items())]
            self.latest = np.sum(parts, axis=0)


class Both:
    """A cache beside the oracle: whatever is done is done to both."""

    def __init__(self, seed: int, memory_mb: float, clients: int) -> None:
        self.rng = np.random.default_rng(seed)
        sizes = self.rng.integers(1, 50, clients).astype(np.float64)
        self.versions, self.memory_mb = Versions(torch.from_numpy(self.rng.normal(size=SIZE))), memory_mb
        self.cache, self.naive = self.new_cache(sizes), Naive(sizes, self.versions.model.numpy())

    def new_cache(self, sizes: NDArray[np.float64]) -> ModelCache:
        cache = Quick()
        cache.begin(self.versions, sizes, memory_mb=self.memory_mb)
        return cache

    def some(self, clients: list[int], picked: NDArray[np.bool_], *, own_weights: bool) -> Updates:
        sizes = [self.naive.weight.get(client, 0.0) for client in clients]
        weight = self.rng.random(len(clients)) if own_weights else np.array(sizes)
        rows = torch.from_numpy(self.rng.normal(size=(len(clients), SIZE)))
        self.naive.entry |= dict(zip(clients, rows.numpy(), strict=True))
        for client in ids(clients)[picked].tolist():
            if client in self.naive.present:
                self.naive.weight[client] = float(weight[clients.index(client)])
        return updates(clients, np.where(picked, weight, 0.0).tolist(), rows, picked=picked)

    def step(self, clients: list[int], *, own_weights: bool) -> None:
        version = self.versions.latest + 1
        picked = self.rng.random(len(clients)) < 0.6
        given = self.some(clients, picked, own_weights=own_weights)
        known = sorted(self.naive.size)
        deprecated = [client for client in known if self.rng.random() < 0.2]
        fresh = set(deprecated) - set(ids(clients)[picked].tolist())
        self.naive.entry |= dict.fromkeys(fresh, self.versions.model.numpy())
        self.naive.aggregate()
        model = self.cache.step(step_of(version, Rule.CACHE, [given], deprecated=deprecated))
        np.testing.assert_allclose(model.numpy(), self.naive.latest, rtol=1e-11, atol=1e-11)
        self.versions.add(version, model)
        self.versions.forget_all_but(self.cache.references())

    def move(self, what: str, known: list[int], count: int) -> None:
        there = [client for client in known if client in self.naive.present]
        away = [client for client in known if client not in self.naive.present]
        new = list(range(len(self.naive.size), len(self.naive.size) + count))
        joined = {"return": away, "enrol": new, "come and go": new + away, "resize": there, "swap": new + away}
        left = {"leave": there, "come and go": new + away, "resize": there, "swap": there}
        came, gone = joined.get(what, []), left.get(what, [])
        sizes = self.rng.integers(1, 50, len(came)).astype(np.float64)
        self.naive.follow(came, sizes, gone)
        self.cache.follow(ids(came), sizes, ids(gone))

    def resume(self) -> None:
        """Into a new cache, as from a checkpoint."""
        state, old = self.cache.state(), self.cache.tables()["entries"]
        self.cache = self.new_cache(np.ones(1))
        self.cache.tables()["entries"].restore(old.numbers, old.get(old.numbers))
        self.cache.restore(state)

    def check(self) -> None:
        everyone = sorted(self.naive.size)
        expected = np.array([self.naive.entry[client] for client in everyone]).reshape(-1, SIZE)
        np.testing.assert_allclose(self.cache.entries(ids(everyone)).numpy(), expected, rtol=1e-11, atol=1e-11)
        if self.naive.present:
            torch.testing.assert_close(self.cache._sum, self.cache._exact_sum(), rtol=1e-11, atol=1e-11)


MOVES = ["leave", "return", "enrol", "come and go", "resize", "swap"]
moves = st.tuples(
    st.sampled_from([*MOVES, "step", "step", "own weights", "keep", "checkpoint"]),
    st.sets(st.integers(0, 9), max_size=5),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(moves, max_size=25), st.integers(0, 10_000), st.sampled_from([1e-9, 1e-4, 100.0]), st.integers(0, 5))
def test_the_cache_equals_the_naive_sum(
    script: list[tuple[str, set[int]]], seed: int, memory_mb: float, clients: int
) -> None:
    both = Both(seed, memory_mb, clients)
    for what, chosen in script:
        known = [client for client in sorted(chosen) if client in both.naive.size]
        if what in ("step", "own weights"):
            both.step(known, own_weights=what == "own weights")
        elif what == "keep":
            both.cache.keep(both.some(known, np.zeros(len(known), np.bool_), own_weights=False))
        elif what == "checkpoint":
            both.resume()
        else:
            both.move(what, known, len(chosen))
        both.check()


def made(clients: int = 4, cache: ModelCache | None = None) -> ModelCache:
    cache = cache or ModelCache()
    cache.begin(Versions(torch.zeros(SIZE)), np.ones(clients), memory_mb=1.0)
    return cache


def constant(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1).repeat(1, SIZE)


def test_a_join_reads_no_entry_of_others() -> None:
    """Its cost does not grow with the number of clients: only the model that the new one refers to is read."""
    cache = made(4)
    cache.keep(updates(range(4), [0.25] * 4, constant(1, 2, 3, 4)))
    read: list[int] = []
    cache._own.get = lambda numbers: read.extend(numbers) or constant(*numbers)  # type: ignore[func-returns-value,method-assign]
    cache.follow(ids([4, 5]), np.array([4.0, 2.0]), ids([]))
    assert not read
    assert cache.references() == {0}
    assert cache._sum.tolist() == pytest.approx([1.0] * SIZE)
    assert cache.tables()["entries"].numbers.tolist() == [0, 1, 2, 3]


def test_an_entry_that_equals_a_global_model_takes_no_room() -> None:
    cache = made(6)
    own = cache.tables()["entries"]
    assert own.numbers.tolist() == []
    assert cache.references() == {0}
    cache.keep(updates([2], [1 / 6], constant(1)))
    assert own.numbers.tolist() == [2]
    cache.versions.add(7, constant(5)[0])
    cache.step(step_of(8, Rule.CACHE, [], deprecated=[2]))
    assert own.numbers.tolist() == []
    assert cache.references() == {0, 7}


def test_entries_that_do_not_fit_the_memory_are_held_in_files() -> None:
    cache = ModelCache()
    start = torch.zeros(SIZE, dtype=torch.float64)
    cache.begin(Versions(start), np.ones(2), memory_mb=2 * SIZE * 8 / 2**20)  # room for two
    cache.keep(updates([1], [0.5], constant(1).double()))
    for client in (2, 3):
        cache.follow(ids([client]), np.ones(1), ids([]))
        cache.keep(updates([client], [1 / (client + 1)], constant(client).double()))
    assert cache.entries(np.arange(4))[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert cache.step(step_of(1, Rule.CACHE, []))[0] == pytest.approx(1.5, abs=1e-15)


def test_while_nobody_is_there_the_model_stays_as_it_was() -> None:
    cache = made(2)
    cache.versions.add(1, cache.step(step_of(1, Rule.CACHE, [updates([0, 1], [0.5, 0.5], constant(1, 3))])))
    cache.follow(ids([]), np.empty(0), ids([0, 1]))
    cache.versions.add(2, cache.step(step_of(2, Rule.CACHE, [])))
    assert cache.versions.model.tolist() == [2.0] * SIZE
    cache.follow(ids([1]), np.ones(1), ids([]))
    assert cache.step(step_of(3, Rule.CACHE, [])).tolist() == [3.0] * SIZE


def test_weights_that_do_not_sum_to_one_make_a_mean_all_the_same() -> None:
    """FedAvg's weights are shares of the participants: entries of the others stay, with what they had."""
    cache = made(4)
    model = cache.step(step_of(1, Rule.AVERAGE, [updates([0, 1], [0.5, 0.5], constant(6, 6))]))
    assert model.tolist() == pytest.approx([6 * (0.5 + 0.5) / (0.5 + 0.5 + 0.25 + 0.25)] * SIZE)


def test_the_last_update_of_a_client_is_its_entry() -> None:
    cache = made(2)
    part = updates([1, 0, 1], [0.0, 0.5, 0.5], constant(8, 2, 4), picked=np.array([False, True, True]))
    assert cache.step(step_of(1, Rule.CACHE, [part])).tolist() == [3.0] * SIZE
    assert cache.entries(ids([0, 1]))[:, 0].tolist() == [2.0, 4.0]


def test_a_picked_update_outlives_that_its_client_was_deprecated() -> None:
    cache = made(3)
    cache.step(step_of(1, Rule.CACHE, [updates([0, 1, 2], [1 / 3] * 3, constant(3, 6, 9))]))
    cache.versions.add(1, constant(5)[0])
    part = updates([0, 1], [1 / 3, 0.0], constant(7, 8), picked=np.array([True, False]))
    cache.step(step_of(2, Rule.CACHE, [part], deprecated=[0, 1, 2]))
    assert cache.entries(ids([0, 1, 2]))[:, 0].tolist() == [7.0, 5.0, 5.0]
    assert cache.references() == {1}
    assert cache.tables()["entries"].numbers.tolist() == [0]


def test_drift_is_undone_by_the_exact_sum() -> None:
    cache = made(4)
    cache.keep(updates(range(4), [0.25] * 4, constant(1, 1, 1, 1)))
    cache._sum += 1e-3  # as if rounding had gone wrong
    sums = [float(cache.step(step_of(version, Rule.CACHE, []))[0]) for version in range(1, 21)]
    assert sums[18] != 1.0
    assert sums[19] == 1.0


def test_everyone_continues_from_its_own_model() -> None:
    cache = made(2, OwnModels())
    assert cache.entries(ids([0, 1])).tolist() == constant(0, 0).tolist()
    cache.keep(updates([1], [0.0], constant(4), picked=np.zeros(1, np.bool_)))
    assert cache.entries(ids([0, 1])).tolist() == constant(0, 4).tolist()
    model = cache.step(step_of(1, Rule.OWN, [updates([0], [0.5], constant(2))]))
    assert model.tolist() == [3.0] * SIZE
