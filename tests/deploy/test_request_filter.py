"""What gets through the gate of a SuperLink, and what app a device takes."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.cli.build import build_fab_from_files
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata, ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_tree, iterate_object_tree

from safa.deploy.exchange.codec import encode
from safa.deploy.exchange.messages import Update
from safa.deploy.flower import request_filter as module
from safa.deploy.flower.app import app_fault, write_app
from safa.deploy.flower.internals import max_parts
from safa.deploy.flower.ports import LOOPBACK, bound_socket
from safa.deploy.flower.records import to_records
from safa.deploy.flower.request_filter import Listeners, RequestFilter, reply_fault

INNER, OUTER, PARTS = 1, 2, 100
PUSH, OBJECT, PULL = "/v1/fleet/push-messages", "/v1/fleet/push-object", "/v1/fleet/pull-messages"


def announcement(parts: int = 6, **about: Any) -> bytes:
    """A reply that is announced with so many objects."""
    tree = ObjectTree(object_id="0" * 64, children=[ObjectTree(object_id=f"{n:064x}") for n in range(1, parts)])
    given: dict[str, Any] = {"created_at": 2e9, "ttl": 60.0, "message_id": "0" * 64, "message_type": "train"}
    request = PushMessagesRequest(
        messages_list=[ProtoMessage(metadata=Metadata(**given | about))],
        message_object_trees=[tree],
        clientapp_runtime_list=[1.0],
    )
    return bytes(request.SerializeToString())


class Flower:
    """An app that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        self.asked.append((scope, body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


def answered(
    listener: RequestFilter, path: str, body: bytes = b"", *, port: int = OUTER, headers: dict[str, str] | None = None
) -> int:
    """The status that a request is answered with."""
    given = {"content-length": str(len(body)), "host": "fl.example.org"} if headers is None else headers
    scope: dict[str, Any] = {"type": "http", "path": path, "server": (LOOPBACK, port), "headers": []}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in given.items()]
    parts = [body[: len(body) // 2], body[len(body) // 2 :]]
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(listener(scope, receive, send))
    return int(sent[0]["status"])


def test_the_public_port_serves_what_is_for_devices() -> None:
    flower = Flower()
    listener = RequestFilter(flower, inner_port=INNER, parts=PARTS)
    assert answered(listener, "/v1/control/start-run") == 404
    assert answered(listener, PULL, headers={}) == 411
    assert answered(listener, PULL, headers={"content-length": "9" * 5000}) == 413
    assert not flower.asked
    assert answered(listener, "/v1/control/start-run", b"x" * 300_000, port=INNER) == 200
    assert answered(listener, PULL, b"who") == 200
    (_, first), (scope, second) = flower.asked
    assert (len(first), second) == (300_000, b"who")
    assert b"host" not in dict(scope["headers"])


def test_only_objects_may_be_large() -> None:
    flower = Flower()
    listener = RequestFilter(flower, inner_port=INNER, parts=PARTS)
    assert answered(listener, OBJECT, b"x" * 8_000_000) == 200
    assert answered(listener, OBJECT, b"x" * 8_000_001) == 413
    assert answered(listener, PULL, b"x" * 256_001) == 413
    assert len(flower.asked) == 1


def test_what_is_held_at_a_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    flower = Flower()
    listener = RequestFilter(flower, inner_port=INNER, parts=PARTS)
    monkeypatch.setattr(module, "_MOST_HELD_BYTES", 1000)
    assert answered(listener, PULL, b"x" * 1001) == 503
    assert [answered(listener, PULL, b"x" * 1000) for _ in range(3)] == [200] * 3  # what is answered is held no more


def test_a_reply_of_many_parts_is_refused_before_flower_sees_it() -> None:
    flower = Flower()
    listener = RequestFilter(flower, inner_port=INNER, parts=PARTS)
    assert answered(listener, PUSH, announcement(19_000)) == 413
    assert answered(listener, PUSH, announcement(PARTS + 1)) == 413
    assert not flower.asked
    assert answered(listener, PUSH, announcement(PARTS)) == 200
    assert flower.asked[0][1] == announcement(PARTS)


def test_the_depth_of_a_tree_does_not_hide_its_parts() -> None:
    tree = ObjectTree(object_id="0" * 64)
    for number in range(60):
        tree = ObjectTree(object_id=f"{number:064x}", children=[tree, *[ObjectTree(object_id="1" * 64)] * 20])
    request = PushMessagesRequest.FromString(announcement())
    request.message_object_trees[0].CopyFrom(tree)
    assert reply_fault(request.SerializeToString(), 1000) == 413


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xff\xff",
        b"",
        announcement(created_at=math.nan),
        announcement(ttl=math.nan),
        announcement(ttl=math.inf),
        announcement() + announcement(),
    ],
)
def test_what_is_no_reply_of_a_device_is_refused(body: bytes) -> None:
    assert reply_fault(announcement(), PARTS) == 0
    assert reply_fault(body, PARTS) == 400


def test_an_honest_update_of_any_size_has_few_enough_parts() -> None:
    for numbers in (13, 1_000_000, 30_000_000):
        update = Update(
            attempt=1, version=1, seconds=1.0, encoded=encode({"w": np.arange(numbers, dtype=np.float32)}, "float32")
        )
        records = to_records(update)
        pieces = len(list(iterate_object_tree(get_object_tree(records))))  # and the message itself
        assert pieces + 1 <= max_parts(4 * numbers) - 70
    assert max_parts(0) == 100
    assert max_parts(2 * 10**9) == 401


# -- connections -----------------------------------------------------------------------------------------------------


@contextmanager
def open_doors(flower: Any, *, request_s: float) -> Iterator[int]:
    """A server with two listeners, and the port of the outer one."""
    inner, outer = bound_socket(LOOPBACK, 0), bound_socket(LOOPBACK, 0)
    inner_port = int(inner.getsockname()[1])
    gate = RequestFilter(flower, inner_port=inner_port, parts=PARTS, request_s=request_s)
    server = Listeners(gate, inner_port=inner_port, request_s=request_s, lifespan="off", log_level="error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [inner, outer]})
    port = int(outer.getsockname()[1])
    thread.start()
    try:
        while not server.started or len(server.servers) < 2:
            time.sleep(0.01)
        yield port
    finally:
        server.should_exit = True
        thread.join()


class Lines(ExitStack):
    """Connections to a port, which are closed in the end."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def call(self, text: bytes) -> socket.socket:
        line = self.enter_context(socket.create_connection((LOOPBACK, self._port), timeout=30))
        line.sendall(text)
        return line


def hung_up(line: socket.socket) -> bool:
    """Whether the other side closes a connection without a word."""
    try:
        return line.recv(1000) == b""
    except ConnectionError:
        return True


HALF = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-le"
LATE = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab"


def test_connections_that_keep_it_waiting_are_closed() -> None:
    flower = Flower()
    with open_doors(flower, request_s=0.4) as port, Lines(port) as lines:
        url = f"http://{LOOPBACK}:{port}{PULL}"
        silent = [lines.call(text) for text in (b"", HALF) for _ in range(20)]
        late = lines.call(LATE)
        assert httpx.post(url, content=b"who").text == "ok"  # others are served meanwhile
        assert late.recv(1000).startswith(b"HTTP/1.1 408")
        assert all(map(hung_up, silent))
        with httpx.Client() as client:
            assert [client.post(url, content=b"who").text for _ in range(3)] == ["ok"] * 3
    assert len(flower.asked) == 4


def test_a_head_without_end_is_cut_off() -> None:
    with open_doors(Flower(), request_s=60.0) as port, Lines(port) as lines:
        line = lines.call(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nx: ")
        with suppress(ConnectionError):
            line.sendall(b"x" * 10_000_000)
        assert hung_up(line)


def test_a_new_connection_takes_the_place_of_the_one_that_waits_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_most_connections", lambda: 3)
    with open_doors(Flower(), request_s=60.0) as port, Lines(port) as lines:
        silent = [lines.call(HALF) for _ in range(3)]
        assert httpx.post(f"http://{LOOPBACK}:{port}{PULL}", content=b"who").text == "ok"
        assert hung_up(silent[0])


# -- the app of a device ---------------------------------------------------------------------------------------------


def built(folder: Path, **others: bytes) -> bytes:
    """The app of a run as Flower sends it, with other files."""
    files: dict[str, bytes | Path] = {file.name: file for file in folder.iterdir()}
    return build_fab_from_files(files | others)[0]


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # of Flower's
def test_a_device_knows_its_app(tmp_path: Path) -> None:
    app = tmp_path / "app"
    write_app(app, run=tmp_path / 'a "run"')
    assert app_fault(built(app)) == ""
    write_app(app, run=Path("/elsewhere"))
    assert app_fault(built(app)) == ""  # where the server has its run is its own affair


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # of Flower's
def test_a_device_takes_no_other_app(tmp_path: Path) -> None:
    app = tmp_path / "app"
    write_app(app, run=tmp_path)
    assert "other files" in app_fault(built(app, **{"safa/deploy/client_app.py": b"import os"}))
    assert "other files" in app_fault(built(app, **{"sitecustomize.py": b"import os"}))
    for old, new in (
        ('clientapp = "safa.deploy.flower.client_app:app"', 'clientapp = "os:system"'),
        ('dependencies = ["flwr>=1.41,<1.42"]', 'dependencies = ["flwr>=1.41,<1.42", "malware"]'),
        ('version = "1.0.0"', 'version = "1.0.1"'),
    ):
        text = (app / "pyproject.toml").read_text()
        assert old in text
        assert "differs" in app_fault(built(app, **{"pyproject.toml": text.replace(old, new).encode()}))
    assert "larger" in app_fault(built(app, LICENSE=b"x" * 1_000_000))
    assert "cannot be read" in app_fault(b"no archive")
