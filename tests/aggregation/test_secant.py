"""The aggregator secant against its rule, and what it makes of simple worlds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.buffer import Buffer
from safa.aggregation.rows import Versions
from safa.aggregation.secant import Secant
from safa.errors import SafaError
from safa.protocol.records import Ids, Rule
from safa.testing import TakenStep, check_aggregator
from safa.testing.aggregators import check_formula
from tests.aggregation.steps import begun, ids, parts_of, step_of, updates

Row = NDArray[np.float64]


class Literal:
    """The rule in the docstring of the module, step by step."""

    def __init__(
        self,
        gamma: float | None = None,
        theta: float | None = None,
        one_gamma: bool = False,
        longest: float = 2.0,
    ) -> None:
        self.fixed = gamma, theta, one_gamma
        self.longest, self.usual = longest, 0.0
        self.gamma: Row | float = 0.5 if gamma is None else gamma
        self.theta = theta or 0.0
        self.entry: dict[int, tuple[Row, Row, int]] = {}  # delta, base and its version
        self.slope, self.fit = np.zeros((2, 1)), np.zeros(2)

    def __call__(self, steps: Sequence[TakenStep]) -> Row:
        fresh = Literal(*self.fixed, self.longest)
        return [fresh.step(step) for step in steps][-1]

    def step(self, step: TakenStep) -> Row:
        """The model after a step."""
        there = [k for k in step.present if k in self.entry]
        mean = np.mean([self.old(k, step.before) for k in there], 0) if there else 0.0
        model, pairs, slope = step.before.copy(), 0, np.zeros((2, len(step.before)))
        us, es, lengths, new = [], [], [], {}
        for k, version, a, picked, x, b in zip(
            step.client.tolist(), step.base.tolist(), step.weight, step.picked, step.rows, step.start, strict=True
        ):
            lengths.append(float(np.linalg.norm(x - b)))
            delta = self.shortened(k, x - b)
            new[k] = delta, b, version
            u = delta - self.gamma * (step.before - b)
            model += a * u
            if picked and k in self.entry:
                e, (h, other, made) = self.old(k, step.before), self.entry[k]
                model += self.theta * a * (mean - e)
                slope += np.array([-(delta - h) * (b - other), (b - other) ** 2])
                pairs += version != made
                us.append(u)
                es.append(e)
        self.entry |= new
        if lengths:
            now = float(np.median(lengths))
            before = self.usual or now
            self.usual = 0.9 * before + 0.1 * min(now, self.longest * before)
        self.estimate(slope, pairs, us, es, len(step.present))
        return model

    def shortened(self, client: int, delta: Row) -> Row:
        """A delta, at most so many times as long as usual, or as that of its client before."""
        if not self.usual:
            return delta
        own = float(np.linalg.norm(self.entry[client][0])) if client in self.entry else 0.0
        most, length = self.longest * max(own, self.usual), float(np.linalg.norm(delta))
        return delta * (most / length) if length > most else delta

    def old(self, client: int, model: Row) -> Row:
        delta, base, _ = self.entry[client]
        return np.asarray(delta - self.gamma * (model - base))

    def estimate(self, slope: Row, pairs: int, us: list[Row], es: list[Row], clients: int) -> None:
        if pairs and self.fixed[0] is None:
            self.slope = (1 - 1 / max(clients, 10)) ** pairs * self.slope + slope
            means = self.slope.mean(1, keepdims=True)
            upper, lower = means if self.fixed[2] else self.slope + means
            self.gamma = np.clip(upper / lower, 0, 1)
        if len(us) > 1 and self.fixed[1] is None:
            u, e = np.array(us) - np.mean(us, 0), np.array(es) - np.mean(es, 0)
            self.fit = 0.9 * self.fit + np.array([(u * e).sum(), (e * e).sum()])
            self.theta = float(np.clip(self.fit[0] / self.fit[1], 0, 1))


@pytest.mark.slow
def test_secant_keeps_the_contract_and_its_rule() -> None:
    made = (partial(Secant, gamma=number) for number in (-0.1, 1.1, float("nan")))
    wrong = [*made, *(partial(Secant, theta=number) for number in (-0.1, 1.1, float("nan")))]
    wrong += [partial(Secant, longest=number) for number in (0.9, -1.0, float("nan"))]
    check_aggregator(Secant, naive=Literal(), refused=wrong, scripts=4)


@pytest.mark.parametrize(("gamma", "theta"), [(0.3, None), (None, 1.0), (0.7, 0.0)])
def test_either_estimate_can_be_replaced_by_a_number(gamma: float | None, theta: float | None) -> None:
    for seed in range(2):
        check_formula(lambda: Secant(gamma=gamma, theta=theta), Literal(gamma, theta), seed=seed)


def test_one_slope_for_all_numbers() -> None:
    for seed in range(2):
        check_formula(lambda: Secant(one_gamma=True), Literal(one_gamma=True), seed=seed)


Train = Callable[[int, Tensor], Tensor]


class World:
    """Clients whose deltas are known functions of what they start from, and an aggregator."""

    def __init__(self, secant: Secant, train: Train, *, clients: int = 3, length: int = 2, trained: int = 2) -> None:
        self.secant, self.train, self.versions = secant, train, Versions(torch.zeros(length).double(), trained=trained)
        secant.begin(self.versions, np.ones(clients), memory_mb=1.0)

    def step(self, clients: Sequence[int], bases: Sequence[int], weight: float, *, most: int = 100) -> Tensor:
        """A step of the updates of these clients from these versions, in parts of at most so many."""
        starts = self.versions.rows(ids(bases))
        rows = torch.stack([start + self.train(k, start) for k, start in zip(clients, starts, strict=True)])
        whole = updates(clients, [weight] * len(clients), rows, base=ids(bases), start=starts)
        version = self.versions.latest + 1
        model = self.secant.step(step_of(version, Rule.DELTA, parts_of(whole, most)))
        self.versions.add(version, model)
        return model


def towards(client: int, start: Tensor) -> Tensor:
    """A part of the way to the client's own optimum, as gradient descent on |x - optimum|^2 goes."""
    return 0.4 * (torch.tensor([float(client), -2.0 * client]).double() - start)


def test_the_slope_is_that_of_the_clients() -> None:
    world = World(Secant(), towards)
    assert world.secant.gamma == 0.5
    world.step([0, 1, 2], [0, 0, 0], 0.3)
    world.step([0, 2], [0, 1], 0.3)  # from the same version as before, and from another
    assert world.secant.gamma == pytest.approx(0.4)


def test_a_stale_update_counts_as_if_it_had_begun_from_the_latest_model() -> None:
    world = World(Secant(gamma=0.4, theta=1.0), towards)
    world.step([0, 1, 2], [0, 0, 0], 0.3)
    world.step([2, 1], [1, 0], 0.3)
    before = world.versions.model
    after = world.step([0], [0], 0.5)  # theta = 1, so that everybody counts, although only one has sent something
    assert torch.allclose(after, before + 0.5 * torch.stack([towards(k, before) for k in range(3)]).mean(0))


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_the_two_ends_are_the_caches_of_updates_and_of_models(gamma: float) -> None:
    world = World(Secant(gamma=gamma, theta=1.0), towards)
    start = world.versions.model
    first = world.step([0, 1, 2], [0, 0, 0], 0.3)
    deltas = torch.stack([towards(k, start) for k in range(3)])
    models = start + deltas
    entries = models - first if gamma else deltas
    assert torch.allclose(world.step([1], [0], 0.5), first + 0.5 * entries.mean(0))


def away(lengths: Sequence[float]) -> Train:
    """Every client goes so far, each in a direction of its own, wherever it starts."""
    return lambda client, start: lengths[client] * torch.eye(len(start)).double()[client]


def test_an_update_that_is_unusually_long_is_shortened() -> None:
    lengths = [1.0, 1.0, 1.0, 1.0]
    world = World(Secant(gamma=0.0, theta=0.0), away(lengths), clients=4, length=4, trained=4)
    for number in range(3):
        world.step([0, 1, 2, 3], [number] * 4, 0.25)
    lengths[3] = 100.0
    before = world.versions.model
    after = world.step([0, 1, 2, 3], [3] * 4, 0.25)
    assert (after - before).tolist() == pytest.approx([0.25, 0.25, 0.25, 0.5])
    assert world.secant.entries(ids([3]))[0].tolist() == pytest.approx([0.0, 0.0, 0.0, 2.0])
    after, before = world.step([3], [4], 0.25), after
    assert float((after - before)[3]) == pytest.approx(1.0), "twice as long as its own before"


def test_a_client_whose_updates_are_always_long_is_heard() -> None:
    lengths = [10.0, 1.0, 1.0, 1.0]
    world = World(Secant(gamma=0.0, theta=0.0), away(lengths), clients=4, length=4, trained=4)
    for number in range(6):
        world.step([0, 1, 2, 3], [number] * 4, 0.25)
    assert world.secant.entries(ids([0]))[0].tolist() == pytest.approx([10.0, 0.0, 0.0, 0.0])


def test_when_all_updates_grow_the_usual_length_follows() -> None:
    """A step enters it with twice the usual length at most, so that it grows by a tenth in a step."""
    lengths = [1.0] * 60
    world = World(Secant(gamma=0.0, theta=0.0), away(lengths), clients=60, length=60, trained=60)
    world.step([0, 1], [0, 0], 1.0)
    lengths[:] = [100.0] * 60
    for number in range(1, 30):  # clients without an entry
        world.step([2 * number, 2 * number + 1], [0, 0], 1.0)
    found = [float(world.versions.model[2 * number]) for number in range(30)]
    assert found == pytest.approx([1.0, *(2 * 1.1 ** np.arange(29))])


def test_without_a_limit_no_update_is_shortened() -> None:
    lengths = [1.0, 1.0]
    world = World(Secant(gamma=0.0, theta=0.0, longest=float("inf")), away(lengths))
    world.step([0, 1], [0, 0], 0.5)
    lengths[1] = 1000.0
    assert (world.step([0, 1], [1, 1], 0.5) - world.versions[1]).tolist() == pytest.approx([0.5, 500.0])


def test_theta_says_how_well_entries_foretell_updates() -> None:
    rng = np.random.default_rng(0)

    def noise(client: int, start: Tensor) -> Tensor:
        return torch.from_numpy(rng.normal(size=200))

    def own(client: int, start: Tensor) -> Tensor:
        return torch.full((200,), float(client)).double()

    thetas = []
    for train in (noise, own):
        world = World(Secant(), train, clients=10, length=200, trained=200)
        for number in range(20):
            world.step(range(10), [max(0, number - 1)] * 10, 0.01)
        thetas.append(world.secant.theta)
    assert thetas[0] < 0.1
    assert thetas[1] == pytest.approx(1.0)


def test_buffers_are_averaged_and_change_no_estimate() -> None:
    def train(client: int, start: Tensor) -> Tensor:
        return torch.cat([towards(client, start[:2]), 1000.0 * (client + 1) - start[2:]])

    with_buffer, without = World(Secant(), train, length=3), World(Secant(), towards)
    for clients, bases in [([0, 1, 2], [0, 0, 0]), ([0, 2], [1, 0]), ([1, 2], [1, 2])]:
        before = with_buffer.versions.model
        model = with_buffer.step(clients, bases, 0.25)
        assert torch.equal(model[:2], without.step(clients, bases, 0.25))
        expected = before[2] + sum(0.25 * (1000.0 * (k + 1) - float(before[2])) for k in clients)
        assert float(model[2]) == pytest.approx(float(expected))
    assert (with_buffer.secant.gamma, with_buffer.secant.theta) == (without.secant.gamma, without.secant.theta)


def test_several_updates_of_a_client_in_a_step_count_one_after_the_other() -> None:
    whole, parts = (World(Secant(), towards) for _ in range(2))
    for clients, bases in [([0, 1, 0], [0, 0, 0]), ([1, 1, 2, 0], [0, 1, 1, 1]), ([2, 2, 0], [1, 2, 2])]:
        one, other = whole.step(clients, bases, 0.2), parts.step(clients, bases, 0.2, most=1)
        assert torch.allclose(one, other)
        assert whole.secant.gamma == pytest.approx(parts.secant.gamma)
        assert whole.secant.theta == pytest.approx(parts.secant.theta)
    assert torch.allclose(whole.secant.entries(ids([2]))[0], towards(2, whole.versions[2]))


def test_before_there_are_entries_it_is_fedbuff_of_fresh_updates() -> None:
    some = updates([0, 1], [0.5, 0.3], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    made = [begun(kind(), torch.zeros(2), [1, 2]).step(step_of(1, Rule.DELTA, [some])) for kind in (Buffer, Secant)]
    assert torch.equal(*made)


def test_bases_are_versions_that_are_kept_for_their_entries() -> None:
    world = World(Secant(), towards, clients=1000)
    world.step([5, 900], [0, 0], 0.1)
    world.step([5, 6], [1, 1], 0.1)
    assert world.secant.references() == {0, 1}
    assert world.secant.tables()["updates"].numbers.tolist() == [5, 6, 900]
    world.step([900], [1], 0.1)
    assert world.secant.references() == {1}


def test_a_number_that_is_no_share_is_refused() -> None:
    with pytest.raises(SafaError, match=r"gamma must be from 0 to 1, or left out to be estimated, not 2"):
        Secant(gamma=2)


def test_long_rows_are_gone_through_in_blocks() -> None:
    """Rows of more than one block of columns, the last of them buffers, against the rule."""
    rng = np.random.default_rng(1)
    trained, length = 2**16 + 3, 2**16 + 7
    secant, literal, before = Secant(), Literal(), np.zeros(length)
    versions = Versions(torch.from_numpy(before), trained=trained)
    secant.begin(versions, np.ones(5), memory_mb=1.0)
    for version in range(1, 4):
        clients, base = ids(range(version - 1, version + 2)), ids([version - 1, max(0, version - 2), 0])
        start = versions.rows(base).numpy()
        rows = start + rng.normal(size=(1, length)) + 0.1 * rng.normal(size=(3, length)) - 0.3 * start
        weight = np.array([0.3, 0.2, 0.1])
        some = updates(
            clients.tolist(), weight.tolist(), torch.from_numpy(rows), base=base, start=torch.from_numpy(start)
        )
        model = secant.step(step_of(version, Rule.DELTA, [some]))
        cut = slice(0, trained)
        expected = literal.step(taken(clients, base, weight, rows[:, cut], start[:, cut], before[cut]))
        assert np.allclose(model[cut], expected)
        assert np.allclose(model[trained:], before[trained:] + weight @ (rows - before)[:, trained:])
        assert (secant.gamma, secant.theta) == pytest.approx((np.mean(literal.gamma), literal.theta))
        versions.add(version, model)
        before = model.numpy()


def taken(clients: Ids, base: Ids, weight: Row, rows: Row, start: Row, before: Row) -> TakenStep:
    return TakenStep(
        version=0,
        rule=Rule.DELTA,
        present=dict.fromkeys(range(5), 1.0),
        deprecated=ids([]),
        client=clients,
        base=base,
        weight=weight,
        picked=np.ones(len(clients), np.bool_),
        rows=rows,
        start=start,
        step_size=np.ones(len(clients)),
        before=before,
        makes_version=True,
    )
