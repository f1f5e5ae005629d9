"""The mailbox and a SuperLink that fails: Flower's own grid, over HTTP, to a server that answers what a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectRequest, PullObjectResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    GetNodesResponse,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from safa.deploy.exchange.messages import Failure, JoinReply, JoinRequest, Outgoing
from safa.deploy.flower import mailbox as module
from safa.deploy.flower.mailbox import Mailbox
from safa.deploy.flower.records import to_records
from safa.errors import SafaError

RUN = 7
Answers = Callable[[str, bytes], Any]


class SuperLink:
    """Takes messages, has each answered by an introduction, and fails where it is told to."""

    def __init__(self) -> None:
        self.fails: Callable[[str, bytes], int] = lambda _path, _body: 0
        """By route and body, the status to fail with, or 0."""
        self.asked: list[str] = []
        self._replies: dict[str, Message] = {}
        self.objects: dict[str, bytes] = {}

    def answer(self, path: str, body: bytes) -> Any:
        match path.rpartition("/")[2]:
            case "get-nodes":
                return GetNodesResponse(nodes=[NodeInfo(node_id=1), NodeInfo(node_id=2)])
            case "push-messages":
                return self._take(PushAppMessagesRequest.FromString(body))
            case "pull-messages":
                found = [self._replies[key] for key in PullAppMessagesRequest.FromString(body).message_ids]
                return PullAppMessagesResponse(
                    messages_list=[message_to_proto(reply) for reply in found],
                    message_object_trees=[get_object_tree(reply) for reply in found],
                )
            case "pull-object":
                content = self.objects[PullObjectRequest.FromString(body).object_id]
                return PullObjectResponse(object_found=True, object_available=True, object_content=content)
        return ConfirmMessageReceivedResponse()

    def _take(self, request: Any) -> Any:
        keys = []
        for proto in request.messages_list:
            asked = proto.metadata
            name = f"node-{asked.dst_node_id}"
            reply = Message(to_records(JoinReply(name=name, size=1.0)), dst_node_id=1, message_type="query")
            reply.metadata.__dict__["_reply_to_message_id"] = asked.message_id
            reply.metadata.__dict__["_message_id"] = reply.object_id
            self._replies[asked.message_id] = reply
            self.objects |= {key: found.deflate() for key, found in get_all_nested_objects(reply).items()}
            keys.append(asked.message_id)
        return PushAppMessagesResponse(message_ids=keys, session_id="s")

    def parts_of(self, node: int) -> set[str]:
        """The objects that only the reply of a node has."""
        (mine,) = [r for r in self._replies.values() if f"node-{node}".encode() in b"".join(_parts(r).values())]
        others = [set(_parts(reply)) for reply in self._replies.values() if reply is not mine]
        return set(_parts(mine)).difference(*others)


def _parts(reply: Message) -> dict[str, bytes]:
    return {key: found.deflate() for key, found in get_all_nested_objects(reply).items()}


@contextmanager
def serving(link: SuperLink) -> Iterator[HttpGrid]:
    """A grid that calls it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            link.asked.append(self.path.rpartition("/")[2])
            status = link.fails(self.path, body)
            content = b"database is locked" if status else link.answer(self.path, body).SerializeToString()
            self.send_response(status or 200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        grid = HttpGrid(f"127.0.0.1:{server.server_port}", insecure=True, token="t")
        grid.set_run(Run.create_empty(RUN))
        grid._retry_invoker.jitter = lambda _: 0.0
        try:
            yield grid
        finally:
            grid.close()
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, RUN, raising=False)


def _mailbox(grid: HttpGrid, clock: Callable[[], float] = lambda: 0.0) -> Mailbox:
    return Mailbox(grid, max_bytes=1000, ttl_s=60.0, clock=clock)


def _invite(box: Mailbox, *nodes: int) -> None:
    for node in nodes:
        assert box.send(Outgoing(node=node, message=JoinRequest(deployment="d", config="")), group="1")


def _heard(box: Mailbox) -> dict[int, Any]:
    return {outgoing.node: answer for outgoing, answer in box.collect()}


def _times(count: int, status: int, route: str) -> Callable[[str, bytes], int]:
    """Fails so many times, on one route."""
    left = [status] * count
    return lambda path, _: left.pop() if path.endswith(route) and left else 0


def test_an_error_of_the_superlink_is_waited_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    link = SuperLink()
    with serving(link) as grid:
        box = _mailbox(grid)
        link.fails = _times(5, 500, "get-nodes")
        assert box.nodes() == [1, 2]
        link.fails = _times(3, 500, "push-messages")
        _invite(box, 1)
        told = [record.getMessage() for record in caplog.records if record.name == "safa.deploy"]
        assert told == ["the SuperLink fails (status 500); retrying for 120 s", "the SuperLink answers again"] * 2
        link.fails = _times(2, 500, "confirm-message-received")
        assert isinstance(_heard(box)[1], JoinReply)


def test_a_superlink_that_never_answers_ends_it_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SUPERLINK_S", 0.0)
    link = SuperLink()
    with serving(link) as grid:
        box = _mailbox(grid)
        link.fails = lambda *_: 500
        with pytest.raises(SafaError, match=r"no answer from the SuperLink for 0 s \(status 500\)"):
            box.nodes()
    with pytest.raises(SafaError, match=r"no answer from the SuperLink for 0 s \(.*refused"):
        _mailbox(grid).nodes()


def test_a_run_that_flower_has_ended_is_said_to_be() -> None:
    link = SuperLink()
    with serving(link) as grid:
        link.fails = lambda *_: 403
        with pytest.raises(SafaError, match="Flower has ended the run"):
            _mailbox(grid).nodes()
        link.fails = lambda *_: 401
        with pytest.raises(SafaError, match="token has expired"):
            _mailbox(grid).nodes()


def test_a_message_that_is_refused_is_not_the_end() -> None:
    link = SuperLink()
    with serving(link) as grid:
        link.fails = lambda *_: 400
        assert not _mailbox(grid).send(Outgoing(node=1, message=JoinRequest(deployment="d", config="")), group="1")


def test_a_reply_that_cannot_be_fetched_is_a_failure_of_its_client_alone() -> None:
    link, now = SuperLink(), [0.0]
    with serving(link) as grid:
        box = _mailbox(grid, lambda: now[0])
        _invite(box, 1, 2)
        broken = link.parts_of(1)
        link.fails = lambda path, body: (
            500 if path.endswith("pull-object") and PullObjectRequest.FromString(body).object_id in broken else 0
        )
        first = _heard(box)
        assert list(first) == [2]
        assert isinstance(first[2], JoinReply)
        now[0] = 59.0
        assert _heard(box) == {}
        now[0] = 60.0
        assert _heard(box) == {1: Failure(why="Flower does not return a part of the reply")}


def test_a_reply_that_flower_itself_fails_to_read_does_not_hold_up_the_others() -> None:
    link, now = SuperLink(), [0.0]
    with serving(link) as grid:
        box = _mailbox(grid, lambda: now[0])
        _invite(box, 1, 2, 3)
        (poison,) = [key for key, outgoing in box._sent.items() if outgoing.node == 2]
        link.fails = lambda path, body: 500 if path.endswith("pull-messages") and poison.encode() in body else 0
        assert _heard(box) == {}
        now[0] = 10.0
        heard = _heard(box)
        assert heard.pop(2) == Failure(why="Flower does not return the reply")
        assert sorted(heard) == [1, 3]
        assert all(isinstance(answer, JoinReply) for answer in heard.values())


def test_while_it_fails_at_all_replies_none_is_blamed_for_two_minutes() -> None:
    link, now = SuperLink(), [0.0]
    with serving(link) as grid:
        box = _mailbox(grid, lambda: now[0])
        _invite(box, *range(1, 9))
        link.fails = lambda path, _: 500 if path.endswith("pull-messages") else 0
        for now[0] in (0.0, 10.0, 60.0, 119.0):
            link.asked.clear()
            assert _heard(box) == {}
            assert len(link.asked) <= 4  # all at once, and three by themselves
        now[0] = 120.0
        assert set(_heard(box).values()) == {Failure(why="Flower does not return the reply")}


def test_a_reply_of_too_many_parts_is_refused_where_there_is_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "max_parts", lambda _: 3)
    link = SuperLink()
    with serving(link) as grid:
        box = _mailbox(grid)
        _invite(box, 1)
        assert _heard(box)[1].why == "it has more than 3 parts"
        assert "pull-object" not in link.asked
