"""Models on the wire: raw little-endian bytes, a dtype and a shape per tensor, and nothing that could be executed.

| kind    | bytes per parameter | error of one number x                                                        |
|---------|---------------------|------------------------------------------------------------------------------|
| float32 | 4                   | none (of a float64: relative 2^-24)                                          |
| float16 | 2                   | relative 2^-11; below 2^-14 absolute 2^-25; above 65504 it cannot be packed  |
| int8    | 1, + 8 per tensor   | half a step, a step being the tensor's largest absolute value / 127          |

A decoded number is rounded to the model's own dtype on top of that. A floating-point tensor that is narrower than the
kind travels as it is, and so does everything that is not floating-point, such as the counters of batch norm. int8 loses
least where a tensor's numbers are of one magnitude: pack a change rather than a model.

A parcel maps one-to-one to Flower's records: a `Packed` is an array's dtype, shape and data; kind and scales are
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from safa.deploy.exchange.screening import Reason, Refused, shown
from safa.errors import SafaError

__all__ = [
    "KINDS",
    "Kind",
    "Like",
    "Packed",
    "Parcel",
    "after",
    "bytes_of",
    "change",
    "like",
    "most_parts",
    "pack",
    "unpack",
]

Kind = Literal["float32", "float16", "int8"]
"""How floating-point numbers travel."""
KINDS: tuple[str, ...] = get_args(Kind)

Like = Mapping[str, tuple[tuple[int, ...], str]]
"""What a model looks like: the shape and the dtype of every tensor, by name."""

_FLOATS = ("float16", "float32", "float64")
_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
_SCALE_BYTES = 8
_PIECE_BYTES = 5 * 1024**2  # Flower cuts an array into such
_FEWEST_PARTS, _OTHER_PARTS = 100, 20


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One tensor, ready to travel."""

    dtype: str
    """The dtype of the bytes, which need not be the model's."""
    shape: tuple[int, ...]
    data: bytes
    """The numbers in C order, little-endian."""
    scale: float | None = None
    """What one step of int8 is worth; None where the numbers stand for themselves."""


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A model, or a change of one, ready to travel."""

    kind: Kind
    tensors: Mapping[str, Packed]


def bytes_of(parcel: Parcel) -> int:
    """The bytes of the numbers and scales; names and framing come on top."""
    return sum(len(t.data) + _SCALE_BYTES * (t.scale is not None) for t in parcel.tensors.values())


def like(tensors: Mapping[str, NDArray[Any]]) -> dict[str, tuple[tuple[int, ...], str]]:
    """What a model looks like, to check a parcel against."""
    return {name: (tensor.shape, tensor.dtype.name) for name, tensor in tensors.items()}


def change(update: Mapping[str, NDArray[Any]], base: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """What an update changed: update - base where numbers are floating-point; everything else as it is."""
    return {name: tensor - base[name] if _is_floating(tensor) else tensor for name, tensor in update.items()}


def after(changed: Mapping[str, NDArray[Any]], base: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The update that changed this much: base + change where numbers are floating-point."""
    return {name: base[name] + tensor if _is_floating(tensor) else tensor for name, tensor in changed.items()}


def _is_floating(tensor: NDArray[Any]) -> bool:
    return np.issubdtype(tensor.dtype, np.floating)


# -- packing: what is wrong here is one's own ------------------------------------------------------------------------


def pack(tensors: Mapping[str, NDArray[Any]], kind: Kind) -> Parcel:
    """Tensors as a parcel. NaN and infinity travel as they are, except in int8, which has none."""
    if kind not in KINDS:
        raise SafaError(f"a model travels as one of {', '.join(KINDS)}, not {kind!r}")
    return Parcel(kind=kind, tensors={name: _packed(name, tensor, kind) for name, tensor in tensors.items()})


def _packed(name: str, tensor: NDArray[Any], kind: Kind) -> Packed:
    dtype = _wire_dtype(tensor.dtype.name, kind)
    if dtype is None:
        raise SafaError(f"{name} is {tensor.dtype}, which cannot travel; allowed are {', '.join(_FLOATS + _WHOLE)}")
    if _is_scaled(tensor.dtype.name, kind):
        numbers, scale = _quantised(name, tensor)
        return Packed(dtype=dtype, shape=tensor.shape, data=numbers.tobytes(), scale=scale)
    return Packed(dtype=dtype, shape=tensor.shape, data=_narrowed(name, tensor, dtype).tobytes())


def _narrowed(name: str, tensor: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The tensor in a dtype that is not wider, little-endian."""
    if dtype != tensor.dtype.name:
        most = float(np.finfo(dtype).max)
        if np.any(np.isfinite(tensor) & (np.abs(tensor) > most)):
            raise SafaError(f"{name} holds a number beyond {most:.6g}, the largest of {dtype}; use a wider kind")
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


def most_parts(most_bytes: int) -> int:
    """How many objects of Flower's a reply may be announced with, if its numbers have so many bytes at most.

    An honest one has a piece of the model each 5 MiB, and five others.
    """
    return max(_FEWEST_PARTS, _OTHER_PARTS + most_bytes // _PIECE_BYTES)


# -- unpacking: what is wrong here came from elsewhere, and is refused -----------------------------------------------


def unpack(parcel: Parcel, like: Like) -> dict[str, NDArray[Any]] | Refused:
    """The tensors of a parcel in the shapes and dtypes of a model, or why it is refused.

    All is checked against the model before any memory is taken, so that a parcel cannot claim more than a model needs.
    Whether the numbers are finite is for the screening to say.
    """
    if parcel.kind not in KINDS:
        return Refused(Reason.UNREADABLE, f"there is no kind {shown(parcel.kind)}")
    if not isinstance(parcel.tensors, Mapping) or parcel.tensors.keys() != like.keys():
        return Refused(Reason.SHAPES, "its tensors have other names than the model's")
    for name, (shape, dtype) in like.items():
        refused = _fault(name, parcel.tensors[name], shape, dtype, parcel.kind)
        if refused:
            return refused
    return {name: _unpacked(parcel.tensors[name], dtype) for name, (_, dtype) in like.items()}


def _fault(name: str, packed: Packed, shape: tuple[int, ...], dtype: str, kind: Kind) -> Refused | None:
    """What is wrong with one tensor, if anything."""
    expected, scaled = _wire_dtype(dtype, kind), _is_scaled(dtype, kind)
    if not isinstance(packed, Packed):
        return Refused(Reason.UNREADABLE, f"{name} is no tensor")
    if not isinstance(packed.shape, tuple) or packed.shape != tuple(shape):
        return Refused(Reason.SHAPES, f"{name} is {shown(packed.shape)}; the model has {tuple(shape)}")
    if expected is None or packed.dtype != expected:
        return Refused(Reason.DTYPES, f"{name} travels as {shown(packed.dtype)}; {dtype} needs {expected} as {kind}")
    size = math.prod(shape) * np.dtype(expected).itemsize
    if not isinstance(packed.data, bytes) or len(packed.data) != size:
        return Refused(Reason.UNREADABLE, f"{name} does not have the {size} bytes of its shape")
    if expected == "bool" and packed.data.translate(None, b"\x00\x01"):
        return Refused(Reason.UNREADABLE, f"{name} holds a byte that is neither true nor false")
    if not (_is_scale(packed.scale) if scaled else packed.scale is None):
        return Refused(Reason.UNREADABLE, f"{name} cannot have the scale {shown(packed.scale)}")
    return None


def _unpacked(packed: Packed, dtype: str) -> NDArray[Any]:
    """A tensor that was found to be in order, in memory of its own."""
    numbers = np.frombuffer(packed.data, dtype=_little(packed.dtype)).reshape(packed.shape)
    if packed.scale is None:
        return numbers.astype(dtype)
    wide = numbers.astype(np.float64)
    with np.errstate(over="ignore"):
        wide *= packed.scale
        return wide.astype(dtype)


def _is_scale(scale: object) -> bool:
    return isinstance(scale, float) and 0 <= scale < math.inf


def _is_scaled(dtype: str, kind: Kind) -> bool:
    return kind == "int8" and dtype in _FLOATS


def _wire_dtype(dtype: str, kind: Kind) -> str | None:
    """How a tensor of this dtype travels; None where it cannot."""
    if dtype in _WHOLE:
        return dtype
    if dtype not in _FLOATS:
        return None
    return kind if kind == "int8" else min(dtype, kind, key=_FLOATS.index)


def _little(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")
