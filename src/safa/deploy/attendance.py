"""Who is there: nodes that come and go, and the clients behind them.

A node that appears is asked who it is. What it answers binds its node id to a name, and the name to a client's number.
The protocol learns of it between two rounds. A client that is offline is not gone: it keeps its share of the quota and
its weight, as a crashed one does. Only when it was away for `leave_after_s` it has left, and comes back when it does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from safa.deploy.letters import Failure, Introduction
from safa.deploy.roster import Enrolment, Roster
from safa.deploy.screening import Reason, Refused, shown
from safa.protocol import Protocol

__all__ = ["Attendance"]

_ASK_AGAIN_S = 30.0
_log = logging.getLogger("safa.deploy")


class Attendance:
    """Keeps the roster up to date with the nodes that are online, and the protocol with the roster."""

    def __init__(
        self,
        roster: Roster,
        *,
        leave_after_s: float,
        names: Callable[[], dict[int, str]] | None = None,
    ) -> None:
        """`names` gives the names of all registered keys by node id, where nodes are authenticated."""
        self.roster = roster
        self.online: set[int] = set()
        self._leave_after_s, self._names = leave_after_s, names
        self._invite_at: dict[int, float] = {}  # when to ask a node who it is; inf where that is settled
        self._new: list[int] = []
        self._returning: set[int] = set()
        self._leaving: set[int] = set()

    # -- nodes -------------------------------------------------------------------------------------------------------

    def observe(self, nodes: Iterable[int], *, now: float) -> list[int]:
        """Take note of the nodes that are online, and return those to be asked who they are."""
        self.online = set(nodes)
        self._invite_at = {node: at for node, at in self._invite_at.items() if node in self.online}
        asked = []
        for node in sorted(self.online):
            number = self.roster.at_node(node)
            if number is not None:
                self.roster.seen(number, now=now)
            elif self._invite_at.get(node, now) <= now:
                self._invite_at[node] = now + _ASK_AGAIN_S * 4
                asked.append(node)
        for number in self.roster.present:
            if now - self.roster[number].last_seen_s > self._leave_after_s:
                _log.warning("%s has left: it was away for %g s", self.roster[number].name, self._leave_after_s)
                self.leave(number)
        return asked

    def is_online(self, number: int) -> bool:
        """Whether a client takes part and its node is there."""
        member = self.roster[number]
        return member.present and member.node in self.online

    @property
    def present_online(self) -> int:
        """How many of those who take part are online."""
        return sum(self.is_online(number) for number in self.roster.present)

    # -- names -------------------------------------------------------------------------------------------------------

    def introduced(self, node: int, said: Introduction | Failure | Refused, *, now: float) -> int | None:
        """Take note of what a node says of itself; its client's number, if it is taken in."""
        if isinstance(said, Failure):
            _log.warning("node %d did not say who it is: %s", node, said.why)
            self._invite_at[node] = now + _ASK_AGAIN_S
            return None
        self._invite_at[node] = math.inf
        enrolled = self._enrolled(node, said, now)
        if isinstance(enrolled, Refused):
            _log.warning("refused: node %d, %s: %s", node, enrolled.reason, enrolled.why)
            if enrolled.reason is Reason.NAME_TAKEN:  # its key may have been registered this very moment
                self._invite_at[node] = now + _ASK_AGAIN_S
            return None
        number = enrolled.number
        if enrolled.displaced is not None:
            self._gone(enrolled.displaced)
        if enrolled.is_new:
            self._new.append(number)
        elif enrolled.returning and number not in self._new:
            self._back(number)
        word = "new" if enrolled.is_new else "back" if enrolled.returning else "here again"
        _log.info("%s is %s: client %d with n_k = %g", self.roster[number].name, word, number, self.roster[number].size)
        return number

    def _enrolled(self, node: int, said: Introduction | Refused, now: float) -> Enrolment | Refused:
        if isinstance(said, Refused):
            return said
        stranger = self._unregistered(node, said)
        return stranger or self.roster.enrol(said.name, said.size, node, now=now, details=said.details)

    def _unregistered(self, node: int, said: Introduction) -> Refused | None:
        """Whether an authenticated node claims another name than its key is registered under."""
        if self._names is None:
            return None
        registered = self._names().get(node)
        if registered == said.name:
            return None
        return Refused(Reason.NAME_TAKEN, f"it says {shown(said.name)}; its key is registered as {shown(registered)}")

    def leave(self, number: int) -> None:
        """A client takes part no more, from the next round on."""
        if self.roster.leave(self.roster[number].name) is not None:
            self._gone(number)

    def _back(self, number: int) -> None:
        if number in self._leaving:
            self._leaving.discard(number)
        else:
            self._returning.add(number)

    def _gone(self, number: int) -> None:
        if number in self._returning:
            self._returning.discard(number)
        else:
            self._leaving.add(number)

    # -- between two rounds ------------------------------------------------------------------------------------------

    def tell(self, protocol: Protocol) -> None:
        """Let the protocol know who came and who left."""
        if self._new:
            protocol.enrol([self.roster[number].size for number in self._new])
        if self._leaving:
            protocol.retire(sorted(self._leaving))
        if self._returning:
            protocol.readmit(sorted(self._returning))
        self._new, self._returning, self._leaving = [], set(), set()

    def snapshot(self) -> dict[str, Any]:
        """The roster, as plain values. Who came or left since the last round is not in it, see `restore`."""
        return self.roster.snapshot()

    def restore(self, snapshot: dict[str, Any], *, known: int, active: Iterable[int]) -> None:
        """Go back to a snapshot, of whose clients the protocol has `known`, those in `active` taking part."""
        self.roster.restore(snapshot)
        active = set(active)
        self._new = list(range(known, len(self.roster)))
        present = set(self.roster.present)
        self._leaving = {number for number in range(known) if number in active - present}
        self._returning = {number for number in range(known) if number in present - active}
