"""Names, numbers and nodes, against an oracle of dictionaries."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safa.deploy.exchange.roster import Enrolment, Roster, name_fault
from safa.deploy.exchange.screening import Rejected, RejectReason
from safa.errors import SafaError


def roster(**settings: Any) -> Roster:
    return Roster(**{"max_size": 1000.0} | settings)


def test_a_device_that_comes_back_has_its_number_and_its_weight() -> None:
    people = roster()
    assert people.enrol("ann", 50, 111, now=0.0, details={"partition-id": 4}) == Enrolment(0, True, False, None)
    assert people.enrol("bob", 60, 112, now=1.0) == Enrolment(1, True, False, None)
    assert people.leave("ann") == 0
    assert people.present == [1]
    assert people.at_node(111) is None
    assert people.enrol("ann", 999, 222, now=86_400.0) == Enrolment(0, False, True, None)
    assert people.at_node(222) == people.number_of("ann") == 0
    assert people[0].size == 50.0
    assert people[0].last_seen_s == 86_400.0
    assert people[0].details == {}
    assert len(people) == 2


def test_leaving_is_noted_once() -> None:
    people = roster()
    people.enrol("ann", 50, 1, now=0.0)
    assert [people.leave("ann"), people.leave("ann"), people.leave("zoe")] == [0, None, None]


def test_without_keys_the_newer_node_wins() -> None:
    people = roster()
    people.enrol("ann", 50, 1, now=0.0)
    assert people.enrol("ann", 50, 2, now=1.0) == Enrolment(0, False, False, None)
    assert people.at_node(1) is None
    assert people.at_node(2) == 0


def test_without_keys_a_node_that_takes_a_second_name_gives_up_its_first() -> None:
    people = roster()
    people.enrol("ann", 50, 1, now=0.0)
    assert people.enrol("bob", 50, 1, now=1.0) == Enrolment(1, True, False, 0)
    assert people.present == [1]
    assert people[0].node is None
    assert people.enrol("ann", 50, 2, now=2.0) == Enrolment(0, False, True, None)


def test_time_does_not_go_back() -> None:
    people = roster()
    people.enrol("ann", 50, 1, now=10.0)
    people.seen(0, now=20.0)
    people.seen(0, now=15.0)
    people.enrol("ann", 50, 1, now=12.0)
    assert people[0].last_seen_s == 20.0


GOOD: dict[str, Any] = {"name": "ann", "size": 5.0, "node": 1, "details": None}


BAD: dict[tuple[str, RejectReason], list[Any]] = {
    ("name", RejectReason.NAME): [
        "",
        "a" * 65,
        "a\nb",
        "a\x00",
        "a/b",
        "a\\b",
        "..",
        " a",
        "e\u0301",
        "\u202ea",
        "\ud800",
        3,
    ],
    ("size", RejectReason.SIZE): [0, -1, 1001, math.nan, math.inf, 10**5000, True, "5", None],
    ("node", RejectReason.UNKNOWN_CLIENT): [None, "1", 1.0, True],
    ("details", RejectReason.DETAILS): [[], {"a": []}, {1: 2}, {"a": math.nan}, {"a": 10**5000}, {"a": "b" * 1024}],
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [({field: value}, reason) for (field, reason), values in BAD.items() for value in values],
)
def test_bad_input_is_refused_and_changes_nothing(change: dict[str, Any], reason: RejectReason) -> None:
    people = roster()
    refused = people.enrol(**(GOOD | change), now=0.0)
    assert isinstance(refused, Rejected)
    assert refused.reason is reason
    assert len(refused.why) < 600
    assert refused.why.isprintable()
    assert len(people) == 0


@pytest.mark.parametrize("name", ["a", "x" * 64, "Ward 3, left", "Zoë", "機器一", "edge-07.local"])
def test_good_names(name: str) -> None:
    assert name_fault(name) is None


def test_a_full_roster_takes_back_whom_it_knows() -> None:
    people = roster(max_clients=1)
    people.enrol("ann", 5, 1, now=0.0)
    people.leave("ann")
    refused = people.enrol("bob", 5, 2, now=0.0)
    assert isinstance(refused, Rejected)
    assert refused.reason is RejectReason.FULL
    assert isinstance(people.enrol("ann", 5, 2, now=0.0), Enrolment)


@pytest.mark.parametrize("settings", [{"max_size": 0}, {"max_size": math.inf}, {"max_size": math.nan}])
def test_a_wrong_bound_is_an_error(settings: dict[str, Any]) -> None:
    with pytest.raises(SafaError, match="max_size must be a finite number above 0"):
        roster(**settings)
    with pytest.raises(SafaError, match="max_clients must be above 0, not 0"):
        roster(max_clients=0)


NAMES = ("ann", "bob", "cat", "dan")
STEPS = st.lists(
    st.tuples(st.sampled_from(["enrol", "leave", "again"]), st.sampled_from(NAMES), st.integers(1, 5)), max_size=40
)


@given(STEPS)
def test_sequences_against_dictionaries(steps: list[tuple[str, str, int]]) -> None:
    people = roster()
    numbers: dict[str, int] = {}  # for good
    nodes: dict[str, int] = {}  # of those who are present
    for now, (step, name, node) in enumerate(steps):
        if step == "enrol":
            displaced = [numbers[other] for other in nodes if nodes[other] == node and other != name]
            expected = Enrolment(
                numbers.setdefault(name, len(numbers)),
                name not in numbers or people.number_of(name) is None,
                people.number_of(name) is not None and name not in nodes,
                displaced[0] if displaced else None,
            )
            assert people.enrol(name, 5 + node, node, now=now) == expected
            nodes = {other: at for other, at in nodes.items() if at != node} | {name: node}
        elif step == "leave":
            assert people.leave(name) == (numbers[name] if nodes.pop(name, None) is not None else None)
        else:
            again = roster()
            again.restore(json.loads(json.dumps(people.snapshot())))
            assert again.snapshot() == people.snapshot()
            people = again
        assert people.present == sorted(numbers[name] for name in nodes)
        assert {name: people.number_of(name) for name in numbers} == numbers
        at_nodes = {at: numbers[name] for name, at in nodes.items()}
        assert {at: people.at_node(at) for at in range(1, 6)} == {at: at_nodes.get(at) for at in range(1, 6)}


def test_an_expelled_name_is_free_for_a_new_client_once_it_is_unblocked() -> None:
    people = roster()
    people.enrol("ann", 5, 1, now=0.0)
    people.enrol("bob", 5, 2, now=0.0)
    assert [people.expel("ann"), people.expel("ann"), people.expel("zoe")] == [0, None, None]
    assert people.present == [1]
    assert people.expelled == ["ann"]
    assert (people[0].expelled, people[0].node, people[0].present) == (True, None, False)
    for name, node in (("ann", 3), ("eve", 1)):  # neither the name nor the node
        refused = people.enrol(name, 7, node, now=1.0)
        assert isinstance(refused, Rejected)
        assert refused.reason is RejectReason.EXPELLED
    again = roster()
    again.restore(json.loads(json.dumps(people.snapshot())), now=9.0)
    assert again.expelled == ["ann"]
    assert again[1].last_seen_s == 9.0
    assert [again.unblock("ann"), again.unblock("ann")] == [True, False]
    assert again.enrol("ann", 7, 1, now=10.0) == Enrolment(2, True, False, None)
    assert again[2].size == 7.0
    third = roster()
    third.restore(json.loads(json.dumps(again.snapshot())))
    assert third.number_of("ann") == 2


def test_an_expelled_client_that_was_away_is_expelled_all_the_same() -> None:
    people = roster()
    people.enrol("ann", 5, 1, now=0.0)
    people.leave("ann")
    assert people.expel("ann") == 0
    assert isinstance(people.enrol("ann", 5, 1, now=1.0), Rejected)


@pytest.mark.parametrize("wrong", [{}, {"members": [{"name": "ann"}]}, {"members": 3}, {"members": []}])
def test_another_snapshot_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(SafaError, match="not a snapshot of a roster"):
        roster().restore(wrong)


def test_a_snapshot_with_a_name_twice_is_an_error() -> None:
    people = roster()
    people.enrol("ann", 5, 1, now=0.0)
    with pytest.raises(SafaError, match="one name or one node to two clients"):
        people.restore(people.snapshot() | {"members": people.snapshot()["members"] * 2})
