"""What server and device say to each other, and how it looks in Flower's records.

    server                                             device
    Invitation    who are you?                  ->
                                                <-     Introduction   a name, a size n_k, and what else there is to say
    Order         train from this model         ->
                                                <-     Update         the model that came of it, or its change
                                                <-     Missing        I do not hold that model: send it

A device that cannot do what it was asked answers with a `Failure`; so does Flower in its stead where the device or the
network has failed. An order names the model to start from by its version and its digest. It brings the model along
where the protocol sends one; where a client is to go on with what it holds, it does not.

A model travels as one array of bytes, its tensors end to end, with a list of what they are: Flower keeps and fetches
every array by itself, and a request each is what a server's time goes into.

What a device says is read with suspicion: whatever is wrong with it is a `Refused`, never an exception.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from safa.deploy.exchange.codec import Kind, Packed, Parcel, bytes_of
from safa.deploy.exchange.screening import Reason, Refused
from safa.deploy.exchange.text import printable
from safa.errors import SafaError

__all__ = [
    "Answer",
    "Failure",
    "Introduction",
    "Invitation",
    "Missing",
    "Order",
    "Post",
    "Update",
    "digest_of",
    "read_answer",
    "read_introduction",
    "read_invitation",
    "read_order",
    "written",
]

_HEAD, _MODEL, _DETAILS = "safa", "model", "details"
_STYPE = "safa.raw"
_LONGEST_LIST = 1_000_000
_LONGEST_WHY = 500


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """The server asks a node who it is."""

    deployment: str
    """Which deployment this is; what a device has kept for another one is of no use here."""
    config: str
    """The settings of the run, as TOML."""


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """A node says who it is."""

    name: str
    size: float
    """n_k."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else it says of itself: `partition`, where its data is that part of the task's."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The server asks a client to train."""

    deployment: str
    attempt: int
    """No two orders of a deployment have the same."""
    version: int
    """The version of the model to start from."""
    digest: str
    """What `digest_of` says of that model as it looks after its travel."""
    own: bool
    """Whether to start from the client's own last update instead (fully local training)."""
    wire: Kind
    """How the update is to travel."""
    config: str
    """The settings of the run, as TOML."""
    model: Parcel | None
    """The model, if it is sent along."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """A client's answer: the model that its training came to."""

    attempt: int
    version: int
    seconds: float
    """How long it trained, as it says."""
    parcel: Parcel
    """With float32 the model; otherwise its change, which loses less."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all that travelled as numbers."""
        return bytes_of(self.parcel)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A client's answer: it does not hold the model that it is to go on from."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class Failure:
    """No answer will come: the device, its app or the network has failed."""

    why: str
    """One printable line of bounded length, whatever was given: others wrote it, and it goes into logs."""
    code: int = 0
    """Flower's error code; 0 where the device itself said so."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "why", printable(self.why[:_LONGEST_WHY])[:_LONGEST_WHY])


Answer = Introduction | Update | Missing | Failure | Refused
"""What can come back for a letter."""


@dataclass(frozen=True, kw_only=True)
class Post:
    """A letter to a node."""

    node: int
    letter: Invitation | Order
    client: int | None = None
    """The number of the client behind the node, where it is known."""

    def without_model(self) -> Post:
        """What is worth remembering once it is sent."""
        return replace(self, letter=replace(self.letter, model=None)) if isinstance(self.letter, Order) else self


def digest_of(tensors: Mapping[str, NDArray[Any]]) -> str:
    """A fingerprint of a model, the same on every machine."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}:{tensor.dtype.name}:{tensor.shape};".encode())
        found.update(np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<")).tobytes())
    return found.hexdigest()


# -- writing ---------------------------------------------------------------------------------------------------------


def written(letter: Invitation | Introduction | Order | Update | Missing | Failure) -> RecordDict:
    """A letter as Flower's records."""
    parcel = letter.model if isinstance(letter, Order) else letter.parcel if isinstance(letter, Update) else None
    head = {
        name: value
        for name, value in vars(letter).items()
        if name not in ("model", "parcel", "details") and value is not None
    }
    head["letter"] = type(letter).__name__
    content = RecordDict()
    if isinstance(letter, Introduction):
        content[_DETAILS] = ConfigRecord(dict(letter.details))
    if parcel is not None:
        tensors = parcel.tensors
        head["kind"] = parcel.kind
        head["tensors"] = json.dumps([[name, x.dtype, list(x.shape), x.scale] for name, x in tensors.items()])
        data = b"".join(tensor.data for tensor in tensors.values())
        content[_MODEL] = ArrayRecord({_MODEL: Array(dtype="uint8", shape=(len(data),), stype=_STYPE, data=data)})
    content[_HEAD] = ConfigRecord(head)
    return content


# -- reading ---------------------------------------------------------------------------------------------------------


class _UnreadableError(Exception):
    """What was sent is not a letter of that kind."""


def read_invitation(content: RecordDict) -> Invitation:
    """An invitation, on the device."""
    return cast(Invitation, _from_server(content, Invitation))


def read_order(content: RecordDict) -> Order:
    """An order, on the device."""
    return cast(Order, _from_server(content, Order))


def _from_server(content: RecordDict, kind: type[Invitation] | type[Order]) -> Invitation | Order:
    try:
        head = _head(content, kind.__name__)
        if kind is Invitation:
            return Invitation(deployment=_text(head, "deployment"), config=_text(head, "config"))
        return Order(
            deployment=_text(head, "deployment"),
            attempt=_whole(head, "attempt"),
            version=_whole(head, "version"),
            digest=_text(head, "digest"),
            own=head.get("own") is True,
            wire=cast(Kind, _text(head, "wire")),
            config=_text(head, "config"),
            model=_parcel(content, head) if _MODEL in content else None,
        )
    except _UnreadableError as problem:
        raise SafaError(f"the server speaks another language ({problem}): is it of the same version?") from None


def read_introduction(content: RecordDict) -> Introduction | Failure | Refused:
    """What a node says of itself; whether that is acceptable is for the roster to say."""
    try:
        head = _head(content, "Introduction", "Failure")
        if head["letter"] == "Failure":
            return Failure(why=_text(head, "why"))
        details = content.get(_DETAILS)
        if not isinstance(details, ConfigRecord):
            raise _UnreadableError("there are no details")
        return Introduction(name=_text(head, "name"), size=_number(head, "size"), details=dict(details))
    except _UnreadableError as problem:
        return Refused(Reason.UNREADABLE, str(problem))


def read_answer(content: RecordDict) -> Update | Missing | Failure | Refused:
    """What a client answers to an order."""
    try:
        head = _head(content, "Update", "Missing", "Failure")
        if head["letter"] == "Failure":
            return Failure(why=_text(head, "why"))
        if head["letter"] == "Missing":
            return Missing(attempt=_whole(head, "attempt"))
        return Update(
            attempt=_whole(head, "attempt"),
            version=_whole(head, "version"),
            seconds=_number(head, "seconds"),
            parcel=_parcel(content, head),
        )
    except _UnreadableError as problem:
        return Refused(Reason.UNREADABLE, str(problem))


def _head(content: RecordDict, *kinds: str) -> Mapping[str, Any]:
    head = content.get(_HEAD)
    if not isinstance(head, ConfigRecord) or head.get("letter") not in kinds:
        raise _UnreadableError(f"it is no {' or '.join(kinds)}")
    return head


def _parcel(content: RecordDict, head: Mapping[str, Any]) -> Parcel:
    """A model from its bytes; whether it is one of ours is for `wire.unpack` to say."""
    model = content.get(_MODEL)
    array = model.get(_MODEL) if isinstance(model, ArrayRecord) else None
    if array is None or array.stype != _STYPE:
        raise _UnreadableError("it holds no model")
    listed = _text(head, "tensors")
    try:
        if len(listed) > _LONGEST_LIST:
            raise ValueError
        tensors, start = {}, 0
        for name, dtype, shape, scale in json.loads(listed):
            end = start + math.prod(shape) * np.dtype(dtype).itemsize
            tensors[name] = Packed(dtype=dtype, shape=tuple(shape), data=array.data[start:end], scale=scale)
            start = end
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _UnreadableError("its list of tensors cannot be read") from None
    if start != len(array.data):
        raise _UnreadableError("it does not have the bytes of its tensors")
    return Parcel(kind=cast(Kind, _text(head, "kind")), tensors=tensors)


def _text(head: Mapping[str, Any], name: str) -> str:
    value = head.get(name)
    if not isinstance(value, str):
        raise _UnreadableError(f"{name} is not text")
    return value


def _whole(head: Mapping[str, Any], name: str) -> int:
    value = head.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _UnreadableError(f"{name} is not a whole number")
    return value


def _number(head: Mapping[str, Any], name: str) -> float:
    value = head.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _UnreadableError(f"{name} is not a number")
    return float(value)
