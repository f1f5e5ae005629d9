"""Who is answered: requests with the right host and, where there is one, the right token; and they may only read.

A web site can let its own name lead to this server (DNS rebinding), and would then read what it answers; so the host
that a request names must be one of this machine's. The token is taken from the address once, and from then on from a
cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Access", "is_loopback"]

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NO_CONTENT = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_NEEDED = "This server needs the token that it was started with: open the address that it has printed.\n"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself, and no other can reach it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Access:
    """Passes on what may be answered, and puts headers on all answers that tell the browser to be careful."""

    def __init__(self, app: ASGIApp, *, host: str, port: int, token: str | None) -> None:
        self._app, self._token, self._cookie = app, token, f"safa-token-{port}"
        self._local = is_loopback(host)
        self._names = {host.lower(), "localhost"} | (set() if self._local else {socket.gethostname().lower()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        answer = self._refusal(scope) if scope["type"] == "http" else PlainTextResponse("", 400)
        await (answer or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that is not passed on."""
        headers = Headers(scope=scope)
        if not self._is_ours(headers.getlist("host")):
            return PlainTextResponse("There is no such host here.\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This server can be read only.\n", 405, {"Allow": "GET, HEAD"})
        return None if self._token is None else self._without_token(scope, headers, self._token)

    def _is_ours(self, hosts: list[str]) -> bool:
        """Whether a request names this machine; elsewhere than on the loopback interface, any address will do."""
        if len(hosts) != 1:
            return False
        name = hosts[0].rpartition(":")[0] if hosts[0].rpartition(":")[2].isdigit() else hosts[0]
        if name.lower() in self._names:
            return True
        try:
            return ipaddress.ip_address(name.strip("[]")).is_loopback or not self._local
        except ValueError:
            return False

    def _without_token(self, scope: Scope, headers: Headers, token: str) -> Response | None:
        """The answer to a request without the token; one that has it in its address is given the cookie."""
        asked = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if any(_same(value, token) for name, value in asked if name == "token"):
            rest = urlencode([pair for pair in asked if pair[0] != "token"])
            path = "/" + scope.get("raw_path", b"/").decode("latin-1").lstrip("/")
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(self._cookie, token, httponly=True, samesite="lax", path="/")
            return answer
        return None if _same(self._given(headers), token) else PlainTextResponse(_NEEDED, 403)

    def _given(self, headers: Headers) -> str:
        """The token in the cookie."""
        try:
            found = SimpleCookie("; ".join(headers.getlist("cookie"))).get(self._cookie)
        except CookieError:
            return ""
        return found.value if found else ""


def _same(given: str, token: str) -> bool:
    """Whether two texts are equal, in a time that does not tell how much of them is."""
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *_missing(message["headers"])]
        await send(message)

    return sent


def _missing(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that every answer has, unless it has its own."""
    there = {name.lower() for name, _ in headers}
    wanted = {"Content-Security-Policy": _NO_CONTENT} | _HEADERS
    return [
        (name.lower().encode(), text.encode()) for name, text in wanted.items() if name.lower().encode() not in there
    ]
