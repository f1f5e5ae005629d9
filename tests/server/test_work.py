"""Parts of the work, and the rounds in which updates began, on their way from records to the source of updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa import replay
from safa.aggregation import registry
from safa.experiments.simulate import Experiment, resume, run_to_end, simulate
from safa.protocol import FedBuff, Protocol
from safa.protocol.records import Ids, RoundRecord, Rule, Verdict
from safa.runs import RunWriter, Settings
from safa.server import Server
from safa.server.learner import Learner
from safa.training import Score
from tests.protocol.helpers import PROTOCOLS, Sparing, arrive
from tests.server.literal import START, fake, resumed
from tests.sparing import install_sparing


class SparingFedBuff(Sparing, FedBuff):
    """FedBuff that asks for parts."""


MACHINES = {name: PROTOCOLS[f"{name} in parts"] for name in ("safa", "fedavg", "fedasync", "local")} | {
    "fedbuff": lambda sizes: SparingFedBuff(sizes, fraction=0.5, buffer_size=3, round_limit_s=20)
}
Asked = tuple[int, int, int, float]
"""Of an update: its client, its base, the round in which it began, and the share of the work."""


class Noting:
    """A source of updates that notes what it is asked for."""

    def __init__(self) -> None:
        self._inner: Any = fake()
        self.asked: list[Asked] = []

    def updates(
        self, clients: Ids, bases: Ids, start: Tensor, *, rounds: Ids, work: NDArray[np.float64], **given: Any
    ) -> Tensor:
        self.asked += zip(clients.tolist(), bases.tolist(), rounds.tolist(), work.tolist(), strict=True)
        rows: Tensor = self._inner.updates(clients, bases, start, rounds=rounds, work=np.ones(len(work)), **given)
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def records_of(protocol: Protocol) -> list[RoundRecord]:
    """Rounds in which some clients commit, of whom the last ones take long."""
    rng, records = np.random.default_rng(5), []
    for _ in range(8):
        now = max(0.0, protocol.now) + 1
        protocol.open_round(now=now, draws=rng.random(6), expected_s=np.arange(1.0, 7.0))
        for client in rng.permutation(6).tolist():
            if not protocol.done and protocol.expects(client):
                arrive(protocol, [client], protocol.now + 0.5)
        records.append(protocol.close_round(now=protocol.now if protocol.done else protocol.deadline))
    return records


def expected(records: list[RoundRecord]) -> Counter[Asked]:
    """What is to be asked for, from the records alone; of undrafted updates, all."""
    made, updates = {0: 0}, Counter[int]()
    found = Counter[Asked]()
    for record in records:
        made |= dict.fromkeys(range(max(made) + 1, record.version + 1), record.round)
        taken = np.flatnonzero(record.verdict != Verdict.REFUSED)
        for client, base, work in zip(record.client[taken], record.base[taken], record.work[taken], strict=True):
            began = updates[int(client)] if record.rule is Rule.OWN else made[int(base)]
            found[int(client), int(base), began + 1, float(work)] += 1
            updates[int(client)] += 1
    return found


def learner_of(protocol: Protocol, source: Noting) -> Learner:
    aggregator = registry.build(protocol.aggregator, {})
    return Learner(source, aggregator, START, np.ones(6), evaluate=lambda row: Score(0.0, {}))


@pytest.mark.parametrize("stops", [False, True], ids=["in one go", "resumed after every round"])
@pytest.mark.parametrize("name", MACHINES)
def test_the_source_is_asked_for_the_work_and_told_the_round(name: str, stops: bool) -> None:
    protocol, source = MACHINES[name](np.ones(6)), Noting()
    records = records_of(protocol)
    learner = learner_of(protocol, source)
    for record in records:
        learner.apply(record)
        if stops:
            learner = resumed(learner, learner_of(protocol, source))
    wanted, asked = expected(records), Counter(source.asked)
    if name in ("safa", "fedbuff"):  # some are overtaken, or still wait for the next version
        assert asked <= wanted
        assert asked.total() > 10
    else:
        assert asked == wanted
    assert {work for *_, work in source.asked} > {1.0}, "nobody was asked for a part"
    assert len({began for _, _, began, _ in source.asked}) > 3


def test_the_round_of_a_version_is_kept_for_those_that_are_needed_only() -> None:
    protocol = MACHINES["fedasync"](np.ones(6))
    learner = learner_of(protocol, Noting())
    for record in records_of(protocol):
        learner.apply(record)
    kept: Mapping[str, Tensor] = learner.state()
    assert sorted(kept["made_in"][:, 0].tolist()) == learner.versions.numbers.tolist()


def test_a_version_of_the_open_round_is_of_that_round() -> None:
    protocol = MACHINES["fedasync"](np.ones(4))
    server = Server(protocol, seed=0, rounds=3, learner=learner_of(protocol, Noting()))
    server.open_round(now=0.0, expected_s=np.ones(4))
    assert protocol.quota == 2
    arrive(protocol, [0], 1.0)
    server.start_model(0, 1)
    assert server.learner is not None
    assert server.learner.round_of(0, 1) == 2
    assert server.learner.round_of(1, 0) == 1


# -- a whole run -----------------------------------------------------------------------------------------------------


def test_a_run_with_parts_of_the_work_is_resumed_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_sparing(tmp_path / "packages", monkeypatch)
    given: dict[str, Any] = {"protocol": "sparing", "rounds": 6, "checkpoint_every": 2, "schedule": "cosine", "seed": 2}
    whole = simulate("boston", out=tmp_path / "whole", **given)
    assert {share for record in whole.records() for share in record.work.tolist()} == {0.5, 1.0}
    experiment = Experiment(Settings.of("boston", **given))
    records = run_to_end(experiment, RunWriter.begin(tmp_path / "stopped", experiment.settings))
    for _ in range(5):
        next(records)
    records.close()  # type: ignore[attr-defined]
    stopped = resume(tmp_path / "stopped")
    for file in ("rounds.jsonl", "model.safetensors"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "stopped" / file).read_bytes()
    again = replay(stopped)
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.model().items())


@pytest.mark.parametrize("trainer", ["batched", "serial"])
def test_less_work_makes_another_model(trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_sparing(tmp_path / "packages", monkeypatch)
    models = [
        simulate("boston", protocol=protocol, rounds=2, trainer=trainer).model() for protocol in ("fedavg", "sparing")
    ]
    assert any(not torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
