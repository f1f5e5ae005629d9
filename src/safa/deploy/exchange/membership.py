"""Membership: which nodes are online, and which clients stand behind them.

A node that appears is sent a `JoinRequest`. Its reply binds its node id to a name, and the name to a client's number.
The protocol is told between two rounds. A client that is offline has not left: it keeps its share of the quota and its
weight, as a crashed one does. It has left when it was offline for `leave_after_s`, or when its key was revoked, until
it comes back.

**Its weight.** n_k is declared by the client, and its weight follows from it. So it counts up to `size_multiple` times
the median of the sizes that all present clients have declared: whatever a client declares, it weighs no more than so
many usual ones. While fewer than half of the clients are hostile, that median lies between two honest sizes. The bound
moves as clients come and go; the protocol is told between two rounds.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from safa.deploy.exchange.messages import Failure, JoinReply
from safa.deploy.exchange.roster import Enrolment, Roster
from safa.deploy.exchange.screening import Rejected, RejectReason, shown
from safa.protocol import Protocol

__all__ = ["Membership"]

_ASK_AGAIN_S = 30.0
_log = logging.getLogger("safa.deploy")


class Membership:
    """Keeps the roster up to date with the nodes that are online, and the protocol with the roster."""

    def __init__(
        self,
        roster: Roster,
        *,
        leave_after_s: float,
        size_multiple: float = math.inf,
        names: Callable[[], dict[int, str]] | None = None,
    ) -> None:
        """`names` gives the names of all registered keys by node id, where nodes are authenticated."""
        self.roster = roster
        self.online: set[int] = set()
        self._leave_after_s, self._size_multiple, self._names = leave_after_s, size_multiple, names
        self._ask_at: dict[int, float] = {}  # when to send a node a JoinRequest; inf where it has replied
        self._bounded: dict[int, float] = {}  # whose n_k is bounded, and by what

    # -- nodes -------------------------------------------------------------------------------------------------------

    def on_nodes(self, nodes: Iterable[int], *, now: float) -> list[int]:
        """Process the list of nodes that are online; returns those to be sent a JoinRequest."""
        self.online = set(nodes)
        self._ask_at = {node: at for node, at in self._ask_at.items() if node in self.online}
        asked = []
        for node in sorted(self.online):
            number = self.roster.at_node(node)
            if number is not None:
                self.roster.seen(number, now=now)
            elif self._ask_at.get(node, now) <= now:
                self._ask_at[node] = now + _ASK_AGAIN_S * 4
                asked.append(node)
        registered = None if self._names is None else set(self._names().values())
        for number in self.roster.present:
            member = self.roster[number]
            if registered is not None and member.name not in registered:
                _log.warning("%s has left: its key is revoked", member.name)
                self.leave(number)
            elif now - member.last_seen_s > self._leave_after_s:
                _log.warning("%s has left: it was offline for %g s", member.name, self._leave_after_s)
                self.leave(number)
        return asked

    def is_online(self, number: int) -> bool:
        """Whether a client takes part and its node is online."""
        member = self.roster[number]
        return member.present and member.node in self.online

    @property
    def present_online(self) -> int:
        """How many of those who take part are online."""
        return sum(self.is_online(number) for number in self.roster.present)

    # -- names -------------------------------------------------------------------------------------------------------

    def on_join_reply(self, node: int, reply: JoinReply | Failure | Rejected, *, now: float) -> int | None:
        """Process a node's reply to a JoinRequest; returns its client's number, if it may take part."""
        if isinstance(reply, Failure):
            _log.warning("node %d did not join: %s", node, reply.why)
            self._ask_at[node] = now + _ASK_AGAIN_S
            return None
        self._ask_at[node] = math.inf
        enrolled = self._enrolled(node, reply, now)
        if isinstance(enrolled, Rejected):
            _log.warning("rejected: node %d, %s: %s", node, enrolled.reason, enrolled.why)
            if enrolled.reason is RejectReason.NAME_TAKEN:  # its key may have been registered just now
                self._ask_at[node] = now + _ASK_AGAIN_S
            return None
        number, member = enrolled.number, self.roster[enrolled.number]
        word = "new" if enrolled.is_new else "back" if enrolled.returning else "here again"
        _log.info("%s is %s: client %d with n_k = %g", member.name, word, number, member.size)
        if isinstance(reply, JoinReply) and reply.size != member.size:
            _log.warning(
                "%s declares n_k = %g, but enrolled with %g, which counts: safa deploy expel and --unblock reset it",
                member.name, reply.size, member.size,
            )  # fmt: skip
        return number

    def _enrolled(self, node: int, reply: JoinReply | Rejected, now: float) -> Enrolment | Rejected:
        if isinstance(reply, Rejected):
            return reply
        rejected = self._unregistered(node, reply)
        return rejected or self.roster.enrol(reply.name, reply.size, node, now=now, details=reply.details)

    def _unregistered(self, node: int, reply: JoinReply) -> Rejected | None:
        """Whether an authenticated node claims another name than its key is registered under."""
        if self._names is None:
            return None
        registered = self._names().get(node)
        if registered == reply.name:
            return None
        return Rejected(
            RejectReason.NAME_TAKEN, f"it claims {shown(reply.name)}; its key is registered as {shown(registered)}"
        )

    def leave(self, number: int) -> None:
        """A client no longer takes part, from the next round on."""
        if self.roster[number].present:  # else its name may be another client's by now
            self.roster.leave(self.roster[number].name)

    # -- between two rounds ------------------------------------------------------------------------------------------

    def update_protocol(self, protocol: Protocol) -> None:
        """Tell the protocol which clients joined and left, and whose effective n_k has changed."""
        known, present = protocol.clients, self.roster.present
        sizes = self._sizes()
        if known < len(sizes):
            protocol.enrol(sizes[known:])
        active = set(np.flatnonzero(protocol.active).tolist())
        if active - set(present):
            protocol.retire(sorted(active - set(present)))
        protocol.resize(present, [sizes[number] for number in present])
        if set(present) - active:
            protocol.readmit(sorted(set(present) - active))

    def _sizes(self) -> list[float]:
        """The effective n_k of every client. One that is bounded is logged, once for every bound."""
        present = self.roster.present
        declared = [self.roster[number].size for number in present]
        bound = self._size_multiple * statistics.median_low(declared) if declared else math.inf
        bounded = {number: bound for number in present if self.roster[number].size > bound}
        for number in sorted(bounded):
            if self._bounded.get(number) != bound:
                _log.warning(
                    "bounded: %s declared n_k = %g, which counts as %g: %g times the median of all clients",
                    self.roster[number].name, self.roster[number].size, bound, self._size_multiple,
                )  # fmt: skip
        self._bounded = bounded
        return [min(self.roster[number].size, bound) for number in range(len(self.roster))]

    def snapshot(self) -> dict[str, Any]:
        """The roster, as plain values."""
        return self.roster.snapshot()

    def restore(self, snapshot: dict[str, Any], *, now: float) -> None:
        """Restore a snapshot of an unknown age: every client that takes part counts as just seen."""
        self.roster.restore(snapshot, now=now)
