"""The messages of a deployment as Flower's records, and back.

A model is one array of bytes, its tensors end to end, with a list that describes them: Flower stores and fetches every
array by itself, and each fetch is a request to the SuperLink.

Records from a device are not trusted: whatever is wrong with them yields a `Rejected`, never an exception.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from safa.deploy.exchange.codec import CodecName, EncodedModel, EncodedTensor
from safa.deploy.exchange.messages import (
    Failure,
    JoinReply,
    JoinRequest,
    Message,
    ModelMissing,
    TrainRequest,
    Update,
)
from safa.deploy.exchange.screening import Rejected, RejectReason
from safa.errors import SafaError

__all__ = ["read_join_reply", "read_join_request", "read_train_reply", "read_train_request", "to_records"]

_HEAD, _MODEL, _DETAILS = "safa", "model", "details"
_OWN_RECORDS = ("model", "encoded", "details")  # fields that are not part of the head
_STYPE = "safa.raw"
_LONGEST_LIST = 1_000_000


# -- writing ---------------------------------------------------------------------------------------------------------


def to_records(message: Message) -> RecordDict:
    """A message as Flower's records."""
    head = {name: value for name, value in vars(message).items() if name not in _OWN_RECORDS and value is not None}
    head["message"] = type(message).__name__
    content = RecordDict()
    if isinstance(message, JoinReply):
        content[_DETAILS] = ConfigRecord(dict(message.details))
    encoded = message.model if isinstance(message, TrainRequest) else getattr(message, "encoded", None)
    if encoded is not None:
        tensors = encoded.tensors
        head["encoding"] = encoded.codec
        head["tensors"] = json.dumps([[name, x.dtype, list(x.shape), x.scale] for name, x in tensors.items()])
        data = b"".join(tensor.data for tensor in tensors.values())
        content[_MODEL] = ArrayRecord({_MODEL: Array(dtype="uint8", shape=(len(data),), stype=_STYPE, data=data)})
    content[_HEAD] = ConfigRecord(head)
    return content


# -- reading ---------------------------------------------------------------------------------------------------------


class _UnreadableError(Exception):
    """The records are not a message of the expected type."""


def read_join_request(content: RecordDict) -> JoinRequest:
    """A JoinRequest, on the device."""
    try:
        head = _head(content, "JoinRequest")
        return JoinRequest(deployment=_text(head, "deployment"), config=_text(head, "config"))
    except _UnreadableError as error:
        raise _foreign(error) from None


def read_train_request(content: RecordDict) -> TrainRequest:
    """A TrainRequest, on the device."""
    try:
        head = _head(content, "TrainRequest")
        return TrainRequest(
            deployment=_text(head, "deployment"),
            attempt=_whole(head, "attempt"),
            version=_whole(head, "version"),
            digest=_text(head, "digest"),
            own=head.get("own") is True,
            codec=cast(CodecName, _text(head, "codec")),
            config=_text(head, "config"),
            client=_whole(head, "client"),
            round=_whole(head, "round"),
            work=_share(head, "work"),
            model=_encoded(content, head) if _MODEL in content else None,
        )
    except _UnreadableError as error:
        raise _foreign(error) from None


def _foreign(error: _UnreadableError) -> SafaError:
    return SafaError(f"the server's message cannot be read ({error}): is it of the same version?")


def read_join_reply(content: RecordDict) -> JoinReply | Failure | Rejected:
    """What a node replies to a JoinRequest; whether that is acceptable, the roster decides."""
    try:
        head = _head(content, "JoinReply", "Failure")
        if head["message"] == "Failure":
            return Failure(why=_text(head, "why"))
        details = content.get(_DETAILS)
        if not isinstance(details, ConfigRecord):
            raise _UnreadableError("there are no details")
        return JoinReply(name=_text(head, "name"), size=_number(head, "size"), details=dict(details))
    except _UnreadableError as error:
        return Rejected(RejectReason.UNREADABLE, str(error))


def read_train_reply(content: RecordDict) -> Update | ModelMissing | Failure | Rejected:
    """What a client replies to a TrainRequest."""
    try:
        head = _head(content, "Update", "ModelMissing", "Failure")
        if head["message"] == "Failure":
            return Failure(why=_text(head, "why"))
        if head["message"] == "ModelMissing":
            return ModelMissing(attempt=_whole(head, "attempt"))
        return Update(
            attempt=_whole(head, "attempt"),
            version=_whole(head, "version"),
            seconds=_number(head, "seconds"),
            encoded=_encoded(content, head),
        )
    except _UnreadableError as error:
        return Rejected(RejectReason.UNREADABLE, str(error))


def _head(content: RecordDict, *types: str) -> Mapping[str, Any]:
    head = content.get(_HEAD)
    if not isinstance(head, ConfigRecord) or head.get("message") not in types:
        raise _UnreadableError(f"it is no {' or '.join(types)}")
    return head


def _encoded(content: RecordDict, head: Mapping[str, Any]) -> EncodedModel:
    """A model from its bytes; whether it fits the task, `codec.decode` decides."""
    model = content.get(_MODEL)
    array = model.get(_MODEL) if isinstance(model, ArrayRecord) else None
    if array is None or array.stype != _STYPE:
        raise _UnreadableError("it holds no model")
    tensors = _split(array.data, _text(head, "tensors"))
    return EncodedModel(codec=cast(CodecName, _text(head, "encoding")), tensors=tensors)


def _split(data: bytes, listed: str) -> dict[str, EncodedTensor]:
    """The tensors that stand end to end in `data`, as a list in JSON describes them."""
    if len(listed) > _LONGEST_LIST:
        raise _UnreadableError("its list of tensors is too long")
    tensors, start = {}, 0
    try:
        for name, dtype, shape, scale in json.loads(listed):
            end = start + math.prod(shape) * np.dtype(dtype).itemsize
            tensors[name] = EncodedTensor(dtype=dtype, shape=tuple(shape), data=data[start:end], scale=scale)
            start = end
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _UnreadableError("its list of tensors cannot be read") from None
    if start != len(data):
        raise _UnreadableError("it does not have the bytes of its tensors")
    return tensors


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


def _share(head: Mapping[str, Any], name: str) -> float:
    value = _number(head, name)
    if not 0 < value <= 1:
        raise _UnreadableError(f"{name} is not above 0 and at most 1")
    return value


def _number(head: Mapping[str, Any], name: str) -> float:
    value = head.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _UnreadableError(f"{name} is not a number")
    return float(value)
