"""Who is there: nodes that come and go, and the clients behind them.

A node that appears is asked who it is. What it answers binds its node id to a name, and the name to a client's number.
The protocol learns of it between two rounds. A client that is offline is not gone: it keeps its share of the quota and
its weight, as a crashed one does. Only when it was away for `leave_after_s`, or its key was revoked, it has left, and
comes back when it does.

**Its weight.** n_k is what a client says of itself, and its weight follows from it. So it counts up to `size_multiple`
times the median of what all present clients have declared, and no more: whatever a client declares, it weighs no more
than so many usual ones. While fewer than half of the clients are hostile, that median lies between two honest sizes.
The bound moves as clients come and go; the protocol is told between two rounds.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from safa.deploy.exchange.messages import Failure, Introduction
from safa.deploy.exchange.roster import Enrolment, Roster
from safa.deploy.exchange.screening import Reason, Refused, shown
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
        size_multiple: float = math.inf,
        names: Callable[[], dict[int, str]] | None = None,
    ) -> None:
        """`names` gives the names of all registered keys by node id, where nodes are authenticated."""
        self.roster = roster
        self.online: set[int] = set()
        self._leave_after_s, self._size_multiple, self._names = leave_after_s, size_multiple, names
        self._invite_at: dict[int, float] = {}  # when to ask a node who it is; inf where that is settled
        self._bounded: dict[int, float] = {}  # whose n_k is bounded, and by what

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
        registered = None if self._names is None else set(self._names().values())
        for number in self.roster.present:
            member = self.roster[number]
            if registered is not None and member.name not in registered:
                _log.warning("%s has left: its key is revoked", member.name)
                self.leave(number)
            elif now - member.last_seen_s > self._leave_after_s:
                _log.warning("%s has left: it was away for %g s", member.name, self._leave_after_s)
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
        number, member = enrolled.number, self.roster[enrolled.number]
        word = "new" if enrolled.is_new else "back" if enrolled.returning else "here again"
        _log.info("%s is %s: client %d with n_k = %g", member.name, word, number, member.size)
        if isinstance(said, Introduction) and said.size != member.size:
            _log.warning(
                "%s declares n_k = %g now, but enrolled with %g, which is what counts; safa deploy expel %s, and a "
                "pardon, let it enrol anew", member.name, said.size, member.size, member.name,
            )  # fmt: skip
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
        if self.roster[number].present:  # else its name may be another client's by now
            self.roster.leave(self.roster[number].name)

    # -- between two rounds ------------------------------------------------------------------------------------------

    def tell(self, protocol: Protocol) -> None:
        """Let the protocol know who came, who left, and whose n_k counts for another number than before."""
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
        """What the n_k of every client counts for. Whose is bounded is told, once for every bound."""
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
        """Go back to a snapshot, after a time of which nothing is known: whoever takes part counts as just seen."""
        self.roster.restore(snapshot, now=now)
