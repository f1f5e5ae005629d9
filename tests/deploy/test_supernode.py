"""A device whose server was killed while a message was on its way: it answers the server that takes its place."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from flwr.app import Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode.nodestate.nodestate_factory import NodeStateFactory

from safa.deploy.flower.internals import run_supernode

program = importlib.import_module("flwr.supernode.cli.flower_supernode")  # the package has a function of that name
worker = importlib.import_module("flwr.supernode.start_client_internal")
PUSH_REPLIES = worker._push_messages
NODE, ENDED, RUNNING = 7, 1, 2


class Device(NamedTuple):
    """A SuperNode's own state, the functions of its connection to the server, and what it has sent."""

    state: Any
    store: Any
    calls: tuple[Any, ...]
    sent: list[str]

    def receive(self) -> int | None:
        """Receive the next message; the run that it is of."""
        _, receive, _, run, fab, pull, _, confirm = self.calls
        given: Any = self.state, self.store, {}, receive, run, fab, pull, confirm, None
        found: int | None = worker._pull_and_store_message(*given)
        return found

    def reply(self) -> None:
        """Send what there is to be sent."""
        _, _, send, _, _, _, push, _ = self.calls
        worker._push_messages(state=self.state, object_store=self.store, send=send, push_object=push)

    def answer(self, message: Message) -> None:
        """What a client app does: put a reply into the state."""
        worker._insert_message(Message(RecordDict(), reply_to=message), self.state, self.store)


def message_of(run: int) -> Message:
    """A message of the server to the device."""
    facts = Metadata(
        run, "", src_node_id=1, dst_node_id=NODE, reply_to_message_id="", group_id="1", created_at=0.0, ttl=1e12,
        message_type="train",
    )  # fmt: skip
    message: Message = make_message(metadata=facts, content=RecordDict())
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Device]:
    """Flower's SuperNode as `run_supernode` makes it, up to the network: messages come from a list."""

    def make(*messages: Message, fails_in: str = "", on_send: Callable[[Device, str], None] | None = None) -> Device:
        parts = {key: item.deflate() for message in messages for key, item in get_all_nested_objects(message).items()}
        left, sent = list(messages), list[str]()

        def pull(run: int, part: str) -> bytes:
            if fails_in == "pull" and run == ENDED:
                raise RunNotRunningException
            return parts[part]

        def confirm(run: int, _: str) -> None:
            if fails_in == "confirm" and run == ENDED:
                raise RunNotRunningException

        def send(message: Message, *_: Any) -> tuple[set[str], str]:
            sent.append(message.metadata.reply_to_message_id)
            if on_send:
                on_send(made, sent[-1])
            if message.metadata.run_id == ENDED:
                raise RunNotRunningException
            return set(), ""

        def receive() -> Any:
            return (left[0], get_object_tree(left.pop(0))) if left else None

        @contextmanager
        def connect() -> Iterator[tuple[Any, ...]]:
            yield NODE, receive, send, Run.create_empty, None, pull, lambda *_: None, confirm

        monkeypatch.setattr(worker, "http_request_response", connect)
        monkeypatch.setattr(worker, "_push_messages", PUSH_REPLIES)
        monkeypatch.setattr(program, "start_client_internal", None)
        monkeypatch.setattr(program, "flower_supernode", lambda: None)
        run_supernode(lambda _: True, app_id="", app_version="")
        factory = NodeStateFactory(ObjectStoreFactory())
        state = factory.state()
        for run in (ENDED, RUNNING):
            state.store_run(Run.create_empty(run))
        with worker.http_request_response() as calls:
            made = Device(state, factory.objectstore_factory.store(), calls, sent)
        return made

    for name in ("_verify_fab", "subprocess"):  # which `run_supernode` replaces
        monkeypatch.setattr(worker, name, getattr(worker, name))
    monkeypatch.setattr("sys.argv", ["safa"])
    return make


def test_a_reply_to_a_run_that_has_ended_does_not_take_the_place_of_the_next(device: Callable[..., Device]) -> None:
    old, new = message_of(ENDED), message_of(RUNNING)

    def then(made: Device, to: str) -> None:
        if to == old.metadata.message_id:
            made.answer(new)  # the client app of the new message is done only now

    made = device(old, new, fails_in="confirm", on_send=then)
    assert made.receive() is None
    made.answer(old)  # its client app had the message already
    assert made.receive() == RUNNING
    made.reply()
    assert made.sent == [old.metadata.message_id, new.metadata.message_id]


def test_replies_that_are_there_together_are_sent_together(device: Callable[..., Device]) -> None:
    old, new = message_of(ENDED), message_of(RUNNING)
    made = device(old, new, fails_in="confirm")
    assert made.receive() is None
    assert made.receive() == RUNNING
    made.answer(new)
    made.answer(old)
    made.reply()
    assert sorted(made.sent) == sorted([old.metadata.message_id, new.metadata.message_id])


@pytest.mark.parametrize("fails_in", ["pull", "confirm"])
def test_a_message_of_a_run_that_has_ended_is_forgotten(device: Callable[..., Device], fails_in: str) -> None:
    """Its client app would wait for the parts that are missing, and no other would be started."""
    old = message_of(ENDED)
    made = device(old, fails_in=fails_in)
    assert made.receive() is None
    assert not made.state.get_messages_legacy()
    assert made.store.get(old.metadata.message_id) is None
    (task,) = made.state.get_tasks()
    assert task.status.sub_status == "failed"
    assert "its run has ended" in task.status.details
