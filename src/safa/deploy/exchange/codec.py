"""Encoding of models: raw little-endian bytes, a dtype and a shape per tensor, and nothing that could be executed.

| codec   | bytes per parameter | error of one number x                                                        |
|---------|---------------------|------------------------------------------------------------------------------|
| float32 | 4                   | none (of a float64: relative 2^-24)                                          |
| float16 | 2                   | relative 2^-11; below 2^-14 absolute 2^-25; above 65504 it cannot be encoded |
| int8    | 1, + 8 per tensor   | half a step, a step being the tensor's largest absolute value / 127          |

A decoded number is rounded to the model's own dtype on top of that. A floating-point tensor that is narrower than the
codec is sent as it is, and so is everything that is not floating-point, such as the counters of batch norm. int8 loses
least where a tensor's numbers are of one magnitude: encode a delta rather than a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from safa.deploy.exchange.screening import Rejected, RejectReason, shown
from safa.errors import SafaError

__all__ = [
    "CODECS",
    "CodecName",
    "EncodedModel",
    "EncodedTensor",
    "ModelSpec",
    "add_delta",
    "decode",
    "delta",
    "encode",
    "encoded_bytes",
    "spec_of",
]

CodecName = Literal["float32", "float16", "int8"]
"""How floating-point numbers are encoded."""
CODECS: tuple[str, ...] = get_args(CodecName)

ModelSpec = Mapping[str, tuple[tuple[int, ...], str]]
"""What a model looks like: the shape and the dtype of every tensor, by name."""

_FLOATS = ("float16", "float32", "float64")
_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
_SCALE_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class EncodedTensor:
    """One tensor, encoded."""

    dtype: str
    """The dtype of the bytes, which need not be the model's."""
    shape: tuple[int, ...]
    data: bytes
    """The numbers in C order, little-endian."""
    scale: float | None = None
    """What one step of int8 is worth; None where the numbers stand for themselves."""


@dataclass(frozen=True, kw_only=True)
class EncodedModel:
    """A model, or a delta of one, encoded."""

    codec: CodecName
    tensors: Mapping[str, EncodedTensor]


def encoded_bytes(encoded: EncodedModel) -> int:
    """The bytes of the numbers and scales; names and framing come on top."""
    return sum(len(t.data) + _SCALE_BYTES * (t.scale is not None) for t in encoded.tensors.values())


def spec_of(tensors: Mapping[str, NDArray[Any]]) -> dict[str, tuple[tuple[int, ...], str]]:
    """What a model looks like, to check an encoded one against."""
    return {name: (tensor.shape, tensor.dtype.name) for name, tensor in tensors.items()}


def delta(update: Mapping[str, NDArray[Any]], base: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The delta of an update: update - base where numbers are floating-point; everything else as it is."""
    return {name: tensor - base[name] if _is_floating(tensor) else tensor for name, tensor in update.items()}


def add_delta(delta: Mapping[str, NDArray[Any]], base: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The update of a delta: base + delta where numbers are floating-point."""
    return {name: base[name] + tensor if _is_floating(tensor) else tensor for name, tensor in delta.items()}


def _is_floating(tensor: NDArray[Any]) -> bool:
    return np.issubdtype(tensor.dtype, np.floating)


# -- encoding: faults are errors of this program --------------------------------------------------------------------


def encode(tensors: Mapping[str, NDArray[Any]], codec: CodecName) -> EncodedModel:
    """Tensors, encoded. NaN and infinity stay what they are, except in int8, which has none."""
    if codec not in CODECS:
        raise SafaError(f"a codec is one of {', '.join(CODECS)}, not {codec!r}")
    return EncodedModel(codec=codec, tensors={name: _encoded(name, tensor, codec) for name, tensor in tensors.items()})


def _encoded(name: str, tensor: NDArray[Any], codec: CodecName) -> EncodedTensor:
    dtype = _encoded_dtype(tensor.dtype.name, codec)
    if dtype is None:
        raise SafaError(f"{name} is {tensor.dtype}, which cannot be encoded; allowed are {', '.join(_FLOATS + _WHOLE)}")
    if _is_scaled(tensor.dtype.name, codec):
        numbers, scale = _quantised(name, tensor)
        return EncodedTensor(dtype=dtype, shape=tensor.shape, data=numbers.tobytes(), scale=scale)
    return EncodedTensor(dtype=dtype, shape=tensor.shape, data=_narrowed(name, tensor, dtype).tobytes())


def _narrowed(name: str, tensor: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The tensor in a dtype that is not wider, little-endian."""
    if dtype != tensor.dtype.name:
        most = float(np.finfo(dtype).max)
        if np.any(np.isfinite(tensor) & (np.abs(tensor) > most)):
            raise SafaError(f"{name} holds a number beyond {most:.6g}, the largest of {dtype}; use a wider codec")
    return tensor.astype(_little(dtype))


def _quantised(name: str, tensor: NDArray[Any]) -> tuple[NDArray[np.int8], float]:
    """Whole steps from -127 to 127, rounded half to even, and what one step is worth."""
    largest = float(np.max(np.abs(tensor), initial=0.0))
    if not math.isfinite(largest):
        raise SafaError(f"{name} holds a NaN or an infinite number, which int8 does not have")
    scale = largest / 127
    if scale == 0:
        return np.zeros(tensor.shape, dtype=np.int8), 0.0
    return np.clip(np.rint(tensor.astype(np.float64) / scale), -127, 127).astype(np.int8), scale


# -- decoding: faults come from others, and the model is rejected ---------------------------------------------------


def decode(encoded: EncodedModel, spec: ModelSpec) -> dict[str, NDArray[Any]] | Rejected:
    """The tensors of an encoded model in the shapes and dtypes of a spec, or why it is rejected.

    Everything is checked against the spec before memory is allocated, so that nobody can claim more than a model needs.
    Whether the numbers are finite, the screening decides.
    """
    if encoded.codec not in CODECS:
        return Rejected(RejectReason.UNREADABLE, f"there is no codec {shown(encoded.codec)}")
    if not isinstance(encoded.tensors, Mapping) or encoded.tensors.keys() != spec.keys():
        return Rejected(RejectReason.SHAPES, "its tensors have other names than the model's")
    for name, (shape, dtype) in spec.items():
        rejected = _fault(name, encoded.tensors[name], shape, dtype, encoded.codec)
        if rejected:
            return rejected
    return {name: _decoded(encoded.tensors[name], dtype) for name, (_, dtype) in spec.items()}


def _fault(name: str, encoded: EncodedTensor, shape: tuple[int, ...], dtype: str, codec: CodecName) -> Rejected | None:
    """What is wrong with one tensor, if anything."""
    expected, scaled = _encoded_dtype(dtype, codec), _is_scaled(dtype, codec)
    if not isinstance(encoded, EncodedTensor):
        return Rejected(RejectReason.UNREADABLE, f"{name} is no tensor")
    if not isinstance(encoded.shape, tuple) or encoded.shape != tuple(shape):
        return Rejected(RejectReason.SHAPES, f"{name} is {shown(encoded.shape)}; the model has {tuple(shape)}")
    if expected is None or encoded.dtype != expected:
        return Rejected(
            RejectReason.DTYPES, f"{name} is sent as {shown(encoded.dtype)}; {dtype} needs {expected} as {codec}"
        )
    size = math.prod(shape) * np.dtype(expected).itemsize
    if not isinstance(encoded.data, bytes) or len(encoded.data) != size:
        return Rejected(RejectReason.UNREADABLE, f"{name} does not have the {size} bytes of its shape")
    if expected == "bool" and encoded.data.translate(None, b"\x00\x01"):
        return Rejected(RejectReason.UNREADABLE, f"{name} holds a byte that is neither true nor false")
    if not (_is_scale(encoded.scale) if scaled else encoded.scale is None):
        return Rejected(RejectReason.UNREADABLE, f"{name} cannot have the scale {shown(encoded.scale)}")
    return None


def _decoded(encoded: EncodedTensor, dtype: str) -> NDArray[Any]:
    """A checked tensor, in memory of its own."""
    numbers = np.frombuffer(encoded.data, dtype=_little(encoded.dtype)).reshape(encoded.shape)
    if encoded.scale is None:
        return numbers.astype(dtype)
    wide = numbers.astype(np.float64)
    with np.errstate(over="ignore"):
        wide *= encoded.scale
        return wide.astype(dtype)


def _is_scale(scale: object) -> bool:
    return isinstance(scale, float) and 0 <= scale < math.inf


def _is_scaled(dtype: str, codec: CodecName) -> bool:
    return codec == "int8" and dtype in _FLOATS


def _encoded_dtype(dtype: str, codec: CodecName) -> str | None:
    """The dtype in which a tensor of this dtype is sent; None where it cannot be."""
    if dtype in _WHOLE:
        return dtype
    if dtype not in _FLOATS:
        return None
    return codec if codec == "int8" else min(dtype, codec, key=_FLOATS.index)


def _little(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")
