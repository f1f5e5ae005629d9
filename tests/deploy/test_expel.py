"""What a client weighs, whatever it declares; and how the operator gets rid of one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safa.aggregation.model_cache import ModelCache
from safa.analysis.client_map import client_map
from safa.deploy.exchange.codec import encode
from safa.deploy.exchange.coordinator import Coordinator
from safa.deploy.exchange.files import EXPEL
from safa.deploy.exchange.messages import JoinReply, Reply, TrainRequest, Update
from safa.deploy.exchange.screening import RejectReason
from safa.errors import SafaError
from safa.experiments.replay import replay
from safa.protocol import Safa
from safa.runs import load_run
from tests.deploy.harness import PROTOCOLS, Harness, apart, fed_again, prepare
from tests.protocol.helpers import arrive, open_round


def number_of(harness: Harness, name: str) -> int:
    number = harness.coordinator.membership.roster.number_of(name)
    assert number is not None
    return number


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_declared_size_counts_up_to_a_multiple_of_the_median(
    tmp_path: Path, log: pytest.LogCaptureFixture, protocol: str
) -> None:
    harness = Harness(tmp_path, {"protocol": protocol, "buffer_size": 3, "rounds": 6, "fraction": 1.0})
    harness.peers[0].declares = 1e6
    run = harness.run()
    roster = harness.coordinator.membership.roster
    median = sorted(member.size for member in (roster[number] for number in range(4)))[1]
    sizes = harness.coordinator.protocol.sizes
    assert sizes.max() == sizes[number_of(harness, "client-0")] == 5 * median
    assert f"bounded: client-0 declared n_k = 1e+06, which counts as {5 * median:g}" in log.text
    assert log.text.count("bounded: ") == 1
    first = next(run.records())
    assert first.joined_size.max() == 5 * median
    if protocol in ("safa", "fedavg", "fedcs"):
        assert max(record.weight.max() for record in run.records()) < 0.7, "with 1e6 it would be 0.9997"
    assert apart(replay(run), run.model()) <= 1e-6
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_without_a_multiple_a_size_counts_as_declared(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    harness = Harness(tmp_path, {"rounds": 1}, {"size_multiple": math.inf})
    harness.peers[0].declares = 1e6
    harness.run()
    assert harness.coordinator.protocol.sizes.max() == 1e6
    assert "bounded" not in log.text


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_bound_follows_the_fleet_and_so_do_records_and_model(
    tmp_path: Path, log: pytest.LogCaptureFixture, protocol: str
) -> None:
    """Large clients come, so that the median grows, and leave again; the bounded one is resized in mid-run."""
    given = {"protocol": protocol, "buffer_size": 3, "clients": 6, "rounds": 14, "fraction": 0.5}
    harness = Harness(tmp_path, given, {"start_with": 3, "leave_after_s": 8.0})
    declared = [10.0, 10.0, 400.0, 300.0, 300.0, 300.0]
    for peer, size in zip(harness.peers, declared, strict=True):
        peer.declares = size
    for peer in harness.peers[3:]:
        peer.is_online = False
    harness.run(until=harness.in_round(3))
    large = number_of(harness, "client-2")
    assert harness.coordinator.protocol.sizes[large] == 50.0
    for peer in harness.peers[3:]:
        peer.is_online = True
    harness.run(until=harness.in_round(6))
    assert harness.coordinator.protocol.sizes[large] == 400.0
    for peer in harness.peers[3:]:
        peer.is_online = False
    harness.run(until=lambda: harness.coordinator.protocol.sizes[large] == 50.0)
    run = harness.run()
    records = list(run.records())
    resized = [record.round for record in records if large in record.left and large in record.joined]
    assert len(resized) >= 2
    assert np.all(records[resized[0] - 1].joined_size[records[resized[0] - 1].joined == large] == 400.0)
    assert log.text.count("bounded: client-2") == 2
    assert apart(replay(run), run.model()) <= 1e-6
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_a_client_whose_size_changes_stays_at_work_on_the_map() -> None:
    """Left and joined in one record is a new size: it is no newcomer, and does not lose what it is at work on."""
    safa = Safa([1, 1, 1], fraction=0.3, lag_tolerance=9)
    records = []
    for number in range(2):
        open_round(safa, float(number))
        arrive(safa, [number], number + 0.5)
        records.append(safa.close_round(now=number + 0.5))
        safa.resize([2], [9.0 + number])
    assert records[1].left.tolist() == records[1].joined.tolist() == [2]
    assert client_map(records).base[1, 2] == 0
    assert client_map(records).state[1, 2] == client_map(records).state[0, 2]


def test_a_device_that_returns_with_other_data_keeps_its_weight_and_that_is_reported(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    harness = Harness(tmp_path, {"rounds": 4})
    harness.run(until=harness.in_round(2))
    number, peer = number_of(harness, "client-1"), harness.peers[1]
    before = harness.coordinator.protocol.sizes[number]
    peer.declares = 99.0
    harness.restart(peer)
    harness.run()
    assert harness.coordinator.protocol.sizes[number] == before
    (told,) = [line for line in log.messages if "declares n_k" in line]
    assert told.startswith(f"client-1 declares n_k = 99, but enrolled with {before:g}, which counts")
    assert "safa deploy expel" in told


def test_one_huge_first_update_of_a_heavy_client_is_refused(tmp_path: Path) -> None:
    """The attack: a declared n_k of 1e6 and an update a thousand times too large, before anybody else has voted."""
    harness = Harness(tmp_path, {"rounds": 6, "fraction": 1.0}, {"rejections_allowed": 1}, delays_s={0: 1.0})
    harness.peers[0].declares = 1e6
    harness.peers[0].forge = scaled(1000.0)
    run = harness.run()
    assert run.summary is not None
    assert run.summary["refusals"] == {str(RejectReason.NORM): 1}
    honest = Harness(tmp_path / "honest", {"rounds": 6, "fraction": 1.0}).run()
    assert honest.summary is not None
    assert run.summary["last_loss"] < 1.2 * honest.summary["last_loss"]


def scaled(factor: float) -> Any:
    """A device that makes its change so many times as large; boston starts from zero."""

    def forge(request: TrainRequest, answer: Reply) -> Reply:
        assert isinstance(answer, Update)
        tensors = {
            name: np.frombuffer(packed.data, np.float32).reshape(packed.shape) * np.float32(factor)
            for name, packed in answer.encoded.tensors.items()
        }
        return replace(answer, encoded=encode(tensors, "float32"))

    return forge


def test_a_wrong_multiple_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SafaError, match="size_multiple"):
        prepare(tmp_path / "run", {}, {"size_multiple": 0.0})


# -- expelling -------------------------------------------------------------------------------------------------------


def ask(harness: Harness, *names: str) -> None:
    (harness.folder / "run" / EXPEL).write_text(json.dumps(names))


def test_an_expelled_client_is_out_of_the_sum_at_the_next_round(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Its bad entry is in w(2) and out of w(3): the sum is that of the others' entries, by their n_k."""
    harness = Harness(tmp_path, {"rounds": 3, "fraction": 1.0, "lag_tolerance": 5})
    harness.peers[1].forge = scaled(5.0)
    harness.run(until=harness.in_round(2))
    ask(harness, "client-1")
    number = number_of(harness, "client-1")
    run = harness.run()
    assert "expelled: client-1" in log.text
    records = list(run.records())
    assert number in records[2].left
    assert number not in np.concatenate([records[2].client, records[2].sent])
    cache = harness.coordinator._learning.aggregator
    assert isinstance(cache, ModelCache)
    others = np.array([client for client in range(4) if client != number])
    sizes = harness.coordinator.protocol.sizes[others]
    entries = cache.entries(others).double().numpy()
    row = (sizes / sizes.sum()) @ entries
    made = harness.coordinator._learning.learner.model.numpy()
    assert np.abs(row - made).max() <= 1e-6
    assert np.abs(cache.entries(np.array([number])).numpy()[0] - made).max() > 1e-3, "its entry would have been seen"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_after_an_expulsion_records_and_model_agree(tmp_path: Path, protocol: str) -> None:
    harness = Harness(tmp_path, {"protocol": protocol, "buffer_size": 3, "rounds": 8})
    harness.run(until=harness.in_round(3))
    ask(harness, "client-1")
    run = harness.run()
    number = next(n for n, member in enumerate(run.roster() or []) if member["name"] == "client-1")
    left = [record.round for record in run.records() if number in record.left]
    assert len(left) == 1
    assert all(number not in record.client for record in run.records() if record.round >= left[0])
    assert apart(replay(run), run.model()) <= 1e-6
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_an_expelled_client_stays_out_until_it_is_unblocked_and_is_a_new_one_then(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    harness = Harness(tmp_path, {"rounds": 12})
    harness.run(until=harness.in_round(2))
    old = number_of(harness, "client-1")
    ask(harness, "client-1", "nobody\x1b[2J")
    harness.run(until=harness.in_round(4))
    assert not (tmp_path / "run" / EXPEL).exists()
    assert "there is no client 'nobody\\x1b[2J' to expel" in log.text
    harness.restart(harness.peers[1])  # another node id changes nothing
    harness.run(until=harness.in_round(5))
    assert "expelled: 'client-1' is of a client that was expelled" in log.text
    harness.kill_server()
    harness.run(until=harness.in_round(6))
    assert harness.coordinator.membership.roster.number_of("client-1") is None
    assert int(harness.coordinator.protocol.active.sum()) == 3
    harness.coordinator.stop()
    harness.peers[1].declares = 33.0
    (tmp_path / "run" / "unblock.json").write_text(json.dumps(["client-1"]))
    harness.kill_server()
    requests = len(harness.peers[1].requests)
    run = harness.run()
    new = number_of(harness, "client-1")
    assert (old, new) == (1, 4)
    assert harness.coordinator.protocol.sizes[new] == 33.0
    assert "client-1 is unblocked: it may enrol as a new client" in log.text
    joined = next(record for record in run.records() if new in record.joined)
    first = harness.peers[1].requests[requests]
    assert first.version == joined.round - 1, "it starts from the latest model"
    assert first.model is not None
    assert [member["name"] for member in run.roster() or []].count("client-1") == 2
    assert apart(replay(run), run.model()) <= 1e-6
    assert apart(fed_again(run), run.model()) <= 1e-6


@pytest.mark.parametrize("left", ["expel.json", "expel.applying.json"])
def test_an_expulsion_survives_whatever_is_killed(tmp_path: Path, log: pytest.LogCaptureFixture, left: str) -> None:
    """The file is taken away when a checkpoint holds it; a server that was killed before finds it again."""
    harness = Harness(tmp_path, {"rounds": 6})
    harness.run(until=harness.in_round(3))
    harness.coordinator.stop()
    (tmp_path / "run" / left).write_text(json.dumps(["client-2"]))
    harness.kill_server()
    assert not (tmp_path / "run" / left).exists()
    harness.kill_server()
    assert harness.coordinator.membership.roster.expelled == ["client-2"]
    (tmp_path / "run" / left).write_text(json.dumps(["client-2"]))  # killed after the checkpoint, before the removal
    harness.kill_server()
    assert log.text.count("expelled: client-2") == 1
    assert "there is no client" not in log.text
    harness.run()


def test_an_answer_of_an_expelled_client_is_refused(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    harness = Harness(tmp_path, {"rounds": 12, "fraction": 0.25}, delays_s={3: 20.0})
    harness.run(until=harness.in_round(2))
    ask(harness, "client-3")
    run = harness.run()
    assert run.summary is not None
    assert run.summary["refusals"][str(RejectReason.EXPELLED)] == 1
    assert "rejected: client-3, expelled" in log.text


@pytest.mark.parametrize("content", ["{", "3", '{"a": 1}', "[1]", "\xff"])
def test_a_file_that_names_nobody_is_ignored(tmp_path: Path, log: pytest.LogCaptureFixture, content: str) -> None:
    harness = Harness(tmp_path, {"rounds": 3})
    harness.run(until=harness.in_round(2))
    (tmp_path / "run" / EXPEL).write_bytes(content.encode("latin-1"))
    harness.run()
    assert "is not a list of names; ignored" in log.text
    assert load_run(tmp_path / "run").summary is not None


def test_a_client_whose_key_is_revoked_leaves_at_once(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    prepare(tmp_path / "run", {"rounds": 2}, {"start_with": 2})
    nodes = tmp_path / "run" / "nodes.json"
    nodes.write_text(json.dumps({"7": "ann", "8": "bob"}))
    coordinator = Coordinator(tmp_path / "run", now=0.0)
    coordinator.on_nodes([7, 8], now=1.0)
    for outgoing in list(coordinator.outbox):
        coordinator.on_reply(outgoing, JoinReply(name="ann" if outgoing.node == 7 else "bob", size=10.0), now=2.0)
    assert coordinator.membership.roster.present == [0, 1]
    nodes.unlink()
    nodes.write_text(json.dumps({"8": "bob"}))
    coordinator.on_nodes([7, 8], now=3.0)
    assert coordinator.membership.roster.present == [1]
    assert "ann has left: its key is revoked" in log.text
    nodes.unlink()
    nodes.write_text(json.dumps({"8": "bob", "9": "ann"}))  # a new key, and with it a new node
    coordinator.on_nodes([8], now=4.0)
    assert coordinator.membership.roster.present == [1]
    coordinator.stop()
