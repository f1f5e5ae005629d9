"""FedCompass: who is in which group, and when a group is over."""

from __future__ import annotations

import numpy as np
import pytest

from safa.errors import SafaError
from safa.protocol import Events, FedCompass
from safa.protocol.records import EndedBy, Refusal
from tests.protocol.helpers import arrive, lose


def compass(expected_s: list[float], **settings: float) -> FedCompass:
    """A round is open, of clients that take so long for all their work."""
    protocol = FedCompass(np.ones(len(expected_s)), **{"fraction": 1.0} | settings)
    reopen(protocol, expected_s, 0.0)
    return protocol


def reopen(protocol: FedCompass, expected_s: list[float], now: float) -> list[int]:
    dispatch = protocol.open_round(now=now, draws=np.zeros(protocol.clients), expected_s=expected_s)
    return [int(client) for client in dispatch.sync]


def answered(protocol: FedCompass, client: int, at_s: float) -> list[int]:
    receipt = protocol.receive(Events.arrivals([client], protocol.versions[[client]], at_s=at_s))
    assert receipt.sync_s.tolist() == [at_s] * len(receipt.sync)
    return [int(other) for other in receipt.sync]


def test_a_slow_client_does_the_work_that_fits_the_group_of_a_fast_one() -> None:
    """The first takes 10 s, the second 40 s: a quarter of its work. The third would have to do less than a fifth."""
    protocol = compass([10, 40, 80])
    assert protocol.work.tolist() == [1, 0.25, pytest.approx((12 + 10) / 80)]


def test_a_group_is_sent_the_next_model_together() -> None:
    protocol = compass([10, 40])
    assert answered(protocol, 0, 10.0) == []
    assert protocol.version == 0
    assert answered(protocol, 1, 10.0) == [0, 1]
    assert protocol.version == 1
    record = protocol.close_round(now=10.0)
    assert record.into.tolist() == [1, 1]
    assert record.weight.tolist() == [0.5, 0.5]
    assert record.sent.tolist() == [0, 1, 0, 1]
    assert record.sent_version.tolist() == [0, 0, 1, 1]


def test_a_client_that_waits_cannot_commit_again() -> None:
    protocol = compass([10, 40])
    answered(protocol, 0, 10.0)
    assert arrive(protocol, [0], 10.5) == [Refusal.SECOND_COMMIT]


def test_a_change_goes_into_the_version_that_is_made_next() -> None:
    """0 waits for 1; then 2, alone in its group, makes a version, of which the change of 0 is a part."""
    protocol = compass([10, 40, 16], step_ratio=0.2)
    assert protocol.work.tolist() == [1, 0.25, 0.625]
    protocol = compass([10, 12.5, 11], step_ratio=0.9)
    assert protocol.work.tolist() == [1, 1, pytest.approx(10 / 11)]  # 1 is alone, 2 is with 0
    answered(protocol, 0, 10.0)
    assert answered(protocol, 1, 12.4) == [0, 1]  # 2 is overdue: 0 need not wait for it
    assert protocol.record_so_far().into.tolist() == [1, 1]
    assert answered(protocol, 2, 12.45) == [2]  # late, and answered at once
    assert protocol.record_so_far().weight[2] == pytest.approx(1 / 3 / 2**0.5)


def test_who_waits_is_left_alone_when_a_record_opens() -> None:
    protocol = compass([10, 40], fraction=0.5)
    answered(protocol, 0, 10.0)
    assert protocol.close_round(now=10.0).ended_by is EndedBy.QUOTA
    assert reopen(protocol, [10, 40], 10.0) == []
    assert answered(protocol, 1, 10.5) == [0, 1]


def test_who_waits_for_a_client_that_retired_or_is_overdue_starts_anew() -> None:
    for retires, now in ((True, 10.0), (False, 12.5)):
        protocol = compass([10, 40])
        answered(protocol, 0, 10.0)
        lose(protocol, [1], 10.0)
        assert protocol.close_round(now=10.0).ended_by is EndedBy.NOBODY_LEFT
        if retires:
            protocol.retire([1])
        assert reopen(protocol, [10, 40], now) == [0]
        assert protocol.version == 0


def test_a_client_that_nobody_knows_is_answered_at_once() -> None:
    protocol = compass([0, 40])
    assert protocol.work.tolist() == [1, 1]
    assert answered(protocol, 0, 3.0) == [0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step_ratio": 0.0}, "step_ratio must be above 0"),
        ({"late_factor": 0.9}, "late_factor must be at least 1"),
        ({"server_lr": 0.0}, "server_lr must be above 0"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(SafaError, match=message):
        FedCompass([1], fraction=1.0, **wrong)
