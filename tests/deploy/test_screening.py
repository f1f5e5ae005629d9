"""The gate: every reason, what a refusal may change, and how far the median can be moved."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from safa.deploy.exchange.screening import Rejected, RejectReason, Screen, Screening, delta_norm, shown
from safa.errors import SafaError

Tensors = dict[str, NDArray[Any]]
BASE: Tensors = {"w": np.zeros(4, np.float32), "b": np.zeros((), np.float32), "steps": np.array(10)}
GOOD: dict[str, Any] = {"size_bytes": 10, "version": 3, "latest": 5, "held": {3, 4, 5}, "asked": True}


def update(norm: float, **changed: NDArray[Any]) -> Tensors:
    return BASE | {"w": np.array([norm, 0, 0, 0], np.float32), "steps": np.array(99)} | changed


def screening(**settings: Any) -> Screening:
    return Screening(Screen(**{"max_bytes": 100, "rejections_allowed": 1000} | settings))


def reason(refused: Rejected | None) -> RejectReason | None:
    return refused and refused.reason


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"client": None}, RejectReason.UNKNOWN_CLIENT),
        ({"asked": False}, RejectReason.NOT_ASKED),
        ({"size_bytes": 100}, None),
        ({"size_bytes": 101}, RejectReason.TOO_LARGE),
        ({"version": 6}, RejectReason.FUTURE_VERSION),
        ({"version": 10**5000}, RejectReason.FUTURE_VERSION),
        ({"version": 2}, RejectReason.UNKNOWN_VERSION),
        ({"version": -1}, RejectReason.UNKNOWN_VERSION),
        ({"version": "3"}, RejectReason.UNKNOWN_VERSION),
        ({"version": 3.0}, RejectReason.UNKNOWN_VERSION),
        ({"version": True, "held": {1}}, RejectReason.UNKNOWN_VERSION),
    ],
)
def test_the_checks_before_decoding(change: dict[str, Any], expected: RejectReason | None) -> None:
    gate = screening()
    given = {"client": 7} | GOOD | change
    assert reason(gate.admit(**given)) is expected
    assert gate.counts == ({expected: 1} if expected else {})


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (update(1), None),
        (update(10), None),
        (update(10.5), RejectReason.NORM),
        (update(3e38), RejectReason.NORM),
        (update(math.nan), RejectReason.NOT_FINITE),
        (update(-math.inf), RejectReason.NOT_FINITE),
        (update(1, w=np.zeros(5, np.float32)), RejectReason.SHAPES),
        (update(1, more=np.zeros(1)), RejectReason.SHAPES),
        ({"w": BASE["w"]}, RejectReason.SHAPES),
        (update(1, w=np.zeros(4)), RejectReason.DTYPES),
        (Rejected(RejectReason.UNREADABLE, "w has no bytes"), RejectReason.UNREADABLE),
    ],
)
def test_the_checks_of_the_content(sent: Tensors | Rejected, expected: RejectReason | None) -> None:
    gate = screening(norm_bound=10.0)
    assert reason(gate.judge(7, sent, BASE)) is expected
    assert gate.counts_of(7) == ({expected: 1} if expected else {})
    assert gate.counts_of(8) == {}


def test_a_norm_beyond_all_bounds_is_refused_without_a_bound() -> None:
    base = {"w": np.zeros(2)}
    found = screening().judge(0, {"w": np.array([1e300, 1e300])}, base)
    assert found == (RejectReason.NORM, "the norm of its delta is inf; it must be finite")


def test_the_norm_counts_floating_tensors_from_the_base() -> None:
    moved = {"w": np.array([3.0, 0, 0, 0], np.float32), "b": np.float32(4.0) + BASE["b"], "steps": np.array(9**9)}
    assert delta_norm(moved, BASE) == 5.0
    assert delta_norm(moved, moved) == 0.0


def test_a_refusal_changes_nothing_but_the_counters() -> None:
    gate = screening(norm_multiple=3.0, warm_up=2, window=3)
    for client in range(3):
        gate.judge(client, update(1.0 + client), BASE)
    before, limit = gate.snapshot(), gate.norm_limit
    gate.judge(1, update(1000.0), BASE)
    gate.admit(1, **GOOD | {"asked": False})
    after = gate.snapshot()
    assert gate.norm_limit == limit == 6.0
    assert before["norms"] == after["norms"]
    assert after["in_a_row"] == [[1, 2]]
    assert after["counts"] == [[1, "norm", 1], [1, "not asked", 1]]


def test_refused_n_times_in_a_row_is_blocked_until_unblocked() -> None:
    gate = screening(norm_bound=1.0, rejections_allowed=3)
    for norm in (2, 2, 1, 2, 2):  # the good one starts the count again
        gate.judge(4, update(norm), BASE)
    assert gate.blocked == []
    gate.judge(4, update(2), BASE)
    assert gate.blocked == [4]
    assert reason(gate.admit(4, **GOOD)) is RejectReason.BLOCKED
    assert gate.admit(5, **GOOD) is None
    gate.unblock(4)
    gate.unblock(99)
    assert gate.admit(4, **GOOD) is None
    assert gate.counts == {RejectReason.NORM: 5, RejectReason.BLOCKED: 1}


def test_nobody_is_blocked_for_what_others_send() -> None:
    gate = screening(rejections_allowed=1)
    gate.admit(None, **GOOD)
    assert gate.blocked == []


# -- the median ------------------------------------------------------------------------------------------------------


def test_the_median_binds_after_the_warm_up_and_never_loosens_the_operators_bound() -> None:
    gate = screening(norm_multiple=2.0, warm_up=3, norm_bound=50.0)
    for client in range(2):
        gate.judge(client, update(10.0), BASE)
    assert gate.norm_limit == 50.0
    gate.judge(2, update(10.0), BASE)
    assert gate.norm_limit == 20.0
    assert reason(gate.judge(3, update(21.0), BASE)) is RejectReason.NORM
    assert gate.judge(3, update(20.0), BASE) is None


def test_before_there_is_a_median_the_usual_norm_is_used() -> None:
    gate = screening(norm_multiple=2.0, warm_up=3)
    assert reason(gate.judge(0, update(10.5), BASE, usual=5.0)) is RejectReason.NORM
    assert gate.judge(0, update(10.0), BASE, usual=5.0) is None
    assert gate.judge(1, update(1.0), BASE, usual=5.0) is None
    assert not gate.has_median
    assert gate.judge(2, update(1.0), BASE, usual=5.0) is None
    assert gate.has_median
    assert reason(gate.judge(3, update(2.5), BASE, usual=5.0)) is RejectReason.NORM, "from now on, the votes count"
    assert (
        reason(screening(norm_multiple=2.0, norm_bound=3.0).judge(0, update(4), BASE, usual=9.0)) is RejectReason.NORM
    )


def test_an_expelled_client_has_no_vote() -> None:
    gate = screening(norm_multiple=2.0, warm_up=1)
    gate.judge(0, update(100.0), BASE)
    gate.judge(1, update(1.0), BASE)
    gate.forget(0)
    gate.forget(7)
    assert gate.norm_limit == 2.0


def test_one_client_has_one_vote_however_often_it_sends() -> None:
    gate = screening(norm_multiple=2.0, warm_up=3, window=9)
    for client in range(5):
        gate.judge(client, update(1.0), BASE)
    for _ in range(200):
        assert gate.judge(99, update(gate.norm_limit), BASE) is None
    assert gate.norm_limit == 2.0


@given(
    st.lists(st.floats(0.5, 2.0), min_size=11, max_size=15),
    st.lists(st.tuples(st.integers(100, 109), st.floats(0, 1e6)), max_size=60),
)
def test_a_minority_cannot_move_the_median_out_of_the_honest_range(
    honest: list[float], hostile: list[tuple[int, float]]
) -> None:
    gate = screening(norm_multiple=4.0, warm_up=5, window=40)
    for client, norm in enumerate(honest):
        gate.judge(client, update(norm), BASE)
    for client, norm in hostile:
        gate.judge(client, update(norm), BASE)
        assert 4 * min(honest) * (1 - 1e-6) <= gate.norm_limit <= 4 * max(honest) * (1 + 1e-6)


def test_memory_is_bounded_by_the_window() -> None:
    gate = screening(window=5, warm_up=1, norm_multiple=100.0)
    for client in range(50):
        gate.judge(client, update(1.0 + client % 7), BASE)
    assert [client for client, _ in gate.snapshot()["norms"]] == [45, 46, 47, 48, 49]


def test_a_median_of_zero_binds_nobody() -> None:
    gate = screening(norm_multiple=2.0, warm_up=1)
    gate.judge(0, BASE, BASE)
    assert gate.norm_limit == math.inf


# -- the state -------------------------------------------------------------------------------------------------------


def test_a_snapshot_survives_json_and_decides_alike() -> None:
    gate, other = (screening(norm_multiple=2.0, warm_up=2, rejections_allowed=3) for _ in range(2))
    for client, norm in ((0, 1), (1, 2), (0, 50), (2, 70), (2, 70), (2, 70)):
        gate.judge(client, update(norm), BASE)
    gate.admit(None, **GOOD)
    other.restore(json.loads(json.dumps(gate.snapshot())))
    assert other.snapshot() == gate.snapshot()
    assert other.blocked == [2]
    assert other.norm_limit == gate.norm_limit
    assert other.counts == gate.counts
    assert all(isinstance(reason, RejectReason) for reason in other.counts)


def test_a_smaller_window_keeps_the_latest_votes() -> None:
    gate, smaller = screening(window=20), screening(window=2, warm_up=1)
    for client in range(6):
        gate.judge(client, update(client), BASE)
    smaller.restore(gate.snapshot())
    assert smaller.snapshot()["norms"] == [[4, 4.0], [5, 5.0]]


@pytest.mark.parametrize("wrong", [{}, {"norms": 3}, {"norms": [], "in_a_row": [], "blocked": [], "counts": [[1]]}])
def test_another_snapshot_is_an_error_and_changes_nothing(wrong: dict[str, Any]) -> None:
    gate = screening()
    gate.judge(0, update(1), BASE)
    before = gate.snapshot()
    with pytest.raises(SafaError, match="not a snapshot of a screening"):
        gate.restore(wrong)
    assert gate.snapshot() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_bytes": 0}, "max_bytes must be above 0, not 0"),
        ({"norm_bound": math.nan}, "norm_bound must be above 0, not nan"),
        ({"rejections_allowed": 0}, "rejections_allowed must be above 0, not 0"),
        ({"window": 5, "warm_up": 6}, r"warm_up must be at most window \(5\), not 6"),
    ],
)
def test_a_wrong_screen_is_said_clearly(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SafaError, match=message):
        screening(**settings)


def test_what_is_shown_is_one_short_plain_line() -> None:
    for value in ("a\nb" * 10**5, "\x1b[2J", 10**5000, ("x\ny",) * 99, b"\x00" * 999, None):
        assert len(shown(value)) < 500
        assert shown(value).isprintable()
        assert shown(value).isascii()
