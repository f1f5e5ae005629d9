"""Metrics by hand, and the agreement between what is gathered round by round and what a record says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from safa.analysis import METRICS, Metrics, jain_index, measure, score_metrics
from safa.paper.times import PRINTED_TIMES, printed_times
from safa.protocol.records import EndedBy, RoundRecord, Rule, Verdict
from safa.runs.settings import Settings
from safa.simulation import run_rounds


def record(number: int, picked: list[int], undrafted: list[int], **given: Any) -> RoundRecord:
    """A round of 10 s in which 4 clients took part."""
    clients = [*picked, *undrafted]
    ids = np.array(clients, dtype=np.int64)
    verdict = np.array([Verdict.PICKED] * len(picked) + [Verdict.UNDRAFTED] * len(undrafted), dtype=np.int8)
    values: dict[str, Any] = {
        "round": number,
        "rule": Rule.CACHE,
        "opened_s": 10.0 * (number - 1),
        "closed_s": 10.0 * number,
        "ended_by": EndedBy.QUOTA,
        "version": number,
        "clients": 4,
        "quota": 2,
        "trained": 4,
        "version_variance": 0.5,
        "uploads": len(clients),
        "sent": np.arange(2),
        "sent_version": np.arange(2),
        "deprecated": np.empty(0, np.int64),
        "client": ids,
        "base": np.zeros_like(ids),
        "verdict": verdict,
        "refusal": np.zeros(len(ids), np.int8),
        "arrival_s": np.zeros(len(ids)),
        "weight": np.zeros(len(ids)),
        "into": np.where(verdict == Verdict.PICKED, number, -1),
        "work": np.ones(len(ids)),
        "crashed": np.empty(0, np.int64),
        "joined": np.empty(0, np.int64),
        "joined_size": np.empty(0),
        "left": np.empty(0, np.int64),
        "distribution_s": 1.0,
        "work_done": 4.0,
        "work_lost": 1.0,
    }
    return RoundRecord(**values | given)


def test_metrics_by_hand() -> None:
    values = measure([record(1, [0, 1], [2]), record(2, [0], [1])])
    assert values["round_length_s"] == 10.0
    assert values["t_dist_s"] == 1.0
    assert values["sync_ratio"] == 0.5
    assert values["effective_update_ratio"] == (2 + 1) / 8
    assert values["version_variance"] == 0.5
    assert values["futility"] == 0.25
    assert values["virtual_time_s"] == 20.0
    assert values["starved"] == 0.25  # client 3; client 2's bypassed update counted in round 2
    assert list(values) == list(METRICS | score_metrics({}))


def test_times_as_the_paper_prints_them() -> None:
    times = printed_times([record(1, [0, 1], [2]), record(2, [0], [1])])
    # T_dist is 1 s, then 2 s, since the paper never reset its count
    assert times == {"round_length_s_as_printed": 10.5, "t_dist_s_as_printed": 1.5}
    assert list(times) == list(PRINTED_TIMES)
    assert printed_times([]) == dict.fromkeys(PRINTED_TIMES, 0.0)


def test_an_undrafted_update_counts_one_version_later_unless_it_is_overwritten() -> None:
    metrics = Metrics()
    metrics.add(record(1, [0], [1, 2, 3]))
    assert metrics.merged.tolist() == [1, 0, 0, 0]
    metrics.add(record(2, [1], [], deprecated=np.array([2])))  # 1 is picked anew, 2 has to start over
    assert metrics.merged.tolist() == [1, 1, 0, 1]


def test_a_kept_update_waits_until_a_version_is_made() -> None:
    metrics = Metrics()
    metrics.add(record(1, [], [1], version=0))
    metrics.add(record(2, [], [1, 2], version=0))
    assert metrics.merged.tolist() == [0, 0, 0, 0]
    metrics.add(record(3, [0], [], version=1, into=np.array([1])))
    assert metrics.merged.tolist() == [1, 1, 1, 0]


def test_a_buffered_update_counts_when_the_buffer_is_full() -> None:
    metrics = Metrics()
    metrics.add(record(1, [0, 1, 0], [], version=1, into=np.array([1, 1, 2])))
    assert metrics.merged.tolist() == [1, 1, 0, 0]
    metrics.add(record(2, [3], [], version=2, into=np.array([2])))
    assert metrics.merged.tolist() == [2, 1, 0, 1]


def test_a_growing_fleet_is_counted() -> None:
    metrics = Metrics()
    metrics.add(record(1, [0], []))
    metrics.add(record(2, [6], [], clients=7, joined=np.array([4, 5, 6])))
    assert metrics.merged.tolist() == [1, 0, 0, 0, 0, 0, 1]


def test_refused_updates_are_counted_and_strangers_take_no_place() -> None:
    metrics = Metrics()
    metrics.add(record(1, [0], [99], verdict=np.array([0, 2], np.int8), refusal=np.array([0, 1], np.int8)))
    assert metrics.values()["refused"] == 1
    assert len(metrics.merged) == 4


def test_no_rounds_are_no_trouble() -> None:
    assert measure([])["round_length_s"] == 0.0


@pytest.mark.parametrize(("counts", "index"), [([3, 3, 3], 1.0), ([5, 0, 0, 0], 0.25), ([0, 0], 0.0)])
def test_jains_index(counts: list[int], index: float) -> None:
    assert jain_index(np.array(counts)) == pytest.approx(index)


@pytest.mark.parametrize("protocol", ["safa", "fedavg", "local", "fedasync", "fedbuff"])
def test_merged_counts_agree_with_a_literal_ledger(protocol: str) -> None:
    """Hold an entry per client and look which updates each new version is made of."""
    metrics = Metrics()
    merged = np.zeros(30, dtype=np.int64)
    entries: dict[int, bool] = {}  # client -> its latest update has not been merged yet
    buffered: list[tuple[int, int]] = []
    version = 0
    for round_record in run_rounds(Settings.of("mnist", protocol=protocol, clients=30, rounds=25, fraction=0.2)):
        metrics.add(round_record)
        for client in round_record.deprecated:
            entries.pop(int(client), None)
        for client, into in zip(round_record.picked, round_record.into[round_record.into > 0], strict=True):
            entries.pop(int(client), None)
            buffered.append((int(client), int(into)))
        if round_record.version > version:
            version = round_record.version
            for client in entries:
                merged[client] += 1
            entries.clear()
        for client, into in list(buffered):
            if into <= version:
                merged[client] += 1
                buffered.remove((client, into))
        entries.update(dict.fromkeys(round_record.undrafted.tolist(), True))
    assert metrics.merged.tolist() == merged.tolist()
