"""The roster: stable names of clients behind changing node ids.

A device is known by its name, and by the number that its name got when it first enrolled. Numbers are dense, count from
0 as a protocol's do, and are never used again: a device that comes back after a day has its number, and with it its
version, its cache entry and its weight. The size n_k that it declared first stands, because its weight does.

**Expelled.** A name that the operator has expelled is free, but may not be taken again, nor may its node enrol under
another one, until the operator unblocks it. A client that enrols under it then is a new one with a number of its own.

**Two nodes, one name.** A device that was started again has a new node id while the old one still seems alive. So the
newer one has the name; likewise a node that takes a second name gives up its first. Without keys anyone can claim any
name so. With keys, nobody but the owner of the key that is registered under it can (`safa.deploy.exchange.membership`).

A claim that is not acceptable is rejected with a `RejectReason` and a sentence, as an update is, not by an exception.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from safa.deploy.exchange.screening import Rejected, RejectReason, shown
from safa.errors import SafaError

__all__ = ["Enrolment", "Member", "Roster", "name_fault"]

_NAME_LENGTH = 64
_DETAILS_LENGTH = 1024


def name_fault(name: object) -> str | None:
    """What is wrong with a client's name, in one sentence, or None: names end up in logs and in file names."""
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME_LENGTH:
        return f"a name has 1 to {_NAME_LENGTH} characters, unlike {shown(name)}"
    if not name.isprintable() or name != name.strip() or not unicodedata.is_normalized("NFC", name):
        return f"a name has printable characters, composed, with no space at either end, unlike {shown(name)}"
    if name.startswith(".") or "/" in name or "\\" in name:
        return f"a name starts with no dot and has no path separator, unlike {shown(name)}"
    return None


@dataclass(frozen=True, kw_only=True)
class Member:
    """What the roster knows of one client."""

    name: str
    size: float
    """n_k, as first declared."""
    node: int | None
    """The node that the name is bound to; None after that node took another name."""
    present: bool
    """Whether it takes part: it has enrolled, and has not left since."""
    last_seen_s: float
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the node said of itself, such as the index of its partition."""
    expelled: bool = False
    """Whether the operator has expelled it: its number is never used again, and its name is free."""


class Enrolment(NamedTuple):
    """The outcome for a node that enrolled. Where it is neither new nor returning, it had never left."""

    number: int
    is_new: bool
    """The name was never here before: the protocol has to enrol it."""
    returning: bool
    """The name had left: the protocol has to take it back."""
    displaced: int | None
    """Who stood behind this node until now, if it was another client: the protocol has to retire it."""


class Roster:
    """All clients that ever enrolled, by name, by number and by node."""

    def __init__(self, *, max_size: float, max_clients: int = 1_000_000) -> None:
        """`max_size` bounds the n_k that a client may declare."""
        if not 0 < max_size < math.inf:
            raise SafaError(f"max_size must be a finite number above 0, not {max_size}")
        if not max_clients > 0:
            raise SafaError(f"max_clients must be above 0, not {max_clients}")
        self.max_size, self.max_clients = max_size, max_clients
        self._members: list[Member] = []
        self._by_name: dict[str, int] = {}
        self._by_node: dict[int, int] = {}
        self._expelled: dict[str, int | None] = {}  # by name, the node that it was bound to

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, number: int) -> Member:
        return self._members[number]

    def number_of(self, name: str) -> int | None:
        """The number of a name, present or not; None if it never enrolled, or was expelled."""
        return self._by_name.get(name)

    @property
    def expelled(self) -> list[str]:
        """The names that are expelled and not unblocked."""
        return sorted(self._expelled)

    def at_node(self, node: int) -> int | None:
        """The number of the client behind a node id, if it is present."""
        number = self._by_node.get(node)
        return number if number is not None and self._members[number].present else None

    @property
    def present(self) -> list[int]:
        """The numbers of all who take part."""
        return [number for number, member in enumerate(self._members) if member.present]

    # -- coming and going --------------------------------------------------------------------------------------------

    def enrol(
        self, name: str, size: float, node: int, *, now: float, details: Mapping[str, Any] | None = None
    ) -> Enrolment | Rejected:
        """Take a node in under its name, or say why not. A rejection changes nothing."""
        given = {} if details is None else details
        rejected = self._fault(name, size, node, given)
        if rejected:
            return rejected
        number = self._by_name.get(name, len(self._members))
        is_new = number == len(self._members)
        if is_new:
            self._members.append(Member(name=name, size=float(size), node=None, present=False, last_seen_s=now))
        old = self._members[number]
        self._unbind(old.node)
        displaced = self._unbind(node)
        seen = max(old.last_seen_s, now)
        self._members[number] = replace(old, node=node, present=True, last_seen_s=seen, details=dict(given))
        self._by_name[name] = self._by_node[node] = number
        return Enrolment(number, is_new, not is_new and not old.present, displaced)

    def leave(self, name: str) -> int | None:
        """Note that a client has left, and return its number; None if nobody of that name is present."""
        number = self._by_name.get(name)
        if number is None or not self._members[number].present:
            return None
        self._members[number] = replace(self._members[number], present=False)
        return number

    def expel(self, name: str) -> int | None:
        """Expel a client, and return its number; None if there is none of that name."""
        number = self._by_name.pop(name, None)
        if number is None:
            return None
        self._expelled[name] = self._members[number].node
        self._unbind(self._members[number].node)
        self._members[number] = replace(self._members[number], node=None, present=False, expelled=True)
        return number

    def unblock(self, name: str) -> bool:
        """Let an expelled name enrol again, as a new client; whether it was expelled."""
        was_expelled = name in self._expelled
        self._expelled.pop(name, None)
        return was_expelled

    def seen(self, number: int, *, now: float) -> None:
        """Note that a client is online."""
        member = self._members[number]
        self._members[number] = replace(member, last_seen_s=max(member.last_seen_s, now))

    def _unbind(self, node: int | None) -> int | None:
        """Take a node from its name, and return whom that made absent: without a node nobody is present."""
        number = None if node is None else self._by_node.pop(node, None)
        if number is None:
            return None
        was_present = self._members[number].present
        self._members[number] = replace(self._members[number], node=None, present=False)
        return number if was_present else None

    # -- rejection --------------------------------------------------------------------------------------------------

    def _fault(self, name: object, size: object, node: object, details: object) -> Rejected | None:
        wrong_name = name_fault(name)
        if wrong_name:
            return Rejected(RejectReason.NAME, wrong_name)
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size <= self.max_size:
            return Rejected(RejectReason.SIZE, f"a size is above 0 and at most {self.max_size:g}, unlike {shown(size)}")
        if not _is_plain(details):
            return Rejected(
                RejectReason.DETAILS, f"details are plain values in at most {_DETAILS_LENGTH} bytes of JSON"
            )
        return self._claim_fault(name, node)

    def _claim_fault(self, name: object, node: object) -> Rejected | None:
        """Whether this node may have this name."""
        if not isinstance(node, int) or isinstance(node, bool):
            return Rejected(RejectReason.UNKNOWN_CLIENT, f"{shown(node)} is no node id")
        if name in self._expelled or node in self._expelled.values():
            return Rejected(RejectReason.EXPELLED, f"{shown(name)} is of a client that was expelled")
        number = self._by_name.get(str(name))
        if number is None and len(self._members) >= self.max_clients:
            return Rejected(RejectReason.FULL, f"{self.max_clients} clients have enrolled, and no more are allowed")
        return None

    # -- the state, as a whole ---------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything that it knows, as plain JSON-able values; a client's number is its place in the list."""
        return {"members": [asdict(member) for member in self._members], "expelled": dict(self._expelled)}

    def restore(self, snapshot: Mapping[str, Any], *, now: float | None = None) -> None:
        """Restore a snapshot. The operator's bounds may have changed; enrolled clients stay enrolled.

        With `now`, everybody counts as seen then: the clock of the snapshot may have been another one.
        """
        try:
            members = [Member(**values) for values in snapshot["members"]]
            members = [member if now is None else replace(member, last_seen_s=now) for member in members]
            expelled = dict(snapshot["expelled"])
        except (KeyError, TypeError, ValueError):
            raise SafaError("this is not a snapshot of a roster") from None
        named = {number: member.name for number, member in enumerate(members) if not member.expelled}
        by_name = {name: number for number, name in named.items()}
        by_node = {member.node: number for number, member in enumerate(members) if member.node is not None}
        if len(by_name) < len(named) or len(by_node) < sum(member.node is not None for member in members):
            raise SafaError("this snapshot of a roster gives one name or one node to two clients")
        self._members, self._by_name, self._by_node, self._expelled = members, by_name, by_node, expelled


def _is_plain(details: object) -> bool:
    """Whether it is a flat mapping from text to plain values, and short."""
    if not isinstance(details, Mapping):
        return False
    flat = all(isinstance(k, str) and isinstance(v, str | int | float | None) for k, v in details.items())
    try:
        return flat and len(json.dumps(dict(details), allow_nan=False)) <= _DETAILS_LENGTH
    except ValueError:  # NaN, infinity, or a number of thousands of digits
        return False
