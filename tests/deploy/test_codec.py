"""What is sent: round trips, the stated errors and sizes, and encoded models that lie."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from safa.deploy.exchange.codec import (
    CODECS,
    CodecName,
    EncodedModel,
    EncodedTensor,
    decode,
    encode,
    encoded_bytes,
    spec_of,
)
from safa.deploy.exchange.screening import Rejected, RejectReason
from safa.errors import SafaError

SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


def floats(dtype: str, most: float | None = None) -> st.SearchStrategy[NDArray[Any]]:
    bits = int(dtype[-2:])
    bound = most if most is None else float(np.dtype(dtype).type(most))
    width: Any = bits
    low = None if bound is None else -bound
    numbers = st.floats(low, bound, width=width, allow_nan=False, allow_infinity=False)
    return hnp.arrays(dtype, SHAPES, elements=numbers)


def there_and_back(tensor: NDArray[Any], kind: CodecName) -> NDArray[Any]:
    back = decode(encode({"w": tensor}, kind), spec_of({"w": tensor}))
    assert not isinstance(back, Rejected)
    assert back["w"].dtype == tensor.dtype
    assert back["w"].shape == tensor.shape
    assert back["w"].flags.writeable
    return back["w"]


@given(hnp.arrays(st.sampled_from(["float32", "float16"]), SHAPES))
def test_float32_loses_nothing_not_even_a_nan(tensor: NDArray[Any]) -> None:
    assert there_and_back(tensor, "float32").tobytes() == tensor.tobytes()


@given(floats("float64", 1e38))
def test_a_float64_is_rounded_to_float32(tensor: NDArray[Any]) -> None:
    error = np.abs(there_and_back(tensor, "float32") - tensor)
    assert np.all(error <= np.abs(tensor) * 2.0**-24 + 2.0**-149)


@given(floats("float32", 65504.0))
def test_the_error_of_float16_is_as_stated(tensor: NDArray[Any]) -> None:
    exact = tensor.astype(np.float64)
    error = np.abs(there_and_back(tensor, "float16") - exact)
    assert np.all(error <= np.maximum(np.abs(exact) * 2.0**-11, 2.0**-25))


@given(floats("float32"))
def test_the_error_of_int8_is_half_a_step(tensor: NDArray[Any]) -> None:
    step = encode({"w": tensor}, "int8").tensors["w"].scale
    assert step is not None
    assert step == np.max(np.abs(tensor.astype(np.float64)), initial=0.0) / 127
    error = np.abs(there_and_back(tensor, "int8").astype(np.float64) - tensor)
    own_rounding = np.abs(tensor.astype(np.float64)) * 2.0**-23 + 2.0**-149
    assert np.all(error <= step * (0.5 + 1e-9) + own_rounding)


def test_int8_rounds_half_to_even_and_zero_stays_zero() -> None:
    packed = encode({"w": np.array([127, 0.5, 1.5, 2.5, -0.5, -127], dtype=np.float32)}, "int8").tensors["w"]
    assert np.frombuffer(packed.data, np.int8).tolist() == [127, 0, 2, 2, 0, -127]
    assert not there_and_back(np.zeros((3, 2), np.float32), "int8").any()


@pytest.mark.parametrize(("kind", "each", "extra"), [("float32", 4, 0), ("float16", 2, 0), ("int8", 1, 8)])
def test_the_bytes_per_parameter_are_as_stated(kind: CodecName, each: int, extra: int) -> None:
    model = {"w": np.ones((30, 10), np.float32), "b": np.ones(10, np.float32)}
    assert encoded_bytes(encode(model, kind)) == 310 * each + 2 * extra


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("tensor", [np.array(2**60 + 1), np.array([-3], np.int8), np.array([True, False])])
def test_what_is_not_floating_is_sent_as_it_is(kind: CodecName, tensor: NDArray[Any]) -> None:
    assert there_and_back(tensor, kind).tobytes() == tensor.tobytes()
    assert encode({"w": tensor}, kind).tensors["w"].scale is None


def test_bytes_are_little_endian_in_c_order() -> None:
    tensor = np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3))
    assert encode({"w": tensor}, "float32").tensors["w"].data == np.arange(6, dtype="<f4").tobytes()


def test_what_cannot_be_packed_is_said_clearly() -> None:
    with pytest.raises(SafaError, match=r"w holds a number beyond 65504"):
        encode({"w": np.array([65505.0])}, "float16")
    with pytest.raises(SafaError, match=r"w holds a number beyond 3.40282e\+38"):
        encode({"w": np.array([1e39])}, "float32")
    with pytest.raises(SafaError, match=r"w holds a NaN or an infinite number"):
        encode({"w": np.array([1.0, math.nan])}, "int8")
    with pytest.raises(SafaError, match=r"w is complex128, which cannot be encoded"):
        encode({"w": np.array([1j])}, "float32")
    with pytest.raises(SafaError, match=r"a codec is one of float32, float16, int8, not 'bits'"):
        encode({}, "bits")  # type: ignore[arg-type]


# -- encoded models that lie -------------------------------------------------------------------------------------------

MODEL = {"w": np.ones((2, 3), np.float32), "steps": np.array(7), "mask": np.array([True, False])}


@pytest.mark.parametrize(
    ("kind", "name", "change", "reason"),
    [
        ("float32", "w", {"shape": (3, 2)}, RejectReason.SHAPES),
        ("float32", "w", {"shape": (2, 3, 10**12)}, RejectReason.SHAPES),
        ("float32", "w", {"shape": [2, 3]}, RejectReason.SHAPES),
        ("float32", "w", {"dtype": "float64"}, RejectReason.DTYPES),
        ("float32", "w", {"dtype": "object"}, RejectReason.DTYPES),
        ("float32", "w", {"data": b""}, RejectReason.UNREADABLE),
        ("float32", "w", {"data": "text"}, RejectReason.UNREADABLE),
        ("float32", "w", {"scale": 1.0}, RejectReason.UNREADABLE),
        ("float32", "mask", {"data": b"\x01\x02"}, RejectReason.UNREADABLE),
        ("int8", "w", {"scale": None}, RejectReason.UNREADABLE),
        ("int8", "w", {"scale": math.nan}, RejectReason.UNREADABLE),
        ("int8", "w", {"scale": -1.0}, RejectReason.UNREADABLE),
        ("int8", "w", {"scale": 10**5000}, RejectReason.UNREADABLE),
        ("int8", "steps", {"scale": 1.0}, RejectReason.UNREADABLE),
    ],
)
def test_an_encoded_model_that_lies_is_refused(
    kind: CodecName, name: str, change: dict[str, Any], reason: RejectReason
) -> None:
    encoded = encode(MODEL, kind)
    wrong = replace(encoded, tensors={**encoded.tensors, name: replace(encoded.tensors[name], **change)})
    refused = decode(wrong, spec_of(MODEL))
    assert isinstance(refused, Rejected)
    assert refused.reason is reason
    assert len(refused.why) < 200


def test_other_names_and_kinds_are_refused() -> None:
    encoded = encode(MODEL, "float32")
    for tensors in ({}, {**encoded.tensors, "more": encoded.tensors["w"]}):
        assert decode(replace(encoded, tensors=tensors), spec_of(MODEL)) == (
            RejectReason.SHAPES,
            "its tensors have other names than the model's",
        )
    for wrong, reason in (({"codec": "zip"}, RejectReason.UNREADABLE), ({"tensors": None}, RejectReason.SHAPES)):
        refused = decode(replace(encoded, **wrong), spec_of(MODEL))
        assert isinstance(refused, Rejected)
        assert refused.reason is reason


def test_a_scale_that_overflows_is_left_to_the_screening() -> None:
    encoded = encode({"w": np.ones(2, np.float32)}, "int8")
    back = decode(replace(encoded, tensors={"w": replace(encoded.tensors["w"], scale=1e308)}), {"w": ((2,), "float32")})
    assert not isinstance(back, Rejected)
    assert np.isinf(back["w"]).all()


JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 2**70, math.nan, math.inf, "", "O", "float64", b"", bytes(24), (), (2, -3)]
)


def almost(name: str, kind: CodecName) -> st.SearchStrategy[Any]:
    """A tensor of the model in which any field may be junk, or junk altogether."""
    good = encode(MODEL, kind).tensors[name]
    fields = {field: st.just(value) | JUNK for field, value in vars(good).items()}
    return st.none() | st.builds(EncodedTensor, **fields)


@st.composite
def hostile(draw: st.DrawFn) -> EncodedModel:
    kind = draw(st.sampled_from(get_args(CodecName)))
    tensors = draw(JUNK | st.fixed_dictionaries({name: almost(name, kind) for name in MODEL}))
    return EncodedModel(codec=draw(st.just(kind) | JUNK), tensors=tensors)


@settings(max_examples=60)
@given(hostile())
def test_a_hostile_encoded_model_raises_nothing(encoded: EncodedModel) -> None:
    back = decode(encoded, spec_of(MODEL))
    assert isinstance(back, Rejected) or spec_of(back) == spec_of(MODEL)
