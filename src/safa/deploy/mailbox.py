"""The server's mailbox: posts go out, answers come in, and nothing that a node sends can hold it up or break it.

`Grid.pull_messages` is not made for strangers. It waits up to two hours for a reply of which only the announcement has
come; it fails, and loses the other replies, where one of them is no message; it takes any amount into memory; and it
hands out what a reply says of itself, which may be that it answers what another node was asked. So replies are pulled
here by the same calls of Flower's, but piece by piece, never waiting, and no further than an update may be large. What
a reply answers is what the SuperLink says that it answers: that, it has checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flwr.app import Message, MessageType
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from safa.deploy.letters import Answer, Failure, Invitation, Post, read_answer, read_introduction, written
from safa.deploy.screening import Reason, Refused

if TYPE_CHECKING:
    from flwr.serverapp import Grid

__all__ = ["Mailbox"]

_INVITATION_TTL_S = 3600.0  # more than clocks may differ; who has not answered is asked again long before
_PATIENCE_S = 600.0  # for the next piece of a reply: a slow device announces it long before it has sent all of it
_SLACK_BYTES = 1_000_000  # for all that is not numbers
_MOST_OBJECTS = 20_000


@dataclass
class _Parcel:
    """A reply of which more is to come."""

    post: Post
    asked: str
    """The id of the message that it answers."""
    message_id: str
    missing: list[str]
    """Its objects that are still to be fetched."""
    until: float
    contents: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


class Mailbox:
    """Sends posts over a grid, and finds the answers to them."""

    def __init__(
        self, grid: Grid, *, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_bytes` bounds the numbers of an update; `ttl_s` is how long an order stands."""
        self._grid: Any = grid
        self._max_bytes, self._ttl_s, self._clock = max_bytes + _SLACK_BYTES, ttl_s, clock
        self._posted: dict[str, Post] = {}  # by the message's id, in the order of sending
        self._parcels: list[_Parcel] = []

    def send(self, post: Post, *, group: str) -> bool:
        """Send a post; False where Flower does not take it."""
        invites = isinstance(post.letter, Invitation)
        message = Message(
            written(post.letter),
            dst_node_id=post.node,
            message_type=MessageType.QUERY if invites else MessageType.TRAIN,
            ttl=_INVITATION_TTL_S if invites else self._ttl_s,
            group_id=group,
        )
        taken = [message_id for message_id in self._grid.push_messages([message]) if message_id]
        self._posted |= dict.fromkeys(taken, post.without_model())
        return bool(taken)

    def collect(self) -> list[tuple[Post, Answer]]:
        """The answers that have come in whole, in the order of the posts where they were announced together."""
        self._look()
        answers: list[tuple[Post, Answer]] = []
        waiting = []
        for parcel in self._parcels:
            answer = self._fetch(parcel)
            if answer is None:
                waiting.append(parcel)
            else:
                self._forget(parcel.message_id)
                if isinstance(answer, Failure):
                    self._forget(parcel.asked)  # it may never have been fetched, and holds a model
                answers.append((parcel.post, answer))
        self._parcels = waiting
        return answers

    def _look(self) -> None:
        """Take note of the replies that were announced since the last look."""
        if not self._posted:
            return
        found = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=list(self._posted)))
        place = {message_id: number for number, message_id in enumerate(self._posted)}
        replies = [
            (reply.metadata.reply_to_message_id, reply.metadata.message_id, tree)
            for reply, tree in zip(found.messages_list, found.message_object_trees, strict=True)
        ]
        for asked, message_id, tree in sorted(replies, key=lambda reply: place.get(reply[0], -1)):
            post = self._posted.pop(asked, None)
            if post is not None:
                objects = [item.object_id for item in iterate_object_tree(tree)]
                self._parcels.append(_Parcel(post, asked, message_id, objects, self._clock() + _PATIENCE_S))

    def _fetch(self, parcel: _Parcel) -> Answer | None:
        """Fetch what is there of a reply; None while some of it is not."""
        if len(parcel.missing) > _MOST_OBJECTS:
            return Refused(Reason.TOO_LARGE, f"it has more than {_MOST_OBJECTS} parts")
        run_id = self._grid.run.run_id
        while parcel.missing:
            request = PullObjectRequest(node=self._grid.node, run_id=run_id, object_id=parcel.missing[-1])
            response = self._grid._runtime_client.PullObject(request)
            if not response.object_found:
                return Failure(why="a part of the reply is gone")
            if not response.object_available:
                late = self._clock() > parcel.until
                return Refused(Reason.UNREADABLE, "the rest of it never came") if late else None
            parcel.size += len(response.object_content)
            if parcel.size > self._max_bytes:
                return Refused(Reason.TOO_LARGE, f"it has more than {self._max_bytes} bytes")
            parcel.contents[parcel.missing.pop()] = response.object_content
            parcel.until = self._clock() + _PATIENCE_S
        return _opened(parcel)

    def _forget(self, message_id: str) -> None:
        """Let the SuperLink forget a message."""
        request = ConfirmMessageReceivedRequest(
            node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=message_id
        )
        self._grid._runtime_client.ConfirmMessageReceived(request)


def _opened(parcel: _Parcel) -> Answer:
    """What a whole reply says. Whatever may be wrong with what a stranger has sent, it is no reason to stop."""
    try:
        message = inflate_object_from_contents(parcel.message_id, parcel.contents)
        if not isinstance(message, Message):
            return Refused(Reason.UNREADABLE, "it is no message")
        if message.has_error():
            return Failure(why=message.error.reason or "no reason was given", code=message.error.code)
        invited = isinstance(parcel.post.letter, Invitation)
        return read_introduction(message.content) if invited else read_answer(message.content)
    except Exception as problem:
        return Refused(Reason.UNREADABLE, f"it cannot be read ({type(problem).__name__})")
