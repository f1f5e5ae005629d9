"""The rules of the paper's Section III, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safa.errors import SafaError
from safa.protocol import Events, Safa, quota_of
from safa.protocol.records import EndedBy, RoundRecord, Rule
from tests.protocol.helpers import arrive, lose, open_round

A, B, C, D = range(4)


def test_the_story_of_figure_1() -> None:
    """Four clients, C = 0.5, tau = 2: round by round as the paper tells it."""
    safa = Safa([10, 20, 30, 40], fraction=0.5, lag_tolerance=2)

    dispatch = open_round(safa, 0.0)
    assert dispatch.sync.tolist() == [A, B, C, D]  # everyone starts from w(0)
    assert dispatch.deprecated.tolist() == []
    assert arrive(safa, [B, C], 1.0) == [0, 0]
    assert safa.done  # the quota of 2 is met
    assert arrive(safa, [A], 1.5, late=True) == [0]  # A is in time for the bypass only
    first = safa.close_round(now=2.0)
    assert first.picked.tolist() == [B, C]
    assert first.undrafted.tolist() == [A]
    assert first.ended_by is EndedBy.QUOTA
    assert first.version == 1
    assert safa.versions.tolist() == [1, 1, 1, 0]  # A, B and C are up to date; D never came

    dispatch = open_round(safa, 2.0)
    assert dispatch.sync.tolist() == [A, B, C]
    assert dispatch.resume.tolist() == [D]  # tolerable: 2-2 <= 0 < 1
    arrive(safa, [B], 3.0)  # picked last time, so it has to wait in Q
    arrive(safa, [A], 3.5)  # not picked last time, so it goes first
    assert not safa.done
    lose(safa, [C, D], 4.0)
    second = safa.close_round(now=4.0)
    assert second.picked.tolist() == [B, A]  # P = {A} was short of the quota and took B from Q
    assert second.crashed.tolist() == [C, D]
    assert second.ended_by is EndedBy.NOBODY_LEFT

    dispatch = open_round(safa, 5.0)
    assert dispatch.deprecated.tolist() == [D]  # it missed rounds 1 and 2: 0 < 3-2
    assert dispatch.sync.tolist() == [A, B, D]
    assert dispatch.resume.tolist() == [C]
    assert safa.versions[D] == 2


def test_undrafted_in_round_2_when_two_priority_clients_come_after_it() -> None:
    """The picture has B undrafted in round 2: it came first, but A and D had missed round 1."""
    safa = Safa([1, 1, 1, 1], fraction=0.5, lag_tolerance=2)
    open_round(safa, 0.0)
    arrive(safa, [B, C], 1.0)
    safa.close_round(now=1.0)
    open_round(safa, 1.0)
    arrive(safa, [B], 2.0)
    arrive(safa, [A, D], 3.0)
    record = safa.close_round(now=3.0)
    assert record.picked.tolist() == [A, D]
    assert record.undrafted.tolist() == [B]
    assert record.weight.tolist() == [0.0, 0.25, 0.25]
    assert record.into.tolist() == [-1, 2, 2]
    assert record.rule is Rule.CACHE


@pytest.mark.parametrize("tau", [1, 2, 3, 7])
def test_a_silent_client_is_deprecated_after_tau_rounds(tau: int) -> None:
    """Eq. 3: at the start of round t, v < t - tau starts over, t - tau <= v < t-1 goes on."""
    safa = Safa([1, 1], fraction=0.5, lag_tolerance=tau)
    forced = []
    for number in range(1, 3 * tau + 3):
        dispatch = open_round(safa, float(number))
        if 1 in dispatch.deprecated:
            forced.append(number)
        arrive(safa, [0], float(number))
        lose(safa, [1], float(number))
        safa.close_round(now=float(number))
    assert forced == [number for number in range(2, 3 * tau + 3) if (number - 1) % tau == 0]


def test_the_reply_of_an_abandoned_attempt_is_refused() -> None:
    safa = Safa([1, 1], fraction=0.5, lag_tolerance=1)
    open_round(safa, 0.0)
    arrive(safa, [0], 1.0)
    safa.close_round(now=1.0)
    assert open_round(safa, 1.0).deprecated.tolist() == [1]
    receipt = safa.receive(Events.arrivals(1, 0, at_s=2.0))  # trained from w(0), told to train from w(1)
    assert receipt.refusal.tolist() == [5]
    assert arrive(safa, [1], 3.0) == [0]


def test_a_straggler_commits_rounds_later_from_its_old_base() -> None:
    safa = Safa([1, 1, 1], fraction=0.3, lag_tolerance=5)
    for number in range(3):
        open_round(safa, float(number))
        arrive(safa, [number % 2], number + 0.5)
        safa.close_round(now=number + 0.5)
    open_round(safa, 3.0)
    arrive(safa, [2], 3.5)
    record = safa.close_round(now=3.5)
    assert record.client.tolist() == [2]
    assert record.base.tolist() == [0]
    assert record.picked.tolist() == [2]
    assert safa.versions[2] == 4


def test_a_round_ends_at_its_deadline() -> None:
    safa = Safa([1, 1], fraction=1.0, round_limit_s=10.0)
    open_round(safa, 5.0)
    assert safa.deadline == 15.0
    assert arrive(safa, [0], 15.0) == [0]  # at the deadline is in time
    assert arrive(safa, [1], 15.1) == []  # behind it belongs to the next round
    record = safa.close_round(now=15.0)
    assert record.ended_by is EndedBy.DEADLINE
    assert record.length_s == 10.0


@pytest.mark.parametrize(("fraction", "clients", "quota"), [(0.1, 30, 3), (0.1, 5, 1), (1.0, 7, 7), (0.3, 10, 3)])
def test_quota_forgives_the_rounding_of_the_product(fraction: float, clients: int, quota: int) -> None:
    assert quota_of(fraction, clients) == quota


@pytest.mark.parametrize("settings", [{"fraction": 0.0}, {"fraction": 1.1}, {"fraction": 0.5, "lag_tolerance": 0}])
def test_wrong_settings_are_turned_down(settings: dict[str, float]) -> None:
    with pytest.raises(SafaError, match="must be"):
        Safa([1.0], **settings)  # type: ignore[arg-type]


# -- properties over random stories ----------------------------------------------------------------------------------

stories = st.integers(1, 9).flatmap(
    lambda clients: st.tuples(
        st.floats(0.05, 1.0),
        st.integers(1, 4),
        st.lists(
            st.tuples(
                st.permutations(range(clients)), st.lists(st.sampled_from("acs"), min_size=clients, max_size=clients)
            ),
            min_size=1,
            max_size=8,
        ),
    )
)
"""C, tau and for every round an order of the clients and what each does: (a)rrive, (c)rash, (s)traggle."""


def run_round(safa: Safa, order: list[int], fates: list[str], now: float) -> RoundRecord:
    """One round in which the clients in `order` do as they are fated, one second apart."""
    open_round(safa, now)
    for step, client in enumerate(order, start=1):
        if safa.done:
            break
        if fates[client] != "s":
            (arrive if fates[client] == "a" else lose)(safa, [client], now + step)
    return safa.close_round(now=safa.now if safa.done else safa.deadline)


@given(stories)
def test_every_round_keeps_the_rules_of_selection(story: tuple[float, int, list[tuple[list[int], list[str]]]]) -> None:
    fraction, tau, rounds = story
    clients = len(rounds[0][0])
    safa = Safa(np.ones(clients), fraction=fraction, lag_tolerance=tau, round_limit_s=100.0)
    picked_last: set[int] = set()
    for number, (order, fates) in enumerate(rounds):
        before = safa.versions.copy()
        record = run_round(safa, order, fates, 1000.0 * number)
        picked, undrafted, crashed = set(record.picked), set(record.undrafted), set(record.crashed)
        assert not picked & undrafted
        assert not picked & crashed
        assert not undrafted & crashed
        assert len(picked) + len(undrafted) + len(crashed) + safa.waiting_for == record.trained == clients
        assert len(picked) <= record.quota
        if picked & picked_last:  # somebody was picked twice in a row: only if nobody else was left over
            assert all(client in picked for client in record.client.tolist() if client not in picked_last)
        assert np.all(safa.versions >= before)
        picked_last = picked


@given(stories)
def test_effective_update_ratio_is_the_smaller_of_c_and_1_minus_r(
    story: tuple[float, int, list[tuple[list[int], list[str]]]],
) -> None:
    """Eq. 5, when whoever does not crash arrives: EUR = min(C, 1-R), C being the quota's share."""
    fraction, tau, rounds = story
    clients = len(rounds[0][0])
    safa = Safa(np.ones(clients), fraction=fraction, lag_tolerance=tau, round_limit_s=100.0)
    for number, (order, fates) in enumerate(rounds):
        open_round(safa, 1000.0 * number)
        arriving = [client for client in order if fates[client] == "a"]
        taken = len(arrive(safa, arriving, 1000.0 * number + 1))
        arrive(safa, arriving[taken:], 1000.0 * number + 2, late=True)
        record = safa.close_round(now=safa.deadline)
        crash_ratio = 1 - len(arriving) / clients
        assert len(record.picked) / clients == pytest.approx(min(record.quota / clients, 1 - crash_ratio))
