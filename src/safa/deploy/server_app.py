"""The server of a deployment as a Flower app: a pump between Flower's messages and the conductor.

Its run config names the folder of the run, which holds `config.toml` and `deploy.toml`. It begins the run there, or
goes on with it. Only one process at a time works on a folder.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from safa.deploy.conductor import Answer, Conductor, Post
from safa.deploy.letters import Failure, Invitation, read_answer, read_introduction, written
from safa.deploy.lock import hold
from safa.deploy.orphan import end_with_parent
from safa.errors import SafaError

__all__ = ["app", "conduct"]

LOG = "server.log"
_INVITATION_TTL_S = 120.0
_log = logging.getLogger("safa.deploy")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the deployment to its end."""
    end_with_parent()
    folder = Path(str(context.run_config["folder"]))
    with hold(folder), _logged(folder):
        try:
            conductor = Conductor(folder, now=time.time())
            conduct(conductor, grid)
        except SafaError as problem:
            _log.error("%s", problem)
            raise
        except Exception:
            _log.exception("the server stopped")
            raise


def conduct(conductor: Conductor, grid: Grid) -> None:
    """Carry letters between a conductor and a grid until the run is finished."""
    pending: dict[str, Post] = {}
    try:
        while not conductor.finished:
            conductor.observe(grid.get_node_ids(), now=time.time())
            for message in _replies(grid, list(pending)):
                post = pending.pop(message.metadata.reply_to_message_id, None)
                if post is not None:
                    conductor.hear(post, _answer(post, message), now=time.time())
            conductor.tick(now=time.time())
            _send(conductor, grid, pending)
            time.sleep(conductor.options.poll_s)
    finally:
        conductor.stop()


def _replies(grid: Grid, asked: list[str]) -> list[Message]:
    """The replies that are there, in the order of what they answer."""
    if not asked:
        return []
    place = {message_id: number for number, message_id in enumerate(asked)}
    return sorted(grid.pull_messages(asked), key=lambda reply: place.get(reply.metadata.reply_to_message_id, -1))


def _answer(post: Post, message: Message) -> Answer:
    if message.has_error():
        return Failure(why=message.error.reason or "no reason was given", code=message.error.code)
    return read_introduction(message.content) if isinstance(post.letter, Invitation) else read_answer(message.content)


def _send(conductor: Conductor, grid: Grid, pending: dict[str, Post]) -> None:
    """Push what is to be sent, one message at a time, so that no request is larger than a model."""
    while conductor.posts:
        post = conductor.posts.popleft()
        invites = isinstance(post.letter, Invitation)
        message = Message(
            written(post.letter),
            dst_node_id=post.node,
            message_type=MessageType.QUERY if invites else MessageType.TRAIN,
            ttl=_INVITATION_TTL_S if invites else conductor.options.ttl_s,
            group_id=str(conductor.protocol.round),
        )
        pushed = [message_id for message_id in grid.push_messages([message]) if message_id]
        if pushed:
            pending[pushed[0]] = post.without_model()
        else:
            conductor.hear(post, Failure(why="Flower did not take the message"), now=time.time())


@contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Write what happens to the folder's log, besides Flower's own."""
    handler = logging.FileHandler(folder / LOG, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    handler.formatter.converter = time.gmtime  # type: ignore[union-attr]
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        handler.close()
