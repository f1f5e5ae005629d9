"""The public port of a SuperLink: which requests of devices reach Flower.

Flower's SuperLink serves devices and operator on one port, and asks only devices for a key: whoever reaches that port
could register a key, or run code on the server. So it gets two listeners. The public one serves devices, and only what
is meant for devices. The inner one, on the loopback interface, serves everything.

On the public port, before Flower sees a request:

- a connection on which no whole request arrives in time is closed, be it silent or slow;
- no request is larger than the pieces into which Flower divides a model; no other is larger than 256 kB;
- a reply is announced with a tree of its objects, for each of which Flower writes a row, at a millisecond each and all
  in one transaction: 19,000 of them lock its database for longer than others wait. A tree with more objects than an
  update may have is rejected;
- a reply whose times are not finite, which Flower stores and then can never read, is rejected.
"""

from __future__ import annotations

import asyncio
import math
import resource
import socket
from functools import partial
from typing import Any

import uvicorn

from safa.deploy.flower.internals import FLEET, PUSH_MESSAGES, PUSH_OBJECT, parse_announcement

__all__ = ["REQUEST_S", "Listeners", "RequestFilter", "limited", "reply_fault"]

_MOST_BYTES = 8_000_000  # of an object: Flower divides arrays into pieces of 5 MiB
_MOST_OTHER_BYTES = 256_000  # of any other request
_MOST_HELD_BYTES = 512_000_000  # of all requests that are being read or handled
_MOST_HEADER_BYTES = 64_000
REQUEST_S = 20.0  # for a request to come, its body apart
_SLOWEST_BYTES_PER_S = 10_000  # for a body
_REJECTIONS = {400: b"malformed", 404: b"not found", 408: b"too slow", 411: b"a length is needed"} | {
    413: b"too large",
    503: b"too much at once",
}


class Listeners(uvicorn.Server):
    """Serves a request filter on several sockets, all but that of the inner port with limits for connections."""

    def __init__(self, app: RequestFilter, *, inner_port: int, request_s: float = REQUEST_S, **options: Any) -> None:
        """`request_s` is how long a request may take to arrive; `options` are uvicorn's."""
        super().__init__(uvicorn.Config(app, ws="none", **options))
        self._inner_port, self._request_s = inner_port, request_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on all sockets."""
        await super().startup(sockets=[])
        loop, config = asyncio.get_running_loop(), self.config
        plain: Any = config.http_protocol_class
        strict = limited(plain, request_s=self._request_s, most=_most_connections())
        for listener in (sockets or []) if self.started else []:
            kind: Any = plain if listener.getsockname()[1] == self._inner_port else strict
            server = await loop.create_server(
                partial(kind, config=config, server_state=self.server_state, app_state=self.lifespan.state),
                sock=listener,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=self._request_s if config.ssl else None,
            )
            self.servers.append(server)


def _most_connections() -> int:
    """How many public connections there may be: half of the limit of open files, which is raised first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return (wanted if soft == resource.RLIM_INFINITY else soft) // 2


class RequestFilter:
    """An ASGI app before Flower's. Requests on the inner port are passed on as they are."""

    def __init__(self, app: Any, *, inner_port: int, parts: int, request_s: float = REQUEST_S) -> None:
        """`parts` is how many objects a reply may be announced with."""
        self._app, self._inner_port, self._parts, self._request_s = app, inner_port, parts, request_s
        self._held = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Reply a request."""
        if scope["type"] == "lifespan" or scope["server"][1] == self._inner_port:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            length = dict(scope["headers"]).get(b"content-length", b"")
            status = self._status(scope["path"], length)
            if status:
                await _reject(send, status)
            else:
                await self._pass(scope, receive, send, int(length))

    def _status(self, path: str, length: bytes) -> int:
        """The status with which a request is rejected before it is read, or 0."""
        if not path.startswith(FLEET):
            return 404
        if not length.isdigit():
            return 411
        if len(length) > 10 or int(length) > (_MOST_BYTES if path == PUSH_OBJECT else _MOST_OTHER_BYTES):
            return 413
        return 503 if self._held + int(length) > _MOST_HELD_BYTES else 0

    async def _pass(self, scope: Any, receive: Any, send: Any, length: int) -> None:
        """Read a request, and let Flower answer it unless it is rejected."""
        self._held += length
        try:
            try:
                async with asyncio.timeout(self._request_s + length / _SLOWEST_BYTES_PER_S):
                    body = await _read(receive)
            except TimeoutError:
                await _reject(send, 408)
                return
            if body is None:
                return
            status = reply_fault(body, self._parts) if scope["path"] == PUSH_MESSAGES else 0
            if status:
                await _reject(send, status)
                return
            parts = [body]

            async def again() -> Any:
                return {"type": "http.request", "body": parts.pop(), "more_body": False} if parts else await receive()

            # Flower decides by the URL of a request whether a key is needed, and a Host header could change that
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            await self._app(scope | {"headers": headers}, again, send)
        finally:
            self._held -= length


async def _read(receive: Any) -> bytes | None:
    """The body of a request; None if the sender has disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def _reject(send: Any, status: int) -> None:
    text = _REJECTIONS[status]
    headers = [(b"content-length", str(len(text)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def reply_fault(body: bytes, parts: int) -> int:
    """The status with which the announcement of a reply is rejected, or 0; `parts` is how many objects it may have."""
    try:
        request = parse_announcement(body)
    except ValueError:
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


def limited(base: type[Any], *, request_s: float, most: int) -> type[Any]:
    """A protocol of uvicorn that closes connections on which no whole request arrives in time.

    uvicorn itself waits forever for the first request, and for the end of a head. While a request is being read or
    answered, the request filter has its own time limit. Where there are more connections than `most`, the one that has
    waited for the longest time is closed.
    """
    connections: set[Any] = set()
    waiting: dict[Any, asyncio.TimerHandle] = {}

    class Limited(base):  # type: ignore[misc]
        _unread = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(connections) >= most:
                next(iter(waiting), self).transport.abort()
            connections.add(self)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            self._unread += len(data)
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
            elif self._unread > _MOST_HEADER_BYTES:
                self.transport.abort()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._start_timer()

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            connections.discard(self)
            self._stop_timer()

        def _start_timer(self) -> None:
            """Start the timer for the next request, after the time that the last response needs to be sent."""
            self._stop_timer()
            self._unread = 0
            unsent: int = self.transport.get_write_buffer_size()
            limit_s = request_s + unsent / _SLOWEST_BYTES_PER_S
            waiting[self] = self.loop.call_later(limit_s, self.transport.abort)

        def _stop_timer(self) -> None:
            timer = waiting.pop(self, None)
            if timer is not None:
                timer.cancel()

    return Limited
