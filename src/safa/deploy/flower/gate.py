"""Flower's SuperLink and SuperNode with a gate before each: what gets in from the network, and what does not.

**The SuperLink** serves devices and operator on one port, and asks only devices for a key: who reaches that port could
register a key of his own, or have his own code run on the server. So it gets two doors. Devices come in by the outer
one, and find there what is for devices, nothing else. The inner one, on the loopback interface, serves everything.

At the outer door, before Flower sees anything of a request:

- a connection on which no request has come whole in time is closed, be it silent or slow;
- no request is larger than the pieces that Flower cuts a model into; none but those pieces is larger than 256 kB;
- a reply is announced with a tree of its objects, for each of which Flower writes a row, at a millisecond each and all
  in one transaction: 19,000 of them lock its database for longer than others wait. A tree is refused beyond the number
  of objects that an update may have;
- a reply whose times are no numbers, which Flower stores and then fails to read for ever, is refused.

**The SuperNode** installs and executes the app that comes with a run. Ours takes one app only (see `app`).
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
import math
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import uvicorn
from flwr.proto.fleet_pb2 import PushMessagesRequest

from safa.deploy.flower.app import APP_ID, APP_VERSION, app_fault
from safa.deploy.flower.clock import steady_flower
from safa.deploy.launcher.processes import bound

__all__ = ["Doors", "Gate", "reply_fault", "superlink", "supernode", "watched"]

_FOR_DEVICES = "/v1/fleet/"
_ANNOUNCE, _OBJECT = "/v1/fleet/push-messages", "/v1/fleet/push-object"
_MOST_BYTES = 8_000_000  # of an object: Flower cuts arrays into pieces of 5 MiB
_MOST_OTHER_BYTES = 256_000  # of any other request
_MOST_HELD_BYTES = 512_000_000  # of all requests that are being read or handled
_MOST_HEADER_BYTES = 64_000
_REQUEST_S = 20.0  # for a request to come, its body apart
_SLOWEST_BYTES_PER_S = 10_000  # for a body
_REFUSED = {400: b"malformed", 404: b"not found", 408: b"too slow", 411: b"a length is needed"} | {
    413: b"too large",
    503: b"too much at once",
}


# -- the SuperLink ---------------------------------------------------------------------------------------------------


def superlink(*, request_s: float = _REQUEST_S) -> None:
    """The program `safa.deploy.launcher.processes.SUPERLINK`: Flower's own, with two doors.

    Its arguments are host and port of the outer door, how many parts a reply may have, and then those of
    `flower-superlink`, which name the inner one.
    """
    flower: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    importlib.import_module("flwr.superlink.routers.fleet.node_auth")
    steady_flower(begins=True)
    outer, parts = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3])
    sys.argv[:4] = ["flower-superlink"]

    def run(*, app: Any, host: str, port: int, **options: Any) -> None:
        doors = [bound(host, port), bound(*outer)]
        gate = Gate(app, inner_port=port, parts=parts, request_s=request_s)
        Doors(gate, inner_port=port, request_s=request_s, **options).run(sockets=doors)

    flower.uvicorn = SimpleNamespace(run=run)
    flower.flower_superlink()


class Doors(uvicorn.Server):
    """Serves a gate on several doors, all but that of the inner port with no patience for slow connections."""

    def __init__(self, gate: Gate, *, inner_port: int, request_s: float = _REQUEST_S, **options: Any) -> None:
        """`request_s` is how long a stranger may keep it waiting; `options` are uvicorn's."""
        super().__init__(uvicorn.Config(gate, ws="none", **options))
        self._inner_port, self._request_s = inner_port, request_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on all doors."""
        await super().startup(sockets=[])
        loop, config = asyncio.get_running_loop(), self.config
        plain: Any = config.http_protocol_class
        strict = watched(plain, request_s=self._request_s, most=_most_connections())
        for door in (sockets or []) if self.started else []:
            kind: Any = plain if door.getsockname()[1] == self._inner_port else strict
            server = await loop.create_server(
                partial(kind, config=config, server_state=self.server_state, app_state=self.lifespan.state),
                sock=door,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=self._request_s if config.ssl else None,
            )
            self.servers.append(server)


def _most_connections() -> int:
    """How many connections strangers may hold: half of the files that this process may open, which it asks more of."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return (wanted if soft == resource.RLIM_INFINITY else soft) // 2


class Gate:
    """An ASGI app before Flower's. What comes by the inner port is passed on as it is."""

    def __init__(self, app: Any, *, inner_port: int, parts: int, request_s: float = _REQUEST_S) -> None:
        """`parts` is how many objects a reply may be announced with."""
        self._app, self._inner_port, self._parts, self._request_s = app, inner_port, parts, request_s
        self._held = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan" or scope["server"][1] == self._inner_port:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            length = dict(scope["headers"]).get(b"content-length", b"")
            status = self._status(scope["path"], length)
            if status:
                await _refuse(send, status)
            else:
                await self._pass(scope, receive, send, int(length))

    def _status(self, path: str, length: bytes) -> int:
        """What a request is refused with before it is read, or 0."""
        if not path.startswith(_FOR_DEVICES):
            return 404
        if not length.isdigit():
            return 411
        if len(length) > 10 or int(length) > (_MOST_BYTES if path == _OBJECT else _MOST_OTHER_BYTES):
            return 413
        return 503 if self._held + int(length) > _MOST_HELD_BYTES else 0

    async def _pass(self, scope: Any, receive: Any, send: Any, length: int) -> None:
        """Read a request, and have Flower answer it unless there is something wrong with it."""
        self._held += length
        try:
            try:
                async with asyncio.timeout(self._request_s + length / _SLOWEST_BYTES_PER_S):
                    body = await _read(receive)
            except TimeoutError:
                await _refuse(send, 408)
                return
            if body is None:
                return
            status = reply_fault(body, self._parts) if scope["path"] == _ANNOUNCE else 0
            if status:
                await _refuse(send, status)
                return
            parts = [body]

            async def again() -> Any:
                return {"type": "http.request", "body": parts.pop(), "more_body": False} if parts else await receive()

            # Flower tells who must show a key by the address of a request, which a Host could make another one
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            await self._app(scope | {"headers": headers}, again, send)
        finally:
            self._held -= length


async def _read(receive: Any) -> bytes | None:
    """The body of a request; None if whoever sent it has gone."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def _refuse(send: Any, status: int) -> None:
    text = _REFUSED[status]
    headers = [(b"content-length", str(len(text)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def reply_fault(body: bytes, parts: int) -> int:
    """What the announcement of a reply is refused with, or 0; `parts` is how many objects it may have."""
    try:
        request = PushMessagesRequest.FromString(body)
    except Exception:  # protobuf's own, of which there are several
        return 400
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return 400
    about = request.messages_list[0].metadata
    if not (math.isfinite(about.created_at) and math.isfinite(about.ttl)):
        return 400
    if not all(map(math.isfinite, request.clientapp_runtime_list)):
        return 400
    left, count = [request.message_object_trees[0]], 0
    while left:
        count += 1
        if count > parts:
            return 413
        left.extend(left.pop().children)
    return 0


def watched(base: type[Any], *, request_s: float, most: int) -> type[Any]:
    """A protocol of uvicorn's that closes connections on which no whole request comes, in time or at all.

    uvicorn itself waits for ever for the first request, and for the end of a head. While a request is being read or
    answered, it is for the gate to be impatient. Where there are more connections than `most`, the one that has kept
    the server waiting for the longest time is closed.
    """
    everyone: set[Any] = set()
    waiting: dict[Any, asyncio.TimerHandle] = {}

    class Watched(base):  # type: ignore[misc]
        _unread = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(everyone) >= most:
                next(iter(waiting), self).transport.abort()
            everyone.add(self)
            self._wait()

        def data_received(self, data: bytes) -> None:
            self._unread += len(data)
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._attend()
            elif self._unread > _MOST_HEADER_BYTES:
                self.transport.abort()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._wait()

        def connection_lost(self, problem: Exception | None) -> None:
            super().connection_lost(problem)
            everyone.discard(self)
            self._attend()

        def _wait(self) -> None:
            """Wait for a request, once what was written has had time to be sent."""
            self._attend()
            self._unread = 0
            unsent: int = self.transport.get_write_buffer_size()
            patience = request_s + unsent / _SLOWEST_BYTES_PER_S
            waiting[self] = self.loop.call_later(patience, self.transport.abort)

        def _attend(self) -> None:
            timer = waiting.pop(self, None)
            if timer is not None:
                timer.cancel()

    return Watched


# -- the SuperNode ---------------------------------------------------------------------------------------------------


def supernode() -> None:
    """The program `safa.deploy.launcher.processes.SUPERNODE`: Flower's own, which takes our app and no other.

    Flower verifies apps itself where it is told whom to trust, but by signatures that its own hub gives. That check is
    switched on, and what it asks is answered here. Should a Flower to come look for its answer elsewhere, it finds no
    signature, and every app is refused.
    """
    program: Any = importlib.import_module("flwr.supernode.cli.flower_supernode")
    worker: Any = importlib.import_module("flwr.supernode.start_client_internal")
    start, connect = program.start_client_internal, worker.http_request_response
    sys.argv[0] = "flower-supernode"

    @contextmanager
    def connected(*arguments: Any, **options: Any) -> Iterator[Any]:
        with connect(*arguments, **options) as connection:
            node, receive, send, get_run, get_fab, *others = connection
            yield (node, receive, send, _our_run(get_run), _measured(get_fab), *others)

    worker.http_request_response = connected
    worker._verify_fab = lambda fab, _: is_ours(fab.content)
    program.start_client_internal = lambda **options: start(**options | {"trusted_entities": {"safa": ""}})
    program.flower_supernode()


def is_ours(fab: bytes) -> bool:
    """Whether an app is that of `safa deploy`; if it is not, the log says so."""
    fault = app_fault(fab)
    if fault:
        logging.getLogger("flwr").error(
            "Refused the app of a run: %s. This device runs the app of safa deploy and no other.", fault
        )
    return not fault


def _our_run(get_run: Callable[[int], Any]) -> Callable[[int], Any]:
    """Whatever a server says that a run is, here it is the client app of ours."""

    def run(run_id: int) -> Any:
        return replace(get_run(run_id), fab_id=APP_ID, fab_version=APP_VERSION, primary_task_type="flwr-serverapp")

    return run


def _measured(get_fab: Callable[[str, int], Any]) -> Callable[[str, int], Any]:
    """An app under the hash that it has, not the one that a server says; `is_ours` is asked in place of a signature."""

    def fab(fab_hash: str, run_id: int) -> Any:
        found = get_fab(fab_hash, run_id)
        return replace(found, hash_str=hashlib.sha256(found.content).hexdigest(), verifications={"valid_license": "-"})

    return fab
