"""Letters arrive as they were written, and whatever else arrives is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from safa.deploy.exchange.codec import KINDS, Kind, Parcel, pack
from safa.deploy.exchange.messages import (
    Failure,
    Introduction,
    Invitation,
    Missing,
    Order,
    Update,
    digest_of,
    read_answer,
    read_introduction,
    read_invitation,
    read_order,
    written,
)
from safa.deploy.exchange.screening import Reason, Refused
from safa.errors import SafaError

MODEL = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bias": np.array([-0.5], np.float32),
    "empty": np.empty((0, 4), np.float32),
    "batches": np.array(7),
}


def order(model: Parcel | None, wire: Any = "float32") -> Order:
    return Order(deployment="d", attempt=1, version=2, digest="x", own=True, wire=wire, config="task = 1", model=model)


def update(kind: Any = "float32") -> Update:
    return Update(attempt=3, version=4, seconds=0.5, parcel=pack(MODEL, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_letters_arrive_as_they_were_written(kind: Kind) -> None:
    assert read_order(written(order(pack(MODEL, kind), kind))) == order(pack(MODEL, kind), kind)
    assert read_order(written(order(None))) == order(None)
    assert read_answer(written(update(kind))) == update(kind)
    assert read_answer(written(Missing(attempt=5))) == Missing(attempt=5)
    assert read_answer(written(Failure(why="no"))) == read_introduction(written(Failure(why="no"))) == Failure(why="no")
    invitation, introduction = Invitation(deployment="d", config="c"), Introduction(name="ann", size=3.0)
    assert read_invitation(written(invitation)) == invitation
    assert read_introduction(written(introduction)) == introduction
    detailed = Introduction(name="ann", size=3.0, details={"partition": 2})
    assert read_introduction(written(detailed)) == detailed


def test_a_model_is_one_array_however_many_tensors_it_has() -> None:
    assert [len(record) for record in written(update()).array_records.values()] == [1]


def test_what_a_server_of_another_version_says_is_an_error() -> None:
    with pytest.raises(SafaError, match="speaks another language"):
        read_order(written(Invitation(deployment="d", config="c")))


def with_head(**changes: Any) -> RecordDict:
    content = written(update())
    head = content["safa"]
    assert isinstance(head, ConfigRecord)
    content["safa"] = ConfigRecord({key: value for key, value in {**head, **changes}.items() if value is not None})
    return content


def with_list(tensors: Any) -> RecordDict:
    return with_head(tensors=json.dumps(tensors))


def with_array(array: Array | None) -> RecordDict:
    content = written(update())
    if array is None:
        del content["model"]
    else:
        content["model"] = ArrayRecord({"model": array})
    return content


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"safa": ConfigRecord({"letter": "Order"})}),
        with_head(attempt=None),
        with_head(attempt="1"),
        with_head(attempt=True),
        with_head(version=1.5),
        with_head(seconds=float("nan")),
        with_head(kind=3),
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
    answer = read_answer(content)
    assert isinstance(answer, Refused)
    assert answer.reason is Reason.UNREADABLE
    assert isinstance(read_introduction(content), Refused)


def test_a_digest_tells_models_apart() -> None:
    other = [MODEL | {"bias": np.array([0.5], np.float32)}, MODEL | {"weight": MODEL["weight"].reshape(3, 2)}]
    other += [MODEL | {"bias": np.array([-0.5])}, {"b" + name: tensor for name, tensor in MODEL.items()}]
    assert len({digest_of(model) for model in [MODEL, *other]}) == 5
    assert digest_of(dict(reversed(MODEL.items()))) == digest_of(MODEL)
