"""Ten thousand sequences of nonsense: a protocol refuses by name and is as it was."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safa.errors import MisuseError, SafaError
from safa.protocol import Events, Protocol
from safa.protocol.records import Refusal
from tests.protocol.helpers import PROTOCOLS

EXAMPLES = 10_000

numbers = st.sampled_from([*range(-2, 7), *[-(2**62), 2**62] * 4])  # half of them far off, as of the times
times = st.sampled_from([*map(float, range(13)), *[float("nan"), float("inf"), -1.0] * 4])
calls = st.one_of(
    st.tuples(st.just("open"), times, st.integers(0, 6)),
    st.tuples(st.sampled_from(["arrive", "lose", "late"]), times, st.lists(st.tuples(numbers, numbers), max_size=4)),
    st.tuples(st.just("close"), times),
    st.tuples(st.sampled_from(["retire", "readmit"]), numbers),
    st.tuples(st.just("enrol"), st.sampled_from([1.0, 0.0, -3.0, float("nan")])),
)


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(PROTOCOLS)), st.lists(calls, max_size=10))
def test_nonsense_changes_nothing(name: str, sequence: list[tuple[Any, ...]]) -> None:
    protocol = PROTOCOLS[name](np.ones(3))
    for call in sequence:
        before = essence(protocol)
        try:
            refused = perform(protocol, *call)
        except (MisuseError, SafaError):
            refused = True
        if refused:
            assert essence(protocol) == before
        assert_sound(protocol)


def essence(protocol: Protocol) -> bytes:
    """All that a protocol knows, but for the diary of what came in and when."""
    return pickle.dumps({key: value for key, value in vars(protocol).items() if key not in ("_log", "now")})


def perform(protocol: Protocol, what: str, *given: Any) -> bool:
    """Do one thing to the protocol; whether all of it was refused."""
    match what:
        case "open":
            now, clients = given
            count = protocol.clients if clients == 0 else clients
            protocol.open_round(now=now, draws=np.zeros(count), expected_s=np.zeros(count))
        case "arrive" | "late" | "lose":
            at_s, pairs = given
            clients, bases = [client for client, _ in pairs], [base for _, base in pairs]
            events = Events.arrivals(clients, bases, at_s=at_s)
            events = Events.losses(clients, at_s=at_s) if what == "lose" else events
            receipt = protocol.receive(events, late=what == "late")
            assert all(Refusal(code).name for code in receipt.refusal)
            return not receipt.accepted.any()
        case "close":
            protocol.close_round(now=given[0])
        case "retire":
            protocol.retire(given[0])
        case "readmit":
            protocol.readmit(given[0])
        case "enrol":
            protocol.enrol([given[0]])
    return False


def assert_sound(protocol: Protocol) -> None:
    """The arrays are of one length, and what they say fits together."""
    per_client = [protocol.sizes, protocol.active, protocol.versions, protocol._expected, protocol._awaited]
    assert {len(array) for array in per_client} == {protocol.clients}
    assert np.all(protocol.sizes > 0)
    assert protocol.waiting_for >= 0
    if protocol.is_open:
        assert protocol.waiting_for == np.count_nonzero(protocol._awaited)
