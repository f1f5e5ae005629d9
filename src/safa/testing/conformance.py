"""The contract of a protocol, as checks that drive it with random clients, honest and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safa.protocol import Dispatch, Events, Protocol
from safa.protocol.records import Ids, Refusal, RoundRecord, Rule, Verdict

__all__ = ["check_protocol", "check_record_so_far", "check_refusals", "check_rounds", "check_splitting", "check_work"]

Make = Callable[[NDArray[np.float64]], Protocol]
"""Makes the protocol under test for clients of these sizes."""

_OF_UPDATES = ("client", "base", "verdict", "refusal", "arrival_s", "weight", "into", "work")
_DIARY = {"_log", "now"}  # what a refused event may leave behind: that it came, and when


def check_protocol(make: Make, *, scripts: int = 100, seed: int = 0) -> None:
    """Put a protocol through all checks, with this many random scripts each."""
    for number in range(scripts):
        for check in (check_rounds, check_splitting, check_refusals, check_record_so_far, check_work):
            try:
                check(make, seed=seed + number)
            except AssertionError as error:
                raise AssertionError(f"{check.__name__}, seed {seed + number}: {error}") from error


def check_rounds(make: Make, *, seed: int, rounds: int = 6) -> None:
    """Every record keeps the promises of `RoundRecord`, also while clients enrol, retire and return."""
    rng = np.random.default_rng(seed)
    protocol = make(_sizes(rng))
    for _ in range(rounds):
        _change_fleet(protocol, rng)
        versions, version = protocol.versions.copy(), protocol.version
        done = _run_round(protocol, rng)
        _check_record(protocol, done.record, version)
        assert np.all(protocol.versions >= versions), "a client's version went back"
        assert protocol.version >= version, "the global version went back"


def check_splitting(make: Make, *, seed: int, rounds: int = 5) -> None:
    """Events fed one at a time and in batches of any size lead to the same records and the same state."""
    rng = np.random.default_rng(seed)
    sizes = _sizes(rng)
    one_by_one, in_batches = make(sizes), make(sizes)
    done = [_run_round(one_by_one, rng) for _ in range(rounds)]
    for this, following in zip(done, [*done[1:], None], strict=True):
        in_batches.open_round(
            now=this.opened_s, draws=this.draws, expected_s=this.estimates, fixed_s=this.estimates / 4
        )
        too_much = this.events if following is None else Events.concatenate([this.events, following.events])
        taken = 0
        for part in _pieces(too_much, rng):
            receipt = in_batches.receive(part)
            taken += receipt.consumed
            if receipt.consumed < len(part):
                break
            if taken >= len(this.events) and not in_batches.done:
                break  # the round was left to its deadline here, and what follows is later than that
        assert taken == len(this.events), f"{taken} events were taken in batches, {len(this.events)} one by one"
        record = in_batches.close_round(now=this.record.closed_s)
        assert record.to_json() == this.record.to_json(), "batches gave another record than single events"
    assert _same(one_by_one.snapshot(), in_batches.snapshot()), "batches led to another state than single events"


def check_refusals(make: Make, *, seed: int, rounds: int = 4) -> None:
    """What is refused changes nothing, and bad arguments are turned down before anything is changed."""
    rng = np.random.default_rng(seed)
    protocol = make(_sizes(rng))
    for _ in range(rounds):
        _open_round(protocol, rng)
        while not protocol.done and rng.random() < 0.9:
            event = _nonsense(protocol, rng) if rng.random() < 0.7 else _honest(protocol, rng)
            before = protocol.snapshot()
            receipt = protocol.receive(event)
            if receipt.consumed and not receipt.accepted.all():
                assert _same(_core(before), _core(protocol.snapshot())), (
                    f"an event was refused ({Refusal(receipt.refusal[0]).name}), but the state has changed"
                )
                assert len(receipt.sync) == 0, "a refused event was answered with a model"
        _give_up(protocol)
        protocol.close_round(now=_closing_time(protocol))


def check_record_so_far(make: Make, *, seed: int, rounds: int = 4) -> None:
    """Where versions are made in mid-round, the record so far can be asked for at any time.

    Asking changes nothing, and what it says of an update, the record of the closed round says, too. Where versions are
    made when a round is closed, there is nothing to check.
    """
    rng = np.random.default_rng(seed)
    protocol = make(_sizes(rng))
    if not protocol.answers_arrivals:
        return
    for _ in range(rounds):
        _change_fleet(protocol, rng)
        _open_round(protocol, rng)
        heard = [_record_so_far(protocol)]
        while not protocol.done and len(heard) < 4 * protocol.clients:
            protocol.receive(_honest(protocol, rng) if rng.random() < 0.8 else _nonsense(protocol, rng))
            heard.append(_record_so_far(protocol))
        _give_up(protocol)
        heard.append(_record_so_far(protocol))
        record = protocol.close_round(now=_closing_time(protocol))
        for so_far in heard:
            _check_so_far(so_far, record)


def check_work(make: Make, *, seed: int, rounds: int = 6) -> None:
    """What a client is asked for when it begins holds until its update comes in, and is what the record says of it."""
    rng = np.random.default_rng(seed)
    protocol = make(_sizes(rng))
    asked: dict[int, float] = {}  # by client that is at work
    for _ in range(rounds):
        _change_fleet(protocol, rng)
        dispatch = _open_round(protocol, rng)[0]
        at_work = [*dispatch.sync.tolist(), *dispatch.resume.tolist()]
        kept = {k: asked[k] for k in dispatch.resume.tolist() if k in asked}
        asked = {k: float(protocol.work[k]) for k in at_work} | kept
        updates: list[float] = []
        while not protocol.done and len(updates) < 4 * protocol.clients and rng.random() < 0.95:
            _check_asked(protocol, asked)
            event = _honest(protocol, rng)
            receipt = protocol.receive(event)
            if receipt.consumed and receipt.accepted[0] and not event.lost[0]:
                updates.append(asked.pop(int(event.client[0])))
            asked |= {k: float(protocol.work[k]) for k in receipt.sync.tolist()}
        _give_up(protocol)
        record = protocol.close_round(now=_closing_time(protocol))
        assert np.all((record.work > 0) & (record.work <= 1)), "a share of the work is not above 0 and at most 1"
        told = record.work[record.verdict != Verdict.REFUSED.value].tolist()
        assert told == updates, f"the record says that clients were asked for {told} of their work, not for {updates}"


def _check_asked(protocol: Protocol, asked: dict[int, float]) -> None:
    for client, share in asked.items():
        now = float(protocol.work[client])
        assert now == share, f"client {client} was asked for {share} of its work, and for {now} in mid-attempt"


# -- rounds of random events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Round:
    """What was fed to a round, and what came out."""

    opened_s: float
    draws: NDArray[np.float64]
    estimates: NDArray[np.float64]
    events: Events
    record: RoundRecord


def _sizes(rng: np.random.Generator) -> NDArray[np.float64]:
    return rng.integers(1, 100, size=rng.integers(1, 9)).astype(np.float64)


def _change_fleet(protocol: Protocol, rng: np.random.Generator) -> None:
    """Now and then somebody enrols, retires or comes back; somebody always stays."""
    if rng.random() < 0.3:
        new = protocol.enrol(rng.integers(1, 100, size=rng.integers(1, 3)).astype(np.float64))
        assert new[-1] == protocol.clients - 1, "enrolment does not number the clients on"
    present = np.flatnonzero(protocol.active)
    if len(present) > 1 and rng.random() < 0.3:
        protocol.retire(rng.choice(present))
    absent = np.flatnonzero(~protocol.active)
    if len(absent) and rng.random() < 0.5:
        protocol.readmit(rng.choice(absent))


def _open_round(protocol: Protocol, rng: np.random.Generator) -> tuple[Dispatch, float, Any, Any]:
    opened_s = max(protocol.now, 0.0) + float(rng.integers(0, 2))
    draws = rng.random(protocol.clients)
    estimates = rng.exponential(10.0, protocol.clients)
    dispatch = protocol.open_round(now=opened_s, draws=draws, expected_s=estimates, fixed_s=estimates / 4)
    return dispatch, opened_s, draws, estimates


def _run_round(protocol: Protocol, rng: np.random.Generator) -> _Round:
    """One round of single events, some of them nonsense, until it is done or left to its deadline."""
    _, opened_s, draws, estimates = _open_round(protocol, rng)
    fed: list[Events] = []
    while not protocol.done and len(fed) < 4 * protocol.clients:
        event = _honest(protocol, rng) if rng.random() < 0.8 else _nonsense(protocol, rng)
        receipt = protocol.receive(event)
        if not receipt.consumed:
            break
        fed.append(event)
    fed.append(_give_up(protocol))
    record = protocol.close_round(now=_closing_time(protocol))
    return _Round(opened_s, draws, estimates, Events.concatenate(fed), record)


def _closing_time(protocol: Protocol) -> float:
    return protocol.now if protocol.done else max(protocol.deadline, protocol.now)


def _give_up(protocol: Protocol) -> Events:
    """A round without a deadline ends at the latest when everyone that it waits for is lost."""
    everyone = Events.losses(np.arange(protocol.clients), at_s=protocol.now)
    if protocol.done or np.isfinite(protocol.deadline):
        return everyone[:0]
    receipt = protocol.receive(everyone)
    assert protocol.done, "the round still waits although everyone is lost"
    return everyone[: receipt.consumed]


def _honest(protocol: Protocol, rng: np.random.Generator) -> Events:
    """A client reports an update from the version that it holds, or is found lost."""
    client = int(rng.integers(protocol.clients))
    at_s = protocol.now + float(rng.integers(1, 3))
    if rng.random() < 0.2:
        return Events.losses(client, at_s=at_s)
    return Events.arrivals(client, int(protocol.versions[client]), at_s=at_s)


def _nonsense(protocol: Protocol, rng: np.random.Generator) -> Events:
    """A stranger, a replayed update, a version that never was."""
    client = int(rng.integers(-3, protocol.clients + 3))
    base = int(rng.integers(-3, protocol.version + 4))
    at_s = protocol.now + float(rng.integers(1, 3))
    return Events.losses(client, at_s=at_s) if rng.random() < 0.2 else Events.arrivals(client, base, at_s=at_s)


def _pieces(events: Events, rng: np.random.Generator) -> Iterator[Events]:
    start = 0
    while start < len(events):
        end = start + int(rng.integers(1, len(events) - start + 1))
        yield events[start:end]
        start = end


# -- promises --------------------------------------------------------------------------------------------------------


def _check_record(protocol: Protocol, record: RoundRecord, version_before: int) -> None:
    taken = record.verdict != Verdict.REFUSED.value
    _check_sets(protocol, record, record.client[taken])
    picked = record.verdict == Verdict.PICKED.value
    assert np.all((record.refusal != Refusal.NONE.value) == ~taken), "verdict and refusal contradict each other"
    assert np.all(record.base[taken] <= record.version), "an update from a version that does not exist was taken"
    assert np.all(np.diff(record.arrival_s) >= 0), "updates are not in order of arrival"
    assert np.all(np.isfinite(record.weight) & (record.weight >= 0)), "a weight is negative or no number"
    assert np.all(record.weight[~picked] == 0), "an update that was not picked has a weight"
    assert np.all(record.into[~picked] == -1), "an update that was not picked goes into a version"
    assert np.all(record.into[picked] > version_before), "an update goes into a version that was made before"
    if record.rule is Rule.AVERAGE:
        for version in np.unique(record.into[picked]):
            share = float(record.weight[record.into == version].sum())
            assert share <= 1 + 1e-9, f"the weights of version {version} sum to {share}"
    assert not record.client.flags.writeable, "a record can be changed"


def _check_sets(protocol: Protocol, record: RoundRecord, committed: Ids) -> None:
    assert record.clients == np.count_nonzero(protocol.active), "the record counts other clients than are enrolled"
    assert np.all(protocol.active[record.sent]), "the model was sent to a client that has retired"
    assert set(record.deprecated) <= set(record.sent), "a deprecated client was not synchronised"
    if record.rule is not Rule.OWN:
        picked = len(record.picked)
        assert picked <= record.quota, f"{picked} updates were picked, the quota is {record.quota}"
    if protocol.answers_arrivals:
        return
    assert len(set(committed)) == len(committed), "a client committed twice in a round"
    assert not set(committed) & set(record.crashed), "a client both committed and crashed"
    covered = len(committed) + len(record.crashed) + protocol.waiting_for
    assert covered == record.trained, f"{record.trained} clients trained, but {covered} are accounted for"


def _record_so_far(protocol: Protocol) -> RoundRecord:
    before = protocol.snapshot()
    record = protocol.record_so_far()
    assert _same(before, protocol.snapshot()), "asking for the record so far changed the state"
    assert record.version == protocol.version, "the record so far names another version than the protocol"
    return record


def _check_so_far(so_far: RoundRecord, record: RoundRecord) -> None:
    """Everything that was known in mid-round must be in the record of the closed round."""
    for name in ("round", "rule", "opened_s", "clients", "quota", "trained", "deprecated", "joined", "left"):
        one, other = getattr(so_far, name), getattr(record, name)
        assert _same(one, other), f"the record so far has another {name} than that of the closed round"
    for name in (*_OF_UPDATES, "sent", "sent_version"):
        known = getattr(so_far, name)
        assert _same(known, getattr(record, name)[: len(known)]), f"what was known of an update changed later: {name}"
    assert so_far.version <= record.version, "the record so far is of a version that was not made"


def _core(snapshot: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in snapshot.items() if name not in _DIARY}


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal to the last bit."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "__dict__"):
        return type(one) is type(other) and _same(vars(one), vars(other))
    return bool(one == other)
