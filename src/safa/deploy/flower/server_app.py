"""The server of a deployment as a Flower app: a pump between Flower's messages and the conductor.

Its run config names the folder of the run, which holds `config.toml` and `deploy.toml`. It begins the run there, or
goes on with it. Only one process at a time works on a folder.
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

from safa.deploy.exchange.coordinator import Conductor
from safa.deploy.exchange.messages import Failure
from safa.deploy.exchange.text import printable
from safa.deploy.flower.clock import steady_flower
from safa.deploy.flower.mailbox import Mailbox
from safa.deploy.launcher.watch import LOG
from safa.deploy.launcher.watchdog import end_with_parent
from safa.errors import SafaError
from safa.runs.lock import hold

__all__ = ["app", "conduct", "serve"]

_log = logging.getLogger("safa.deploy")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the deployment to its end."""
    end_with_parent()
    steady_flower()
    serve(Path(str(context.run_config["folder"])), grid)


def serve(folder: Path, grid: Grid) -> None:
    """Run the deployment of a folder to its end; where that fails, the folder's log says why in one line."""
    with hold(folder), _logged(folder):
        try:
            conductor = Conductor(folder, now=time.monotonic())
            conduct(conductor, grid)
        except SafaError as problem:
            _log.error("%s", problem)
            raise
        except SystemExit:
            _log.error("Flower stopped the server app: the run was stopped, or its SuperLink took it for dead")
            raise
        except Exception as problem:  # Flower writes the traceback to its own log
            _log.error("%s", _why(problem))
            raise


def conduct(conductor: Conductor, grid: Grid) -> None:
    """Carry letters between a conductor and a grid until the run is finished."""
    options = conductor.options
    mailbox = Mailbox(grid, max_bytes=conductor.screening.screen.max_bytes, ttl_s=options.ttl_s)
    try:
        while not conductor.finished:
            conductor.observe(mailbox.nodes(), now=time.monotonic())
            for post, answer in mailbox.collect():
                conductor.hear(post, answer, now=time.monotonic())
            conductor.tick(now=time.monotonic())
            while conductor.posts:
                post = conductor.posts.popleft()
                if not mailbox.send(post, group=str(conductor.protocol.round)):
                    conductor.hear(post, Failure(why="Flower did not take the message"), now=time.monotonic())
            time.sleep(options.poll_s)
    finally:
        conductor.stop()


def _why(problem: Exception) -> str:
    """Why the server stops, in a sentence."""
    if isinstance(problem, OSError) and problem.strerror:
        return f"cannot read or write {problem.filename or 'the folder of the run'}: {problem.strerror}"
    said = str(problem).strip().partition("\n")[0]
    return f"the server app failed with a {type(problem).__name__}{said and f': {said}'}"


class _Handler(logging.FileHandler):
    """Writes to the log as long as it can be written; that it cannot is no reason to print tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Let it be."""


class _Lines(logging.Formatter):
    """Writes a message as one printable line, whoever wrote parts of it; only tracebacks have lines of their own."""

    converter = time.gmtime  # type: ignore[assignment]

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging calls it so)
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(map(printable, super().formatException(ei).splitlines()))


@contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Write what happens to the folder's log, besides Flower's own."""
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
