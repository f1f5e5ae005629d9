"""Senders: clients that speak Flower's Fleet API as a SuperNode does, but answer whatever they like.

A `Sender` registers a node with a real SuperLink, keeps its heartbeat up, takes messages and sends replies, all in the
calling thread and without a process per message. So a test can answer anything to any message, and one process can be
a fleet. It does not use Flower's own `http_request_response`: that one ends the process where it is refused, retries
for ever where nobody listens, and swallows every exception that is raised while it is open.

    with Sender("127.0.0.1:9092") as sender:
        message = sender.receive(10)
        sender.reply(message, honest(message, "me", 100, make_update=nudged))

A client in a process of its own, until SIGTERM or until its parent is gone:

    python -m tests.deploy.sender ADDRESS NAME BEHAVIOUR [--size N] [--think SECONDS] [--megabytes N]
        [--root-certificates FILE --key FILE]

What a SuperLink does not look into, and a `Sender` can therefore get wrong: the objects behind an announced reply (they
may be missing, or be no message at all), and the metadata inside, which is what the server app gets to see.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from numpy.typing import NDArray

from safa.deploy.exchange.codec import EncodedModel, EncodedTensor, decode, delta, encode
from safa.deploy.exchange.messages import JoinReply, ModelMissing, TrainRequest, Update
from safa.deploy.flower.records import read_join_request, read_train_request, to_records
from safa.errors import SafaError

T = TypeVar("T")
Tensors = dict[str, NDArray[Any]]
MakeUpdate = Callable[[TrainRequest, Tensors], Tensors]
Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]


class Sender:
    """One node of the fleet. It is online from `with` on, and takes its leave at the end of it."""

    def __init__(
        self,
        address: str,
        *,
        insecure: bool = True,
        root_certificates: str | Path | None = None,
        keys: Keys | None = None,
        poll_s: float = 0.2,
    ) -> None:
        """Without `keys` it makes some and registers itself; with keys, their node must have been registered.

        `poll_s` is how often it looks for a message; a SuperNode does so every 3 s.
        """
        self.node_id = 0
        self._poll_s = poll_s
        self._registers = keys is None
        private, public = keys or generate_key_pairs()
        self._public = public_key_to_bytes(public)
        self._client = FleetHttpClient.from_server_address(
            address,
            insecure,
            None if root_certificates is None else Path(root_certificates).read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, public),
            ],
        )
        self._heartbeat = HeartbeatSender(self._beat)

    @property
    def _node(self) -> Node:
        return Node(node_id=self.node_id)

    # -- coming and going --------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            if self._registers:
                self._client.RegisterNode(RegisterNodeFleetRequest(public_key=self._public))
            request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            self.node_id = self._client.ActivateNode(request).node_id
        except BaseException:
            self._client.close()
            raise
        self._heartbeat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.vanish()
        with contextlib.suppress(httpx.HTTPError):
            self._client.DeactivateNode(DeactivateNodeRequest(node_id=self.node_id))
            if self._registers:
                self._client.UnregisterNode(UnregisterNodeFleetRequest(node_id=self.node_id))
        self._client.close()

    def vanish(self) -> None:
        """Let the heartbeat stop, as a device without power does: the SuperLink finds out for itself."""
        if self._heartbeat.is_running:
            self._heartbeat.stop()

    def _beat(self) -> bool:
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        try:
            return self._client.SendNodeHeartbeat(request).success
        except httpx.HTTPError:
            return False

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, whole and confirmed, or None if there was none in time or nobody to ask for it."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                message = self._pull()
            except httpx.TransportError:
                message = None
            except httpx.HTTPStatusError as problem:
                if problem.response.status_code != httpx.codes.FORBIDDEN:  # which means that its run has ended
                    raise
                message = None
            left = end - time.monotonic()
            if message is not None or left <= 0:
                return message
            time.sleep(min(self._poll_s, left))

    def _pull(self) -> Message | None:
        response = self._client.PullMessages(PullMessagesRequest(node=self._node))
        if not response.messages_list:
            return None
        run_id, key = response.messages_list[0].metadata.run_id, response.messages_list[0].metadata.message_id
        contents: dict[str, bytes] = {}
        for item in iterate_object_tree(response.message_object_trees[0]):
            content = self._pull_object(run_id, item.object_id)
            if content is None:
                return None
            contents[item.object_id] = content
        confirmation = ConfirmMessageReceivedRequest(node=self._node, run_id=run_id, message_object_id=key)
        _insist(lambda: self._client.ConfirmMessageReceived(confirmation))
        message = inflate_object_from_contents(key, contents)
        assert isinstance(message, Message)
        message.metadata.__dict__["_message_id"] = key  # which is no part of what was hashed
        return message

    def _pull_object(self, run_id: int, object_id: str) -> bytes | None:
        """An object of a message, which may still be on its way; None if it is gone."""
        request = PullObjectRequest(node=self._node, run_id=run_id, object_id=object_id)
        while True:
            response = _insist(lambda: self._client.PullObject(request))
            if not response.object_found:
                return None
            if response.object_available:
                return response.object_content
            time.sleep(0.05)

    # -- sending -----------------------------------------------------------------------------------------------------

    def reply(self, message: Message, content: RecordDict) -> Message:
        """Reply a message, and return the reply, which `push` can send again."""
        answer = Message(content, reply_to=message)
        self.push(answer)
        return answer

    def push(self, reply: Message, *, announced: Message | None = None) -> bool:
        """Send any reply, and say whether the SuperLink wanted anything of it.

        `announced` is what the SuperLink is told that it is, if that is something else: only this it checks.
        """
        with no_object_id_recompute():
            objects = {key: found.deflate() for key, found in get_all_nested_objects(reply).items()}
            return self.deliver(announced or reply, get_object_tree(reply), objects)

    def deliver(self, announced: Message, tree: ObjectTree, objects: Mapping[str, bytes]) -> bool:
        """Announce a reply with any objects behind it, and send those of them that there are and that are wanted."""
        announced.metadata.__dict__["_message_id"] = tree.object_id
        announcement = PushMessagesRequest(
            node=self._node,
            messages_list=[message_to_proto(remove_content_from_message(announced))],
            message_object_trees=[tree],
            clientapp_runtime_list=[0.0],
        )
        response = _insist(lambda: self._client.PushMessages(announcement))
        wanted = set(response.objects_to_push)
        for key, content in objects.items():
            if key in wanted:
                self._push_object(announced.metadata.run_id, response.session_id, key, content)
        return bool(wanted)

    def _push_object(self, run_id: int, session_id: str, key: str, content: bytes) -> None:
        request = PushObjectRequest(
            node=self._node, run_id=run_id, object_id=key, object_content=content, session_id=session_id
        )
        _insist(lambda: self._client.PushObject(request))


def _insist(call: Callable[[], T]) -> T:
    """What a call returns, as long as it fails a few times at most."""
    for pause_s in (0.5, 1, 2, 4):
        try:
            return call()
        except httpx.TransportError:
            time.sleep(pause_s)
    return call()


# -- replies that no honest app makes --------------------------------------------------------------------------------


def forged(reply: Message, **changes: Any) -> Message:
    """A reply with other metadata: another `src_node_id`, `reply_to_message_id`, `run_id`, `ttl`, and so on."""
    metadata = {
        name.removeprefix("_"): value for name, value in vars(reply.metadata).items() if name != "_delivered_at"
    }
    return make_message(metadata=Metadata(**{**metadata, "message_id": "", **changes}), content=reply.content)


def garbage(kind: str = "Message", body: bytes = b"\xff\xff\xff") -> tuple[ObjectTree, dict[str, bytes]]:
    """For `deliver`: a single object that the SuperLink lets through, because its head says what it should."""
    content = f"{kind}  {len(body)}".encode() + b"\x00" + body
    key = get_object_id(content)
    return ObjectTree(object_id=key), {key: content}


def many_parts(count: int) -> ObjectTree:
    """For `deliver`: a tree of objects that nobody has seen before."""
    root, *parts = (ObjectTree(object_id=secrets.token_hex(32)) for _ in range(count))
    root.children.extend(parts)
    return root


# -- replies to messages of safa ---------------------------------------------------------------------------------------

_memories: dict[str, dict[str, Tensors]] = {}
_OWN = "own"


NUDGE = 1e-3


def nudged(request: TrainRequest, base: Tensors) -> Tensors:
    """An update that cost nothing: every number of the model a little larger."""
    return {name: tensor + np.float32(NUDGE) for name, tensor in base.items()}


def honest(
    message: Message,
    name: str,
    size: float,
    *,
    make_update: MakeUpdate = nudged,
    details: Mapping[str, Any] | None = None,
) -> RecordDict:
    """The reply of an honest client of that name: a JoinReply, an update made by `make_update`, or `ModelMissing`.

    It remembers the last model that it was sent, by its digest, and its own last update, until its process ends.
    """
    request = request_in(message)
    if request is None:
        return to_records(JoinReply(name=name, size=size, details=details or {}))
    base = base_of(request, name)
    if base is None:
        return to_records(ModelMissing(attempt=request.attempt))
    update = make_update(request, base)
    _memories[name][_OWN] = update
    return to_records(update_of(request, update if request.codec == "float32" else delta(update, base)))


def request_in(message: Message) -> TrainRequest | None:
    """The request that a message brings, or None if it is an invitation."""
    with contextlib.suppress(SafaError):
        read_join_request(message.content)
        return None
    return read_train_request(message.content)


def base_of(request: TrainRequest, name: str) -> Tensors | None:
    """The model that a client of that name is to start from, if it holds it or was sent it."""
    memory = _memories.setdefault(name, {})
    if request.model is not None:
        memory = _memories[name] = {request.digest: _unpacked(request.model)} | {
            key: tensors for key, tensors in memory.items() if key == _OWN
        }
    return memory.get(_OWN if request.own and _OWN in memory else request.digest)


def update_of(request: TrainRequest, tensors: Tensors) -> Update:
    """A well-formed answer to an request, with anything in it."""
    return Update(attempt=request.attempt, version=request.version, seconds=0.0, encoded=encode(tensors, request.codec))


def _unpacked(encoded: EncodedModel) -> Tensors:
    """The tensors of a encoded from the server, taking for granted that they are float32 where they can be."""
    tensors = decode(encoded, {name: (packed.shape, _dtype(packed)) for name, packed in encoded.tensors.items()})
    assert isinstance(tensors, dict), tensors
    return tensors


def _dtype(packed: EncodedTensor) -> str:
    return "float32" if packed.scale is not None or packed.dtype == "float16" else packed.dtype


# -- behaviours ------------------------------------------------------------------------------------------------------

BEHAVIOURS = {
    "honest": "an update",
    "nan": "an update with a NaN in every tensor",
    "shapes": "an update whose tensors have an axis more than the model's",
    "norm": "an update that is very far from the model",
    "harmful": "an update that leads far away from where honest ones lead",
    "stale": "an update that claims the version before the one it was given, if there is one",
    "future": "an update that claims a version that is not there yet",
    "large": "an update of many megabytes",
    "replay": "the first update ever again, with its attempt number of then",
    "unasked": "an update; then the same and another one to the same request, to the last request, and to nothing",
    "forged": "an update that was announced properly, but says inside that it is another node's, to another message",
    "garbage": "a thing that was announced as a reply, but is no message",
    "withheld": "a reply that was announced, and of which nothing follows",
    "parts": "a reply that is announced with 19,000 parts",
    "timeless": "a reply that is announced with a time of creation that is no number",
    "silent": "nothing",
}
"""What a client does with an request. To an invitation all of them answer honestly."""


class Peer:
    """A client with a behaviour."""

    def __init__(
        self, sender: Sender, name: str, behaviour: str, *, size: float = 100.0, megabytes: float = 200.0
    ) -> None:
        """`megabytes` is how large a large update is."""
        self.sender, self.name, self.behaviour, self.size, self.megabytes = sender, name, behaviour, size, megabytes
        self._first: RecordDict | None = None
        self._last: Message | None = None

    def answer(self, message: Message) -> None:
        """Reply a message."""
        request = request_in(message)
        content = honest(message, self.name, self.size)
        base = base_of(request, self.name) if request else None
        if request is None or base is None:  # an invitation, or an request that it cannot follow
            self.sender.reply(message, content)
            return
        altered = altered_update(self.behaviour, request, base, self.megabytes)
        self._send(message, content if altered is None else to_records(altered))

    def _send(self, message: Message, content: RecordDict) -> None:
        reply = Message(content, reply_to=message)
        match self.behaviour:
            case "replay":
                self._first = self._first or content
                self.sender.reply(message, self._first)
            case "unasked":
                self.sender.push(reply)
                self.sender.push(reply)
                self.sender.reply(message, content)
                self.sender.push(forged(reply, reply_to_message_id=secrets.token_hex(32)))
                if self._last:
                    self.sender.reply(self._last, content)
                self._last = message
            case "forged":
                inside = forged(reply, src_node_id=secrets.randbits(63), reply_to_message_id=secrets.token_hex(32))
                self.sender.push(inside, announced=reply)
            case "garbage":
                self.sender.deliver(reply, *garbage())
            case "withheld":
                self.sender.deliver(reply, get_object_tree(reply), {})
            case "parts":
                self.sender.deliver(reply, many_parts(19_000), {})
            case "timeless":
                self.sender.push(reply, announced=forged(reply, created_at=math.nan))
            case "silent":
                pass
            case _:
                self.sender.push(reply)


def altered_update(behaviour: str, request: TrainRequest, base: Tensors, megabytes: float) -> Update | None:
    """The update of those behaviours whose update is not an honest one."""
    update = update_of(request, nudged(request, base)) if behaviour in ("stale", "future") else None
    match behaviour:
        case "nan":
            return update_of(request, {name: tensor * np.float32("nan") for name, tensor in base.items()})
        case "shapes":
            return update_of(request, {name: tensor[np.newaxis] for name, tensor in base.items()})
        case "norm":
            return update_of(request, {name: tensor + np.float32(1e9) for name, tensor in base.items()})
        case "harmful":  # the other way than `nudged`, and 5,000 times as far
            return update_of(request, {name: tensor - np.float32(5000 * NUDGE) for name, tensor in base.items()})
        case "stale":
            return update and replace(update, version=max(request.version - 1, 0))
        case "future":
            return update and replace(update, version=request.version + 1000)
        case "large":  # of random numbers, because the same chunk twice would be sent and stored once
            numbers = np.random.default_rng(request.attempt).random(int(megabytes * 1e6) // 4, dtype=np.float32)
            return update_of(request, {**base, next(iter(base)): numbers})
    return None


def serve(peer: Peer, *, think_s: float = 0.0, is_over: Callable[[], bool]) -> None:
    """Reply all messages until it is over, each after some seconds of thinking."""
    while not is_over():
        message = peer.sender.receive(1.0)
        if message is not None:
            time.sleep(think_s)
            try:
                peer.answer(message)
            except httpx.HTTPStatusError as problem:  # the run has ended, or what was sent is beyond what Flower takes
                print(f"{peer.name}: {problem.response.status_code} {problem.response.text[:200]}", file=sys.stderr)


def main() -> None:
    """Run one client."""
    parser = argparse.ArgumentParser(description="One client of a deployment, honest or not.")
    parser.add_argument("address")
    parser.add_argument("name")
    parser.add_argument("behaviour", choices=BEHAVIOURS)
    parser.add_argument("--size", type=float, default=100.0)
    parser.add_argument("--think", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--megabytes", type=float, default=200.0, help="how large a large update is")
    parser.add_argument("--root-certificates", metavar="FILE", help="call the server by TLS")
    parser.add_argument(
        "--key", metavar="FILE", type=Path, help="the client's private key, for a server that wants one"
    )
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    parent, ended = os.getppid(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    sender = Sender(
        arguments.address,
        insecure=arguments.root_certificates is None,
        root_certificates=arguments.root_certificates,
        keys=read_key(arguments.key) if arguments.key else None,
    )
    with sender:
        print(sender.node_id, flush=True)
        peer = Peer(sender, arguments.name, arguments.behaviour, size=arguments.size, megabytes=arguments.megabytes)
        serve(peer, think_s=arguments.think, is_over=lambda: ended.is_set() or os.getppid() != parent)


def read_key(path: Path) -> Keys:
    """A client's key pair, as `safa.deploy.launcher.keys` writes it."""
    private = load_ssh_private_key(path.read_bytes(), password=None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    return private, private.public_key()


if __name__ == "__main__":
    main()
