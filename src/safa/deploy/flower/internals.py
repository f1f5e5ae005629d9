"""Everything that safa uses of Flower beyond its documented interface. No other module imports or replaces such names.

`NEEDED` lists what must exist, and `check_flower` says what is missing. Flower is imported inside of functions only:
the launcher reads this module and needs no part of Flower in its own process.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from safa.errors import SafaError

__all__ = [
    "FLEET",
    "FLWR_PROGRAM",
    "KEY_IN_USE",
    "NEEDED",
    "NODE_UNAVAILABLE",
    "NO_SUCH_NODE",
    "PUSH_MESSAGES",
    "PUSH_OBJECT",
    "SERVER_APP_PROCESS",
    "TESTED",
    "Announced",
    "FetchedPart",
    "GridClient",
    "check_flower",
    "environment",
    "max_parts",
    "parse_announcement",
    "read_message",
    "replace_clock",
    "run_superlink",
    "run_supernode",
    "supernode_exit_reason",
]

TESTED = ">=1.41,<1.42"
"""The versions of Flower that the tests have passed with, as in the extra `deploy` of this package."""

NEEDED: dict[str, tuple[str, ...]] = {
    # the server app: messages, fetched part by part
    "flwr.superlink.grid.http_grid": ("HttpGrid._runtime_client", "HttpGrid._retry_invoker", "HttpGrid.node"),
    "flwr.supercore.runtime.runtime_http_client": (
        "RuntimeHttpClient.PullMessages",
        "RuntimeHttpClient.PullObject",
        "RuntimeHttpClient.ConfirmMessageReceived",
    ),
    "flwr.supercore.retry.retry_invoker": (
        "RetryInvoker.should_giveup",
        "RetryInvoker.on_backoff",
        "RetryInvoker.on_success",
        "RetryInvoker.max_time",
    ),
    "flwr.proto.message_pb2": ("ConfirmMessageReceivedRequest", "PullObjectRequest"),
    "flwr.proto.runtime_pb2": ("PullAppMessagesRequest",),
    "flwr.supercore.inflatable.inflatable_object": ("iterate_object_tree",),
    "flwr.supercore.inflatable.inflatable_utils": ("inflate_object_from_contents",),
    "flwr.supercore.run": ("RunNotRunningException",),
    # the SuperLink: two listeners and a clock that cannot be set
    "flwr.superlink.cli.flower_superlink": ("flower_superlink", "uvicorn"),
    "flwr.proto.fleet_pb2": ("PushMessagesRequest",),
    "flwr.supercore.date": ("now",),
    "flwr.supercore.auth.superexec": ("now",),
    "flwr.superlink.routers.fleet.node_auth": ("now",),
    # the SuperNode: one app only
    "flwr.supernode.cli.flower_supernode": ("flower_supernode", "start_client_internal"),
    "flwr.supernode.start_client_internal": ("http_request_response", "_push_messages", "_verify_fab", "subprocess"),
    # the operator's commands
    "flwr.cli.app": ("app",),
}
"""By module, the names that are used: `name`, or `Class.attribute`."""

_log = logging.getLogger("safa.deploy")


# -- is it there? ----------------------------------------------------------------------------------------------------


def check_flower() -> None:
    """Raise one sentence if Flower is not installed, or lacks something that is needed."""
    try:
        version = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        raise SafaError("safa deploy needs Flower, which is not installed; pip install 'safa[deploy]'") from None
    for module, names in NEEDED.items():
        for name in names:
            if not _exists(module, name):
                raise SafaError(f"Flower {version} has no {module}.{name}, which safa deploy needs: use flwr{TESTED}")


def _exists(module: str, name: str) -> bool:
    """Whether a module of Flower defines a name. If it is not loaded, its source is read."""
    first, _, attribute = name.partition(".")
    loaded = sys.modules.get(module)
    if loaded is not None and not hasattr(loaded, first):
        return False
    if loaded is not None and (not attribute or hasattr(getattr(loaded, first), attribute)):
        return True
    return name in _defined(module)


def _source(module: str) -> str:
    """The source of a module of Flower, or the stub of a generated one; "" where there is none."""
    package = importlib.util.find_spec(module.partition(".")[0])
    for root in (package and package.submodule_search_locations) or []:
        path = Path(root, *module.split(".")[1:])
        for file in (path.with_suffix(".pyi"), path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text(encoding="utf-8")
    return ""


@cache
def _defined(module: str) -> frozenset[str]:
    return frozenset(_definitions(_source(module)))


def _definitions(source: str) -> Iterator[str]:
    """The names that a module defines or imports, and the attributes of its classes as `Class.attribute`."""
    for node in ast.parse(source).body:
        yield from _bound(node)
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield f"{node.name}.{inner.attr}"
                yield from (f"{node.name}.{name}" for name in _bound(inner))


def _bound(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _flower(module: str) -> Any:
    """A module of Flower; what it has is checked by `check_flower`, not by types."""
    return importlib.import_module(module)


# -- programs --------------------------------------------------------------------------------------------------------

SERVER_APP_PROCESS = "flwr-serverapp"
"""What the command line of the process of a server app contains."""
FLWR_PROGRAM = """
import json, sys
from flwr.cli.app import app
for arguments in json.load(sys.stdin):
    try:
        app(arguments, standalone_mode=False)
    except (Exception, SystemExit) as error:
        print(error, file=sys.stderr)
    print("\\x1e", file=sys.__stdout__, flush=True)
"""
"""Executes several commands of `flwr` in one process: a JSON list of lists of arguments on stdin."""


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's programs: no telemetry, a home of their own, the programs of this Python."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    return inherited | {
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def run_superlink(arguments: Sequence[str], serve: Callable[..., None]) -> None:
    """`flower-superlink` with some arguments, where `serve(app=, host=, port=, ...)` takes the place of uvicorn.run."""
    program = _flower("flwr.superlink.cli.flower_superlink")
    sys.argv[:] = ["flower-superlink", *arguments]
    program.uvicorn = SimpleNamespace(run=serve)
    program.flower_superlink()


def run_supernode(is_accepted: Callable[[bytes], bool], *, app_id: str, app_version: str) -> None:
    """`flower-supernode` with the arguments of this process, which installs and executes accepted apps only.

    Flower verifies apps itself where it is told whom to trust, but by signatures of its own hub. That check is switched
    on, and `is_accepted` answers it. Should a later Flower look for the answer elsewhere, it finds no signature, and
    rejects every app. Whatever a server says that a run is, here it is one of the app `app_id`.
    """
    program = _flower("flwr.supernode.cli.flower_supernode")
    worker = _flower("flwr.supernode.start_client_internal")
    start, connect = program.start_client_internal, worker.http_request_response
    push_replies, answers = worker._push_messages, _Answers()
    sys.argv[0] = "flower-supernode"

    @contextmanager
    def connected(*arguments: Any, **options: Any) -> Iterator[Any]:
        with connect(*arguments, **options) as connection:
            node, receive, send, get_run, get_fab, pull_object, push_object, confirm = connection

            def run(run_id: int) -> Any:
                facts = {"fab_id": app_id, "fab_version": app_version, "primary_task_type": SERVER_APP_PROCESS}
                return replace(get_run(run_id), **facts)

            def fab(*which: Any) -> Any:
                return _with_own_hash(get_fab(*which))

            calls = answers.received(receive), answers.sent(send), run, fab
            yield (node, *calls, _or_failure(pull_object), push_object, _or_failure(confirm))

    worker.http_request_response = connected
    worker._push_messages = answers.until_answered(push_replies)
    worker.subprocess = SimpleNamespace(Popen=_start_executor)
    worker._verify_fab = lambda fab, _: is_accepted(fab.content)
    program.start_client_internal = lambda **options: start(**options | {"trusted_entities": {"safa": ""}})
    program.flower_supernode()


class _Answers:
    """Keeps a SuperNode sending until the message that it received last is answered.

    Flower receives a message, sends whatever reply comes next, and receives another message. Where a run ends while a
    message of it is received, the next reply may be the one to that message: the reply to the message of the new run
    would be sent after another message only, for which the server does not ask before it has the reply.
    """

    def __init__(self) -> None:
        self._last, self._is_answered = "", True

    def received(self, receive: Callable[[], Any]) -> Callable[[], Any]:
        """`receive`, noted."""

        def call() -> Any:
            found = receive()
            if found is not None:
                self._last, self._is_answered = found[0].metadata.message_id, False
            return found

        return call

    def sent(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """`send`, noted even where it fails: a reply is sent once."""

        def call(message: Any, *others: Any) -> Any:
            self._is_answered |= message.metadata.reply_to_message_id == self._last
            return send(message, *others)

        return call

    def until_answered(self, push_replies: Callable[..., None]) -> Callable[..., None]:
        """`push_replies`, which waits for replies and sends them, repeated until the last message is answered."""

        def call(**given: Any) -> None:
            push_replies(**given)
            while not self._is_answered:
                push_replies(**given)

        return call


def _start_executor(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the SuperExec, which starts client apps. The SuperNode ends with it, and is restarted with a new one.

    Left alone, it would receive messages that nobody executes.
    """
    process = subprocess.Popen(command)

    def end() -> None:
        process.wait()
        time.sleep(_EXECUTOR_S)
        logging.getLogger("flwr").error(_EXECUTOR_ENDED)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    return process


def _or_failure(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call for a part of a message that fails, as any other may, where the run has ended.

    Flower then forgets the message, and ends the client app that it has started for it. Told that the run has ended, it
    does neither, and the client app waits for the parts that are missing.
    """
    ended = _flower("flwr.supercore.run").RunNotRunningException

    def attempt(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except ended:
            raise SafaError("its run has ended") from None

    return attempt


def _with_own_hash(fab: Any) -> Any:
    """An app under the hash that it has, not the one that a server claims, and with a signature to be checked."""
    return replace(fab, hash_str=hashlib.sha256(fab.content).hexdigest(), verifications={"valid_license": "-"})


def replace_clock(now: Callable[[], datetime], signed: Callable[[Callable[[], datetime]], Any], *, link: bool) -> None:
    """Replace the clock of Flower's modules in this process, a SuperLink (`link`) or a server app, by `now`.

    Signatures between processes of one machine are judged by the wall clock still; those of devices by what `signed`
    makes of the wall clock.
    """
    local, devices = "flwr.supercore.auth.superexec", "flwr.superlink.routers.fleet.node_auth"
    for module in ("flwr.superlink.cli.flower_superlink", local, devices) if link else ():
        _flower(module)
    wall = _flower("flwr.supercore.date").now
    for found in [found for name, found in sys.modules.items() if name.startswith("flwr.")]:
        if getattr(found, "now", None) is wall:
            found.now = now  # type: ignore[attr-defined]
    for module, clock in ((local, wall), (devices, lambda: signed(wall))):
        if module in sys.modules:
            _flower(module).now = clock


# -- what Flower writes ----------------------------------------------------------------------------------------------

KEY_IN_USE, NO_SUCH_NODE = "code: 23", "code: 24"
"""In an error message of `flwr supernode`: the public key was registered before; the node does not exist."""
NODE_UNAVAILABLE = 5
"""The code of an error that takes the place of a reply: the node is offline."""

_STARTS, _FAILED = "Starting Flower SuperNode", "Failed to initialize the connection to the SuperLink.\n"
_EXIT_REASONS = {
    "code: 2001": "the server wants a key",
    "code: 2004": "the server does not know this key, or still has it as connected",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not trusted",
}
_UNAUTHORISED = "SuperNode terminated gracefully"  # written where the server answers with 401
_EXECUTOR_ENDED = "the process that starts client apps has ended"
_EXECUTOR_S = 3.0  # how long the SuperNode may take to end where both are stopped


def supernode_exit_reason(log: str) -> str:
    """Why a SuperNode ended, as far as the end of its log says."""
    text = log.rpartition(_STARTS)[2]
    error = text.partition(_FAILED)[2].partition("\n")[0].strip()
    if _EXECUTOR_ENDED in text:
        return _EXECUTOR_ENDED
    if not error and _UNAUTHORISED in text:
        return "the server does not accept its signature: is its clock right, and its key not revoked?"
    return next((meaning for mark, meaning in _EXIT_REASONS.items() if mark in error), error)


# -- messages --------------------------------------------------------------------------------------------------------

FLEET, PUSH_MESSAGES, PUSH_OBJECT = "/v1/fleet/", "/v1/fleet/push-messages", "/v1/fleet/push-object"
"""The paths of requests from devices; of the announcement of a reply; of a part of it."""
_PIECE_BYTES = 5 * 1024**2  # Flower divides an array into pieces of this size
_FEWEST_PARTS, _OTHER_PARTS = 100, 20


def max_parts(max_bytes: int) -> int:
    """How many objects a reply may be announced with, if its numbers have so many bytes at most.

    An honest one has one object per piece of the model, and five others.
    """
    return max(_FEWEST_PARTS, _OTHER_PARTS + max_bytes // _PIECE_BYTES)


def parse_announcement(body: bytes) -> Any:
    """The announcement of replies that a device sends; ValueError where it is none."""
    try:
        return _flower("flwr.proto.fleet_pb2").PushMessagesRequest.FromString(body)
    except Exception as error:  # protobuf's own, of which there are several
        raise ValueError(str(error)) from None


def read_message(message_id: str, objects: dict[str, bytes]) -> Any:
    """A message from its objects."""
    return _flower("flwr.supercore.inflatable.inflatable_utils").inflate_object_from_contents(message_id, objects)


class Announced(NamedTuple):
    """A reply that the SuperLink has."""

    asked: str
    """The id of the message that it answers, as the SuperLink has checked."""
    message_id: str
    objects: list[str]
    """The ids of its objects."""


class FetchedPart(NamedTuple):
    """What the SuperLink says of an object."""

    is_known: bool
    content: bytes | None
    """None where the device has not sent it yet."""


class GridClient:
    """The SuperLink as the server app sees it, with retries while it fails.

    Flower repeats forever what gets no answer, and gives up at once where the answer is an error of the SuperLink (500,
    as when its database is locked). Here both are repeated, with growing pauses, for `retry_s` seconds; then the server
    stops with a sentence. Calls about single replies are not repeated: an error there may concern that reply alone.
    """

    def __init__(self, grid: Any, *, retry_s: float) -> None:
        self._grid, self._retry_s = grid, retry_s
        self._thread = threading.local()  # Flower's heartbeat uses the same invoker in a thread of its own
        self._is_failing = False
        invoker = grid._retry_invoker
        self._give_up, self._on_backoff, self._on_success = (
            invoker.should_giveup,
            invoker.on_backoff,
            invoker.on_success,
        )
        invoker.max_time = retry_s
        invoker.should_giveup, invoker.on_backoff = self._gives_up, self._backs_off
        invoker.on_success = self._succeeds

    def nodes(self) -> list[int]:
        """The nodes that are online."""
        with self._sentences():
            return list(self._grid.get_node_ids())

    def push(self, message: Any) -> str:
        """Send a message; its id, or "" where the SuperLink does not accept it."""
        import httpx

        with self._sentences():
            try:
                return next((found for found in self._grid.push_messages([message]) if found), "")
            except httpx.HTTPStatusError as error:
                if error.response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
                    raise
                return ""

    def announced(self, message_ids: list[str]) -> list[Announced] | None:
        """The replies to some messages; None if the SuperLink has failed."""
        request = _flower("flwr.proto.runtime_pb2").PullAppMessagesRequest(message_ids=message_ids)
        found = self._once("PullMessages", request)
        objects_of = _flower("flwr.supercore.inflatable.inflatable_object").iterate_object_tree
        return found and [
            Announced(
                reply.metadata.reply_to_message_id,
                reply.metadata.message_id,
                [item.object_id for item in objects_of(tree)],
            )
            for reply, tree in zip(found.messages_list, found.message_object_trees, strict=True)
        ]

    def fetch(self, object_id: str) -> FetchedPart | None:
        """An object of a reply; None if the SuperLink has failed."""
        node, run_id = self._grid.node, self._grid.run.run_id
        request = _flower("flwr.proto.message_pb2").PullObjectRequest(node=node, run_id=run_id, object_id=object_id)
        found = self._once("PullObject", request)
        return found and FetchedPart(found.object_found, found.object_content if found.object_available else None)

    def forget(self, message_id: str) -> None:
        """Let the SuperLink delete a message. If that fails, its time to live ends it."""
        node, run_id = self._grid.node, self._grid.run.run_id
        confirm = _flower("flwr.proto.message_pb2").ConfirmMessageReceivedRequest
        self._once("ConfirmMessageReceived", confirm(node=node, run_id=run_id, message_object_id=message_id))

    def _once(self, method: str, request: Any) -> Any:
        """The answer to a call that is not repeated where it fails; None then."""
        import httpx

        self._thread.gives_up = True
        try:
            with self._sentences():
                try:
                    return getattr(self._grid._runtime_client, method)(request)
                except httpx.HTTPStatusError:
                    return None
        finally:
            self._thread.gives_up = False

    def _gives_up(self, error: Exception) -> bool:
        import httpx

        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
        if status >= httpx.codes.INTERNAL_SERVER_ERROR:
            return getattr(self._thread, "gives_up", False)
        if status == httpx.codes.UNAUTHORIZED and threading.current_thread() is threading.main_thread():
            raise SafaError("Flower rejects the server: its token has expired, or its run has ended")
        return bool(self._give_up(error))

    def _backs_off(self, state: Any) -> None:
        if not self._is_failing:
            _log.warning("the SuperLink fails (%s); retrying for %g s", _described(state.exception), self._retry_s)
        self._is_failing = True
        self._on_backoff(state)

    def _succeeds(self, state: Any) -> None:
        if self._is_failing:
            _log.warning("the SuperLink answers again")
        self._is_failing = False
        self._on_success(state)

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        """Errors that end the server, as one sentence."""
        import httpx

        try:
            yield
        except _flower("flwr.supercore.run").RunNotRunningException:
            raise SafaError("Flower has ended the run: it was stopped, or the server was considered dead") from None
        except httpx.HTTPError as error:
            raise SafaError(
                f"no answer from the SuperLink for {self._retry_s:g} s ({_described(error)}); see flower/superlink.log"
            ) from None


def _described(error: Exception | None) -> str:
    response = getattr(error, "response", None)
    return f"status {response.status_code}" if response is not None else str(error) or type(error).__name__
