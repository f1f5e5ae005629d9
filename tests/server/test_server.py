"""The server: versions of open rounds, resumption, updates that nobody needs, and weights as the record has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation import registry
from safa.analysis import measure
from safa.errors import SafaError
from safa.protocol import FedAsync, FedAvg, FedBuff, Protocol, Safa
from safa.protocol.machine import Settlement
from safa.protocol.records import Ids, RoundRecord, Verdict
from safa.runs import RunWriter, Settings, load_run
from safa.server import Server
from safa.server.inbox import Inbox
from safa.server.learner import Learner, UpdateSource
from safa.server.resume import find_checkpoint
from safa.training import Score
from tests.protocol.helpers import PROTOCOLS
from tests.server.literal import SIZES, START, Fake, LiteralFleet, change_fleet, fake, run_round


def score_of(model: Tensor) -> Score:
    return Score(float(model.abs().sum()), {"first": float(model[0])})


def server_of(protocol: Protocol, source: UpdateSource, *, aggregator: str = "", **given: Any) -> Server:
    """A server that learns from the updates of a source."""
    made = registry.build(aggregator or protocol.aggregator, {})
    learner = Learner(source, made, START, protocol.sizes.copy(), evaluate=score_of)
    return Server(protocol, seed=3, rounds=ROUNDS, learner=learner, **given)


def model_of(server: Server) -> Tensor:
    assert server.learner is not None
    return server.learner.model


ROUNDS = 14

# -- versions of an open round -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "make",
    [
        lambda: FedAsync(SIZES, fraction=1.0, round_limit_s=20),
        lambda: FedBuff(SIZES, fraction=1.0, buffer_size=1, round_limit_s=20),
        lambda: FedBuff(SIZES, fraction=1.0, buffer_size=3, round_limit_s=20),
    ],
    ids=["fedasync", "fedbuff of one", "fedbuff of three"],
)
def test_a_version_of_an_open_round_is_what_the_close_makes(make: Callable[[], Protocol], seed: int) -> None:
    """One server is asked for models in mid-round, another never; the literal learner knows the closed rounds only."""
    asked, never = server_of(make(), fake()), server_of(make(), fake())
    literal = LiteralFleet(asked.protocol, Fake())
    choice = np.random.default_rng([seed, 99])
    early = 0
    for number in range(ROUNDS):
        sent: dict[int, Tensor] = {}

        def ask(client: int, base: int, sent: dict[int, Tensor] = sent) -> None:
            version = int(asked.protocol.versions[client])  # what it is answered with
            if choice.random() < 0.6:
                sent[version] = asked.start_model(client, version)

        change_fleet(asked.protocol, np.random.default_rng([seed, number, 0]))
        change_fleet(never.protocol, np.random.default_rng([seed, number, 0]))
        closed = run_round(asked, np.random.default_rng([seed, number, 1]), ask)
        record, other = asked.commit(closed), never.commit(run_round(never, np.random.default_rng([seed, number, 1])))
        assert record.to_json() == other.to_json()
        assert torch.equal(model_of(asked), model_of(never))
        before = literal.latest
        literal.apply(record)
        for version, model in sent.items():
            torch.testing.assert_close(model, literal.models[version], rtol=1e-9, atol=1e-9)
        early += sum(version > before for version in sent)
    assert early > ROUNDS / 2


def test_an_update_of_a_version_that_was_made_early_is_used_once() -> None:
    protocol = FedBuff([1, 1, 1, 1], fraction=1.0, buffer_size=2)
    inbox = Inbox(START, memory_mb=1.0)
    server = server_of(protocol, inbox)
    asked: list[Tensor] = []

    def accept(client: int, base: int) -> None:
        inbox.put(client, base, START + client + 1)
        asked.append(server.start_model(client, int(protocol.versions[client])))

    record = server.commit(run_round(server, np.random.default_rng(5), accept))
    assert server.learner is not None
    into = record.into[record.verdict == Verdict.PICKED]
    assert server.learner.asked_for == np.count_nonzero(into <= record.version) > 2
    assert len(inbox) == np.count_nonzero(into > record.version)
    assert torch.equal(asked[-1], model_of(server))


# -- resumption --------------------------------------------------------------------------------------------------------


class Deployment:
    """A server whose clients come, leave and send any updates; what happens in a round depends on its number alone."""

    def __init__(self, name: str, writer: RunWriter | None = None) -> None:
        self.inbox = Inbox(START, memory_mb=2 * 8 * 8 / 2**20)
        self.server = server_of(PROTOCOLS[name](SIZES), self.inbox, writer=writer, checkpoint_every=2)

    def run(self, until: int) -> list[str]:
        records = []
        for number in range(self.server.protocol.round + 1, until + 1):
            rng = np.random.default_rng([17, number])
            change_fleet(self.server.protocol, rng)
            closed = run_round(self.server, rng, lambda client, base, rng=rng: self._put(client, base, rng))  # type: ignore[misc]
            records.append(self.server.commit(closed).to_json())
        return records

    def _put(self, client: int, base: int, rng: np.random.Generator) -> None:
        self.inbox.put(client, base, torch.from_numpy(rng.normal(size=len(START))))


def stopped(folder: Path, name: str, after: int) -> list[str]:
    """A deployment that was killed after so many rounds."""
    settings = Settings.of("boston", protocol=PROTOCOLS[name](SIZES).name, clients=len(SIZES), rounds=ROUNDS)
    writer = RunWriter.begin(folder, settings)
    records = Deployment(name, writer).run(after)
    writer.close()
    return records


def resumed(folder: Path, name: str) -> Deployment:
    run = load_run(folder)
    found = find_checkpoint(run)
    again = Deployment(name)
    again.server.resume(run, found)
    again.server.writer = RunWriter.resume(run, found.rounds)
    return again


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_server_is_resumed_to_the_same_records_and_the_same_model(name: str, tmp_path: Path) -> None:
    """Its protocol's state is in the checkpoint; it is stopped twice, after a checkpoint and between two."""
    whole = Deployment(name)
    expected = whole.run(ROUNDS)
    assert whole.server.protocol.clients > len(SIZES)
    assert any('"left":[' in line and '"left":[]' not in line for line in expected[2:9])
    stopped(tmp_path / "run", name, 5)
    first = resumed(tmp_path / "run", name)
    assert first.server.finished == first.server.protocol.round == 4
    assert first.run(10) == expected[4:10]
    assert first.server.writer is not None
    first.server.writer.close()
    second = resumed(tmp_path / "run", name)
    assert second.server.finished == 10
    assert second.run(ROUNDS) == expected[10:]
    assert second.server.writer is not None
    second.server.writer.close()
    assert torch.equal(model_of(second.server), model_of(whole.server))
    assert len(second.inbox) == len(whole.inbox)
    assert second.server.metrics.values() == whole.server.metrics.values()
    assert (tmp_path / "run" / "rounds.jsonl").read_text().splitlines() == expected


def test_the_checkpoint_of_another_protocol_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "run", "fedavg", 3)
    run = load_run(tmp_path / "run")
    with pytest.raises(SafaError, match="does not hold the state of safa"):
        Deployment("safa").server.resume(run, find_checkpoint(run))


# -- updates that nobody needs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregator", ["mean", "population", "cache"])
def test_undrafted_updates_are_discarded_where_there_is_no_entry_for_them(aggregator: str) -> None:
    inbox = Inbox(START, memory_mb=1.0)
    protocol = Safa(SIZES, fraction=0.5, lag_tolerance=2, round_limit_s=9)
    server = server_of(protocol, inbox, aggregator=aggregator)
    rng = np.random.default_rng(2)
    undrafted = 0
    for _ in range(ROUNDS):
        rows: dict[int, Tensor] = {}

        def accept(client: int, base: int, rows: dict[int, Tensor] = rows) -> None:
            rows[client] = torch.from_numpy(rng.normal(size=len(START)))
            inbox.put(client, base, rows[client])

        record = server.commit(run_round(server, rng, accept))
        undrafted += len(record.undrafted)
        assert len(inbox) == (len(record.undrafted) if aggregator == "cache" else 0)
        if aggregator == "mean" and len(record.picked):
            share = SIZES[record.picked] / SIZES[record.picked].sum()
            expected = sum(part * rows[client] for part, client in zip(share, record.picked.tolist(), strict=True))
            torch.testing.assert_close(model_of(server), expected, rtol=1e-12, atol=1e-12)
    assert undrafted > 3


# -- weights -----------------------------------------------------------------------------------------------------------


class Favouring(Safa):
    """SAFA of another package, whose weights are its own: clients of odd numbers count five times as much."""

    name = "favouring"

    def _settle(self, clients: Ids, late: NDArray[np.bool_]) -> Settlement:
        verdict, weight, into = super()._settle(clients, late)
        return verdict, weight * np.where(clients % 2, 1.0, 0.2), into


class Naive:
    """Eq. 6-8 and the means, with whatever weights a record has: dictionaries, summed from scratch."""

    def __init__(self) -> None:
        self.models = {0: START}
        self.entry = dict.fromkeys(range(len(SIZES)), START)
        self.coefficient = dict(enumerate(SIZES / SIZES.sum()))

    def updates(self, record: RoundRecord) -> dict[int, Tensor]:
        taken = record.verdict != Verdict.REFUSED
        pairs = zip(record.client[taken].tolist(), record.base[taken].tolist(), strict=True)
        return {k: Fake().train(np.array([k]), self.models[base].unsqueeze(0), epochs=1)[0] for k, base in pairs}

    def apply(self, record: RoundRecord, aggregator: str) -> Tensor:
        updates = self.updates(record)
        weight = {int(k): float(w) for k, w in zip(record.client, record.weight, strict=True) if w}
        before = self.models[record.version - 1]
        model = before
        if aggregator == "cache":
            model = self.cached(record, updates, weight, before)
        elif weight:
            total = sum(weight.values())
            scale = 1 / total if aggregator == "mean" else 1.0
            model = (1 - scale * total) * before + sum(scale * w * updates[k] for k, w in weight.items())
        self.models[record.version] = model
        return model

    def cached(
        self, record: RoundRecord, updates: dict[int, Tensor], weight: dict[int, float], before: Tensor
    ) -> Tensor:
        self.entry |= dict.fromkeys(record.deprecated.tolist(), before)
        self.entry |= {client: updates[client] for client in weight}
        self.coefficient |= weight
        total = sum(self.coefficient.values())
        model = sum((self.coefficient[k] / total * entry for k, entry in self.entry.items()), torch.zeros_like(START))
        self.entry |= {int(client): updates[int(client)] for client in record.undrafted}
        return model


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("aggregator", ["cache", "mean", "population"])
def test_the_weights_of_the_record_are_the_weights_that_are_used(aggregator: str, seed: int) -> None:
    models = []
    for kind in (Safa, Favouring):
        rng = np.random.default_rng(seed)
        protocol = kind(SIZES, fraction=0.5, lag_tolerance=2, round_limit_s=9)
        server, naive = server_of(protocol, fake(), aggregator=aggregator), Naive()
        for _ in range(ROUNDS):
            record = server.commit(run_round(server, rng))
            expected = naive.apply(record, aggregator)
            torch.testing.assert_close(model_of(server), expected, rtol=1e-10, atol=1e-10)
        models.append(model_of(server))
    assert (models[0] - models[1]).abs().max() > 1e-3, "other weights made no difference"


# -- a server without ... ----------------------------------------------------------------------------------------------


def test_without_a_learner_a_server_only_decides() -> None:
    server = Server(FedAvg(SIZES, fraction=0.5), seed=1, rounds=3)
    records = [server.commit(run_round(server, np.random.default_rng(0))) for _ in range(3)]
    assert [record.loss for record in records] == [None] * 3
    assert server.metrics.values() == measure(records)


def test_clients_are_drawn_by_seed_and_round() -> None:
    def drawn(seed: int) -> list[list[int]]:
        server = Server(FedAvg(np.ones(20), fraction=0.2, round_limit_s=1.0), seed=seed, rounds=3)
        found = []
        for number in range(3):
            found.append(server.open_round(now=2.0 * number, expected_s=np.ones(20)).sync.tolist())
            server.close_round(now=2.0 * number + 1)
        return found

    assert drawn(4) == drawn(4)
    assert drawn(4) != drawn(5)
    assert len({tuple(clients) for clients in drawn(4)}) == 3
