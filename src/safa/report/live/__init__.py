"""The live view: every run, sweep, arena, reproduction and deployment under a folder in a browser, while it is written.

`LiveServer` serves it. It only reads: it finds folders (`folders`), looks at what their files say (`glance`), makes
pages (`pages`), and sends what changes as server-sent events (`app`) to those who may see it (`access`).
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safa.errors import SafaError

if TYPE_CHECKING:
    from safa.report.live.pages import Maker

__all__ = ["LiveServer"]

_OPTIONS: dict[str, Any] = {
    "loop": "asyncio", "http": "h11", "ws": "none", "lifespan": "off", "log_config": None, "log_level": "error",
    "access_log": False, "server_header": False, "proxy_headers": False, "timeout_graceful_shutdown": 3,
}  # fmt: skip
"""Of uvicorn: nothing that is not needed, and no header of a proxy is believed."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,}")


class LiveServer:
    """Serves what is under a folder, from `run` until `stop`."""

    def __init__(
        self, folder: Path, *, reproduction: Maker, host: str = "127.0.0.1", port: int = 0, token: str | None = None
    ) -> None:
        """Listen on a port, any free one by default. `reproduction` makes the page of a reproduction from its folder.

        Elsewhere than on the loopback interface a token is needed; one is made where none is given.
        """
        try:
            import uvicorn

            from safa.report.live.access import is_loopback
            from safa.report.live.app import make_app
            from safa.report.page import scripts
        except ImportError as error:
            raise SafaError(f"the live view needs {error.name}; install it with pip install 'safa[serve]'") from None
        _check(folder, port, token)
        if token is None and not is_loopback(host):
            token = secrets.token_urlsafe(24)
        scripts()  # which the first page would have to wait for
        self._socket = _listening(host, port)
        port = int(self._socket.getsockname()[1])
        self.address = f"http://{_in_address(host)}:{port}/{f'?token={token}' if token else ''}"
        """What to open in a browser."""
        app = make_app(folder, host=host, port=port, token=token, reproduction=reproduction, stopping=self._is_stopping)
        self._server = uvicorn.Server(uvicorn.Config(app, **_OPTIONS))

    def run(self) -> None:
        """Serve until somebody stops it, or the program."""
        with self._socket:
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Let `run` come to its end."""
        self._server.should_exit = True

    def _is_stopping(self) -> bool:
        return self._server.should_exit


def _check(folder: Path, port: int, token: str | None) -> None:
    if not folder.is_dir():
        raise SafaError(f"there is no folder {folder}")
    if not 0 <= port < 65536:
        raise SafaError(f"a port is a number from 0 to 65535, not {port}")
    if token is not None and not _TOKEN.fullmatch(token):
        raise SafaError("a token has at least 16 characters, letters, digits, - and _ only")


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens on an address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except socket.gaierror as error:
        raise SafaError(f"cannot listen on {host}: {error.strerror}") from None
    except OSError as error:
        raise SafaError(f"cannot listen on {host}, port {port}: {os.strerror(error.errno or 0)}") from None


def _in_address(host: str) -> str:
    """A host as it is written in an address; where the server listens on all interfaces, the name of the machine."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
