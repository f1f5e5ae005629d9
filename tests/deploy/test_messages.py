"""Messages arrive as they were to_records, and whatever else arrives is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from safa.deploy.exchange.codec import CODECS, CodecName, EncodedModel, encode
from safa.deploy.exchange.messages import Failure, JoinReply, JoinRequest, ModelMissing, TrainRequest, Update, digest_of
from safa.deploy.exchange.screening import Rejected, RejectReason
from safa.deploy.flower.records import (
    read_join_reply,
    read_join_request,
    read_train_reply,
    read_train_request,
    to_records,
)
from safa.errors import SafaError

MODEL = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bias": np.array([-0.5], np.float32),
    "empty": np.empty((0, 4), np.float32),
    "batches": np.array(7),
}


def request(model: EncodedModel | None, codec: Any = "float32") -> TrainRequest:
    return TrainRequest(
        deployment="d", attempt=1, version=2, digest="x", own=True, codec=codec, config="task = 1", client=5, round=3,
        work=0.5, model=model,
    )  # fmt: skip


def update(kind: Any = "float32") -> Update:
    return Update(attempt=3, version=4, seconds=0.5, encoded=encode(MODEL, kind))


@pytest.mark.parametrize("kind", CODECS)
def test_messages_arrive_as_they_were_written(kind: CodecName) -> None:
    assert read_train_request(to_records(request(encode(MODEL, kind), kind))) == request(encode(MODEL, kind), kind)
    assert read_train_request(to_records(request(None))) == request(None)
    assert read_train_reply(to_records(update(kind))) == update(kind)
    assert read_train_reply(to_records(ModelMissing(attempt=5))) == ModelMissing(attempt=5)
    assert (
        read_train_reply(to_records(Failure(why="no")))
        == read_join_reply(to_records(Failure(why="no")))
        == Failure(why="no")
    )
    invitation, introduction = JoinRequest(deployment="d", config="c"), JoinReply(name="ann", size=3.0)
    assert read_join_request(to_records(invitation)) == invitation
    assert read_join_reply(to_records(introduction)) == introduction
    detailed = JoinReply(name="ann", size=3.0, details={"partition": 2})
    assert read_join_reply(to_records(detailed)) == detailed


def test_a_model_is_one_array_however_many_tensors_it_has() -> None:
    assert [len(record) for record in to_records(update()).array_records.values()] == [1]


def test_what_a_server_of_another_version_says_is_an_error() -> None:
    with pytest.raises(SafaError, match="server's message cannot be read"):
        read_train_request(to_records(JoinRequest(deployment="d", config="c")))


@pytest.mark.parametrize("work", [0.0, -0.5, 1.5])
def test_a_share_that_is_none_is_an_error(work: float) -> None:
    with pytest.raises(SafaError, match="work is not above 0 and at most 1"):
        read_train_request(to_records(replace(request(None), work=work)))


def with_head(**changes: Any) -> RecordDict:
    content = to_records(update())
    head = content["safa"]
    assert isinstance(head, ConfigRecord)
    content["safa"] = ConfigRecord({key: value for key, value in {**head, **changes}.items() if value is not None})
    return content


def with_list(tensors: Any) -> RecordDict:
    return with_head(tensors=json.dumps(tensors))


def with_array(array: Array | None) -> RecordDict:
    content = to_records(update())
    if array is None:
        del content["model"]
    else:
        content["model"] = ArrayRecord({"model": array})
    return content


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"safa": ConfigRecord({"message": "TrainRequest"})}),
        with_head(attempt=None),
        with_head(attempt="1"),
        with_head(attempt=True),
        with_head(version=1.5),
        with_head(seconds=float("nan")),
        with_head(encoding=3),
        with_head(tensors=None),
        with_head(tensors="{"),
        with_head(tensors="[" * 100_000),
        with_head(tensors=" " * 2_000_000),
        with_list(3),
        with_list([["weight", "float32"]]),
        with_list([["weight", "float32", [2, 3], None]]),
        with_list([["weight", "float32", [1e9, 1e9], None]]),
        with_list([["weight", "float32", [-1], None]]),
        with_list([["weight", "no such", [2, 3], None]]),
        with_list([[["weight"], "float32", [9], None]]),
        with_array(None),
        with_array(Array(dtype="uint8", shape=(3,), stype="numpy.ndarray", data=b"abc")),
        with_array(Array(dtype="uint8", shape=(3,), stype="safa.raw", data=b"abc")),
    ],
)
def test_whatever_else_arrives_is_refused(content: RecordDict) -> None:
    answer = read_train_reply(content)
    assert isinstance(answer, Rejected)
    assert answer.reason is RejectReason.UNREADABLE
    assert isinstance(read_join_reply(content), Rejected)


def test_a_digest_tells_models_apart() -> None:
    other = [MODEL | {"bias": np.array([0.5], np.float32)}, MODEL | {"weight": MODEL["weight"].reshape(3, 2)}]
    other += [MODEL | {"bias": np.array([-0.5])}, {"b" + name: tensor for name, tensor in MODEL.items()}]
    assert len({digest_of(model) for model in [MODEL, *other]}) == 5
    assert digest_of(dict(reversed(MODEL.items()))) == digest_of(MODEL)
