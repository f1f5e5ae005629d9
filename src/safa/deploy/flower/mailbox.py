"""The server's mailbox: sends messages over a grid and collects the replies, whatever a node sends.

`Grid.pull_messages` is not made for untrusted nodes. It waits up to two hours for a reply of which only the
announcement has come; it fails, and loses the other replies, where one of them is no message; it takes any amount into
memory; and it returns what a reply claims about itself, which may be that it answers a message to another node. So
replies are fetched here part by part, without waiting, and no further than an update may be large. Which message a
reply answers is what the SuperLink says, because it has checked that.

An error of the SuperLink that concerns one reply only is a failure of the client that it is from: the SuperLink serves
the others. While it fails for all, it is retried (`internals.GridClient`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flwr.app import Message, MessageType

from safa.deploy.exchange.messages import Failure, JoinRequest, Outgoing, Reply
from safa.deploy.exchange.screening import Rejected, RejectReason
from safa.deploy.flower.internals import NODE_UNAVAILABLE, Announced, GridClient, max_parts, read_message
from safa.deploy.flower.records import read_join_reply, read_train_reply, to_records

if TYPE_CHECKING:
    from flwr.serverapp import Grid

__all__ = ["Mailbox"]

_JOIN_TTL_S = 3600.0  # more than clocks may differ; a node that does not reply is asked again long before
_PART_S = 600.0  # for the next part of a reply: a slow device announces it long before it has sent all of it
_SLACK_BYTES = 1_000_000  # for all that is not numbers
_SUPERLINK_S = 120.0  # how long the SuperLink may fail to answer
_REPLY_S = 60.0  # how long it may fail to return a part of a reply
_DOUBT_S = 10.0  # how long it may fail to return replies before they are asked for one at a time
_NONE_OF = 3  # so many failures and no success in a row are not the fault of a single reply


@dataclass
class _PartialReply:
    """A reply that is not complete yet."""

    outgoing: Outgoing
    asked: str
    """The id of the message that it answers."""
    message_id: str
    missing: list[str]
    """Its objects that are still to be fetched."""
    until: float
    failing_since: float | None = None
    contents: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


class Mailbox:
    """Sends messages over a grid, and collects the replies to them."""

    def __init__(
        self, grid: Grid, *, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_bytes` bounds the numbers of an update; `ttl_s` is how long a TrainRequest is valid."""
        self._link = GridClient(grid, retry_s=_SUPERLINK_S)
        self._max_bytes, self._ttl_s, self._clock = max_bytes + _SLACK_BYTES, ttl_s, clock
        self._max_parts = max_parts(max_bytes)  # as in the request filter, for a SuperLink that has none
        self._sent: dict[str, Outgoing] = {}  # by the message's id, in the order of sending
        self._partial: list[_PartialReply] = []
        self._failing_since: float | None = None

    def nodes(self) -> list[int]:
        """The nodes that are online."""
        return self._link.nodes()

    def send(self, outgoing: Outgoing, *, group: str) -> bool:
        """Send a message; False where Flower does not accept it."""
        joins = isinstance(outgoing.message, JoinRequest)
        message_id = self._link.push(
            Message(
                to_records(outgoing.message),
                dst_node_id=outgoing.node,
                message_type=MessageType.QUERY if joins else MessageType.TRAIN,
                ttl=_JOIN_TTL_S if joins else self._ttl_s,
                group_id=group,
            )
        )
        if message_id:
            self._sent[message_id] = outgoing.without_model()
        return bool(message_id)

    def collect(self) -> list[tuple[Outgoing, Reply]]:
        """The replies that are complete, in the order of sending where they were announced together."""
        replies = self._look()
        waiting = []
        for partial in self._partial:
            reply = self._fetch(partial)
            if reply is None:
                waiting.append(partial)
                continue
            self._link.forget(partial.message_id)
            if isinstance(reply, Failure):
                self._link.forget(partial.asked)  # it may never have been fetched, and holds a model
            replies.append((partial.outgoing, reply))
        self._partial = waiting
        return replies

    def _look(self) -> list[tuple[Outgoing, Reply]]:
        """Note the replies that were announced since the last call; returns failures for those that cannot be had."""
        if not self._sent:
            return []
        if self._note(list(self._sent)):
            self._failing_since = None
            return []
        now = self._clock()
        since = self._failing_since = now if self._failing_since is None else self._failing_since
        if now - since < _DOUBT_S:
            return []
        failing = self._failing_alone()
        if failing is None:
            failing = list(self._sent) if now - since >= _SUPERLINK_S else []
        return [(self._sent.pop(which), Failure(why="Flower does not return the reply")) for which in failing]

    def _failing_alone(self) -> list[str] | None:
        """Ask for the replies one at a time: the messages for which that fails; None if it fails for all."""
        failing, any_success = [], False
        for message_id in list(self._sent):
            if self._note([message_id]):
                any_success = True
            else:
                failing.append(message_id)
                if len(failing) == _NONE_OF and not any_success:
                    return None
        return failing if any_success else None

    def _note(self, message_ids: list[str]) -> bool:
        """Note the replies to some messages; False if the SuperLink has failed."""
        found = self._link.announced(message_ids)
        if found is None:
            return False
        place = {message_id: number for number, message_id in enumerate(self._sent)}

        def sent_at(reply: Announced) -> int:
            return place.get(reply.asked, -1)

        for asked, message_id, objects in sorted(found, key=sent_at):
            outgoing = self._sent.pop(asked, None)
            if outgoing is not None:
                self._partial.append(_PartialReply(outgoing, asked, message_id, objects, self._clock() + _PART_S))
        return True

    def _fetch(self, partial: _PartialReply) -> Reply | None:
        """Fetch the available parts of a reply; None while some are still to come."""
        if len(partial.missing) > self._max_parts:
            return Rejected(RejectReason.TOO_LARGE, f"it has more than {self._max_parts} parts")
        while partial.missing:
            part = self._link.fetch(partial.missing[-1])
            if part is None:
                return self._not_returned(partial)
            partial.failing_since = None
            if not part.is_known:
                return Failure(why="a part of the reply is gone")
            if part.content is None:
                late = self._clock() > partial.until
                return Rejected(RejectReason.UNREADABLE, "the rest of it never came") if late else None
            partial.size += len(part.content)
            if partial.size > self._max_bytes:
                return Rejected(RejectReason.TOO_LARGE, f"it has more than {self._max_bytes} bytes")
            partial.contents[partial.missing.pop()] = part.content
            partial.until = self._clock() + _PART_S
        return _read(partial)

    def _not_returned(self, partial: _PartialReply) -> Failure | None:
        """The SuperLink fails to return a part of a reply; after a while, that is a failure of its client."""
        now = self._clock()
        partial.failing_since = now if partial.failing_since is None else partial.failing_since
        failed = now - partial.failing_since >= _REPLY_S
        return Failure(why="Flower does not return a part of the reply") if failed else None


def _read(partial: _PartialReply) -> Reply:
    """The content of a complete reply. It may be anything, and must not stop the server."""
    try:
        message = read_message(partial.message_id, partial.contents)
        if not isinstance(message, Message):
            return Rejected(RejectReason.UNREADABLE, "it is no message")
        if message.has_error():
            code = message.error.code
            why = message.error.reason or "no reason was given"
            return Failure(why=why, code=code, unreachable=code == NODE_UNAVAILABLE)
        joins = isinstance(partial.outgoing.message, JoinRequest)
        return read_join_reply(message.content) if joins else read_train_reply(message.content)
    except Exception as error:
        return Rejected(RejectReason.UNREADABLE, f"it cannot be read ({type(error).__name__})")
