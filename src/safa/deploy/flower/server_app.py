"""The server of a deployment as a Flower app: it passes messages between Flower and the coordinator.

Its run config names the folder of the run, which holds `config.toml` and `deploy.toml`. It begins the run there, or
resumes it. Only one process at a time works on a folder.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from safa.deploy.exchange.coordinator import Coordinator
from safa.deploy.exchange.files import LOG
from safa.deploy.exchange.messages import Failure
from safa.deploy.exchange.status import StatusFile
from safa.deploy.exchange.text import printable
from safa.deploy.flower.clock import steady_flower
from safa.deploy.flower.internals import check_flower
from safa.deploy.flower.mailbox import Mailbox
from safa.deploy.flower.watchdog import end_with_parent
from safa.errors import SafaError
from safa.runs.lock import hold

__all__ = ["app", "coordinate", "serve"]

_log = logging.getLogger("safa.deploy")

_NOT_ACCEPTED = Failure(why="Flower did not accept the message")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the deployment until it is finished."""
    end_with_parent()
    check_flower()
    steady_flower()
    serve(Path(str(context.run_config["folder"])), grid)


def serve(folder: Path, grid: Grid) -> None:
    """Run the deployment of a folder until it is finished; where that fails, its log says why in one line."""
    with hold(folder), _logged(folder):
        try:
            coordinator = Coordinator(folder, now=time.monotonic())
            coordinate(coordinator, grid)
        except SafaError as error:
            _log.error("%s", error)
            raise
        except SystemExit:
            _log.error("Flower stopped the server app: the run was stopped, or its SuperLink considered it dead")
            raise
        except Exception as error:  # Flower writes the traceback to its own log
            _log.error("%s", _described(error))
            raise


def coordinate(coordinator: Coordinator, grid: Grid) -> None:
    """Pass messages between a coordinator and a grid until the run is finished."""
    options = coordinator.options
    status = StatusFile(coordinator.folder)
    mailbox = Mailbox(grid, max_bytes=coordinator.screening.screen.max_bytes, ttl_s=options.ttl_s)
    try:
        while not coordinator.finished:
            coordinator.on_nodes(mailbox.nodes(), now=time.monotonic())
            for outgoing, reply in mailbox.collect():
                coordinator.on_reply(outgoing, reply, now=time.monotonic())
            coordinator.tick(now=time.monotonic())
            while coordinator.outbox:
                outgoing = coordinator.outbox.popleft()
                if not mailbox.send(outgoing, group=str(coordinator.protocol.round)):
                    coordinator.on_reply(outgoing, _NOT_ACCEPTED, now=time.monotonic())
            status.write(coordinator.status, now=time.monotonic())
            time.sleep(options.poll_s)
    finally:
        coordinator.stop()


def _described(error: Exception) -> str:
    """Why the server stops, in a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return f"cannot read or write {error.filename or 'the folder of the run'}: {error.strerror}"
    text = str(error).strip().partition("\n")[0]
    return f"the server app failed with a {type(error).__name__}{text and f': {text}'}"


class _Handler(logging.FileHandler):
    """Writes to the log as long as that is possible, and prints no tracebacks where it is not."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore it."""


class _Lines(logging.Formatter):
    """Writes a message as one printable line, wherever its parts come from; only tracebacks have several."""

    converter = time.gmtime  # type: ignore[assignment]

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging calls it so)
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(map(printable, super().formatException(ei).splitlines()))


@contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Write log records to the log of the folder, too."""
    handler = _Handler(folder / LOG, encoding="utf-8")
    handler.setFormatter(_Lines("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        with suppress(OSError):
            handler.close()
