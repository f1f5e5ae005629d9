"""The server's mailbox: posts go out, answers come in, and nothing that a node sends can hold it up or break it.

`Grid.pull_messages` is not made for strangers. It waits up to two hours for a reply of which only the announcement has
come; it fails, and loses the other replies, where one of them is no message; it takes any amount into memory; and it
hands out what a reply says of itself, which may be that it answers what another node was asked. So replies are pulled
here by the same calls of Flower's, but piece by piece, never waiting, and no further than an update may be large. What
a reply answers is what the SuperLink says that it answers: that, it has checked.

**When the SuperLink fails.** Flower repeats for ever what gets no answer, and gives up at once where the answer is an
error of the SuperLink's own (500, as when its database is locked). Here both are repeated, with growing pauses, for two
minutes; then the server stops with a sentence. An error that comes with one reply only is a failure of whom it is from:
the SuperLink serves the others, so they go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from flwr.app import Message, MessageType
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import RunNotRunningException

from safa.deploy.exchange.codec import most_parts
from safa.deploy.exchange.messages import Answer, Failure, Invitation, Post, read_answer, read_introduction, written
from safa.deploy.exchange.screening import Reason, Refused
from safa.errors import SafaError

if TYPE_CHECKING:
    from flwr.serverapp import Grid

__all__ = ["Mailbox"]

_INVITATION_TTL_S = 3600.0  # more than clocks may differ; who has not answered is asked again long before
_PATIENCE_S = 600.0  # for the next piece of a reply: a slow device announces it long before it has sent all of it
_SLACK_BYTES = 1_000_000  # for all that is not numbers
_SUPERLINK_S = 120.0  # how long the SuperLink may fail to answer
_REPLY_S = 60.0  # how long it may fail to hand out a part of a reply
_DOUBT_S = 10.0  # how long it may fail to hand out replies before they are asked for one at a time
_NONE_OF = 3  # so many failures and no success in a row are not the fault of a single reply

_log = logging.getLogger("safa.deploy")


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
    failing_since: float | None = None
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
        self._max_parts = most_parts(max_bytes)  # as at the gate, for a SuperLink that has none
        self._posted: dict[str, Post] = {}  # by the message's id, in the order of sending
        self._parcels: list[_Parcel] = []
        self._patience = _Patience(self._grid)
        self._failing_since: float | None = None

    def nodes(self) -> list[int]:
        """The nodes that are online."""
        with _sentences():
            return list(self._grid.get_node_ids())

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
        with _sentences():
            try:
                taken = [message_id for message_id in self._grid.push_messages([message]) if message_id]
            except httpx.HTTPStatusError as problem:
                if problem.response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
                    raise
                return False
        self._posted |= dict.fromkeys(taken, post.without_model())
        return bool(taken)

    def collect(self) -> list[tuple[Post, Answer]]:
        """The answers that have come in whole, in the order of the posts where they were announced together."""
        answers = self._look()
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

    def _look(self) -> list[tuple[Post, Answer]]:
        """Take note of the replies that were announced since the last look; return those that cannot be had."""
        if not self._posted:
            return []
        if self._note(list(self._posted)):
            self._failing_since = None
            return []
        now = self._clock()
        since = self._failing_since = now if self._failing_since is None else self._failing_since
        if now - since < _DOUBT_S:
            return []
        failing, heard = [], False
        for message_id in list(self._posted):  # one of them may be what it fails at
            if self._note([message_id]):
                heard = True
            else:
                failing.append(message_id)
                if len(failing) == _NONE_OF and not heard:
                    break
        if not heard:
            if now - since < _SUPERLINK_S:
                return []
            failing = list(self._posted)
        return [(self._posted.pop(which), Failure(why="Flower fails to hand out the reply")) for which in failing]

    def _note(self, message_ids: list[str]) -> bool:
        """Take note of the replies to some messages; False if the SuperLink has failed."""
        found = self._try(self._grid._runtime_client.PullMessages, PullAppMessagesRequest(message_ids=message_ids))
        if found is None:
            return False
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
        return True

    def _fetch(self, parcel: _Parcel) -> Answer | None:
        """Fetch what is there of a reply; None while some of it is not."""
        if len(parcel.missing) > self._max_parts:
            return Refused(Reason.TOO_LARGE, f"it has more than {self._max_parts} parts")
        run_id = self._grid.run.run_id
        while parcel.missing:
            request = PullObjectRequest(node=self._grid.node, run_id=run_id, object_id=parcel.missing[-1])
            response = self._try(self._grid._runtime_client.PullObject, request)
            if response is None:
                now = self._clock()
                parcel.failing_since = now if parcel.failing_since is None else parcel.failing_since
                failed = now - parcel.failing_since >= _REPLY_S
                return Failure(why="Flower fails to hand out a part of the reply") if failed else None
            parcel.failing_since = None
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
        self._try(self._grid._runtime_client.ConfirmMessageReceived, request)  # if it does not, TTL ends it

    def _try(self, call: Callable[[Any], Any], request: Any) -> Any:
        """What is answered to a call that is about single replies; None if that is an error."""
        with _sentences(), self._patience.for_errors(False):
            try:
                return call(request)
            except httpx.HTTPStatusError:
                return None


class _Patience:
    """Makes what Flower uses to repeat its calls patient with errors of the SuperLink's, but not without end."""

    def __init__(self, grid: Any) -> None:
        invoker = grid._retry_invoker
        self._give_up, self._back_off, self._succeed = invoker.should_giveup, invoker.on_backoff, invoker.on_success
        self._here = threading.local()  # Flower's heartbeat uses it in a thread of its own
        self._failing = False
        invoker.max_time = _SUPERLINK_S
        invoker.should_giveup, invoker.on_backoff, invoker.on_success = self._gives_up, self._pauses, self._succeeds

    @contextmanager
    def for_errors(self, patient: bool) -> Iterator[None]:
        """Whether errors of the SuperLink's are waited out in here."""
        self._here.patient = patient
        try:
            yield
        finally:
            self._here.patient = True

    def _gives_up(self, problem: Exception) -> bool:
        status = problem.response.status_code if isinstance(problem, httpx.HTTPStatusError) else 0
        if status >= httpx.codes.INTERNAL_SERVER_ERROR:
            return not getattr(self._here, "patient", True)
        if status == httpx.codes.UNAUTHORIZED and threading.current_thread() is threading.main_thread():
            raise SafaError("Flower lets the server in no more: its token has expired, or its run has ended")
        return bool(self._give_up(problem))

    def _pauses(self, state: Any) -> None:
        if not self._failing:
            _log.warning("the SuperLink fails (%s); trying again for %g s", _told(state.exception), _SUPERLINK_S)
        self._failing = True
        self._back_off(state)

    def _succeeds(self, state: Any) -> None:
        if self._failing:
            _log.warning("the SuperLink answers again")
        self._failing = False
        self._succeed(state)


@contextmanager
def _sentences() -> Iterator[None]:
    """Say in a sentence why it cannot go on."""
    try:
        yield
    except RunNotRunningException:
        raise SafaError(
            "Flower has ended the run: it was stopped, or the SuperLink takes the server for dead"
        ) from None
    except httpx.HTTPError as problem:
        raise SafaError(
            f"the SuperLink has not answered for {_SUPERLINK_S:g} s ({_told(problem)}); flower/superlink.log says more"
        ) from None


def _told(problem: Exception | None) -> str:
    if isinstance(problem, httpx.HTTPStatusError):
        return f"status {problem.response.status_code}"
    return str(problem) or type(problem).__name__


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
