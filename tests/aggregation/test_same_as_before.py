"""The aggregators make the same bits as the learner and its cache did, which they replace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation import Aggregator, Step, Updates
from safa.aggregation.buffer import Buffer
from safa.aggregation.mean import Mean, PopulationMean
from safa.aggregation.mixing import Mixing
from safa.aggregation.model_cache import ModelCache
from safa.aggregation.own_models import OwnModels
from safa.aggregation.rows import Versions
from safa.server.learner import Learner
from safa.server.store import Cache, GlobalModels
from safa.protocol.records import Ids, RoundRecord, Rule, Verdict
from safa.runs.settings import Settings
from safa.simulation import make_fleet, run_rounds
from tests.aggregation.steps import ids

SIZE = 37


class Pretending:
    """A trainer that trains nothing: an update is the model it starts from, moved; some of them diverge."""

    layout: Any = None

    def __init__(self, *, diverging: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.towards = torch.randn(100, SIZE, generator=generator)
        self.diverging = diverging

    def train(self, clients: Ids, start: Tensor, *, epochs: int) -> Tensor:
        rows = 0.7 * start + 0.3 * self.towards[torch.from_numpy(clients % 100)]
        if self.diverging:
            rows[torch.from_numpy(np.flatnonzero(clients % 5 == 0))] = torch.nan
        return rows


class Scoreless:
    def evaluate(self, row: Tensor) -> tuple[float, float]:
        return 0.0, 0.0


class Server:
    """As much of a server as is needed to give an aggregator what is in a record."""

    def __init__(self, aggregator: Aggregator, trainer: Pretending, start: Tensor, sizes: NDArray[np.float64]) -> None:
        self.versions, self.aggregator, self.trainer = Versions(start), aggregator, trainer
        aggregator.begin(self.versions, sizes, memory_mb=4096.0)
        self.queue: list[Any] = []
        self.undrafted: NDArray[Any] = np.empty((0, 2), np.int64)

    def updates(self, client: Ids, base: Ids, weight: NDArray[np.float64], picked: NDArray[np.bool_]) -> Updates:
        own = self.aggregator.trains_own_models
        start = self.aggregator.entries(client) if own else self.versions.rows(base)
        rows = self.trainer.train(client, start, epochs=1)
        sound = torch.isfinite(rows).all(dim=1).numpy()
        at = torch.from_numpy(np.flatnonzero(sound))
        return Updates(client[sound], base[sound], weight[sound], picked[sound], rows[at], start[at])

    def make(self, version: int, record: RoundRecord, deprecated: Ids, asked: float, parts: Iterator[Updates]) -> None:
        step = Step(version, record.rule, asked, deprecated, parts)
        self.versions.add(version, self.aggregator.step(step))

    def apply(self, record: RoundRecord) -> None:
        if record.rule in (Rule.CACHE, Rule.OWN):
            self.apply_entries(record)
        else:
            self.apply_sums(record)

    def apply_entries(self, record: RoundRecord) -> None:
        now = record.verdict == Verdict.PICKED
        if record.rule is Rule.OWN:
            now = record.verdict != Verdict.REFUSED
        dead = np.isin(self.undrafted[:, 0], np.concatenate([record.client[now], record.deprecated]))
        late = self.undrafted[~dead]
        client = np.concatenate([late[:, 0], record.client[now]])
        base = np.concatenate([late[:, 1], record.base[now]])
        weight = np.concatenate([np.zeros(len(late)), record.weight[now]])
        picked = np.concatenate([np.zeros(len(late), np.bool_), record.verdict[now] == Verdict.PICKED])
        found = self.updates(client, base, weight, picked)
        if record.version > self.versions.latest:
            deprecated = np.setdiff1d(record.deprecated, record.picked)
            self.make(record.version, record, deprecated, float(weight.sum()), iter([found]))
        else:
            self.aggregator.keep(found)
        if record.rule is Rule.CACHE:
            left = record.verdict == Verdict.UNDRAFTED
            self.undrafted = np.stack([record.client[left], record.base[left]], axis=1)

    def apply_sums(self, record: RoundRecord) -> None:
        picked = record.verdict == Verdict.PICKED
        self.queue += zip(*(getattr(record, n)[picked] for n in ("client", "base", "weight", "into")), strict=True)
        for version in range(self.versions.latest + 1, record.version + 1):
            chosen = [one[:3] for one in self.queue if one[3] == version]
            client, base, weight = (
                map(np.array, zip(*chosen, strict=True)) if chosen else (ids([]), ids([]), np.empty(0))
            )
            parts = [self.updates(client, base, weight, np.ones(len(client), np.bool_))] if chosen else []
            self.make(version, record, ids([]), float(weight.sum()), iter(parts))
        self.queue = [one for one in self.queue if one[3] > record.version]


def both(protocol: str, aggregator: Aggregator, *, diverging: bool = False, **given: Any) -> Iterator[tuple[Any, Any]]:
    """The models of both after each round."""
    settings = Settings.of("boston", protocol=protocol, clients=20, rounds=50, **given)
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    records = list(run_rounds(settings))
    start = torch.randn(SIZE, generator=torch.Generator().manual_seed(2))
    trainer, scoreless = Pretending(diverging=diverging), Scoreless()
    old = Learner(trainer, scoreless, start, sizes, rule=records[0].rule, epochs=1)  # type: ignore[arg-type]
    new = Server(aggregator, trainer, start, sizes)
    for record in records:
        old.apply(record)
        new.apply(record)
        yield old.model, new.versions.model


@pytest.mark.parametrize(
    ("protocol", "aggregator", "given"),
    [
        ("safa", ModelCache(), {"lag_tolerance": 2}),
        ("safa", ModelCache(), {"clock": "paper"}),
        ("fedavg", Mean(), {}),
        ("fedavg", PopulationMean(), {"averaging": "population"}),
        ("fedcs", Mean(), {}),
        ("fedasync", Mixing(), {}),
        ("fedbuff", Buffer(), {"buffer_size": 3}),
        ("local", OwnModels(), {}),
    ],
)
def test_models_have_the_same_bits(protocol: str, aggregator: Aggregator, given: dict[str, Any]) -> None:
    models = list(both(protocol, aggregator, **given))
    assert all(torch.equal(old, new) for old, new in models)
    assert not torch.equal(models[0][1], models[-1][1])


@pytest.mark.parametrize(
    ("protocol", "aggregator", "given", "bits"),
    [
        ("safa", ModelCache(), {}, True),
        ("fedasync", Mixing(), {}, True),
        ("fedbuff", Buffer(), {"buffer_size": 3}, True),
        ("fedavg", PopulationMean(), {"averaging": "population"}, True),
        ("fedavg", Mean(), {}, False),  # scaled once they are summed, instead of before
    ],
)
def test_updates_that_diverge_are_left_out_as_before(
    protocol: str, aggregator: Aggregator, given: dict[str, Any], bits: bool
) -> None:
    for old, new in both(protocol, aggregator, diverging=True, **given):
        assert torch.isfinite(new).all()
        assert torch.equal(old, new) if bits else torch.allclose(old, new, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("memory_mb", [1e-9, 3e-3, 100.0])
def test_the_cache_has_the_same_bits(memory_mb: float) -> None:
    """Whatever is put and referred to, with entries in memory, in files or both, summed in chunks of any size."""
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, 50, 150).astype(np.float64)
    start = torch.from_numpy(rng.normal(size=SIZE)).float()
    models, versions = GlobalModels(start), Versions(start)
    old, new = Cache(sizes, models, memory_mb=memory_mb), ModelCache()
    new.begin(versions, sizes, memory_mb=memory_mb)
    for version in range(1, 45):
        clients = rng.permutation(150)[: rng.integers(0, 140)]
        rows = torch.from_numpy(rng.normal(size=(len(clients), SIZE))).float()
        deprecated = rng.permutation(150)[:20]
        old.put(clients, rows)
        picked = rng.random(len(clients)) < 0.7
        old.refer(np.setdiff1d(deprecated, clients[picked]), version - 1)
        weight = np.where(picked, sizes[clients] / sizes.sum(), 0.0)
        part = Updates(clients, np.zeros_like(clients), weight, picked, rows, torch.zeros_like(rows))
        model = new.step(Step(version, Rule.CACHE, float(weight.sum()), deprecated, iter([part])))
        models.add(version, old.aggregate())
        versions.add(version, model)
        assert torch.equal(models[version], model)
    assert new.references() == old.references
    assert torch.equal(old.entries(np.arange(150)), new.entries(np.arange(150)))
