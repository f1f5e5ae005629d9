"""Devices and availability from the files of FedScale (Lai et al. 2022), which are pickles, read safely.

A pickle is a program, and what it builds may run code. So every instruction of a file is looked at before any is
carried out, and only those that build dictionaries, lists, numbers and texts are accepted. What they build is not
larger than a small multiple of the file, and is read to a fixed depth.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError
from safa.streams import stream

__all__ = ["device_links", "device_speeds", "is_pickle", "read_plain_pickle", "times_online"]

_STARTS = (b"\x80", b"(dp", b"}q", b"(lp", b"]q")
"""How a pickle of a dictionary or a list begins, by protocol: 2 and later, then 0 and 1. No text of numbers does."""
_CONTAINERS = frozenset({"EMPTY_DICT", "DICT", "EMPTY_LIST", "LIST"})
_MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_ACCEPTED = _CONTAINERS | _MEMO | {
    "PROTO", "FRAME", "STOP", "MARK", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "MEMOIZE", "GET", "BINGET",
    "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4",
    "FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "STRING", "SHORT_BINSTRING",
    "BINSTRING",
}  # fmt: skip
_ALLOWED = "it may hold nothing but dictionaries, lists, numbers and texts"
_MOST_BYTES = 2**27
_MOST_CONTAINERS = 10_000_000
_MOST_TIMES = 20_000_000
_LARGEST = 2**53


def is_pickle(source: object) -> TypeGuard[str]:
    """Whether this is the name of a file that begins as a pickle does."""
    if not isinstance(source, str):
        return False
    try:
        with Path(source).open("rb") as file:
            return file.read(4).startswith(_STARTS)
    except (OSError, ValueError):
        return False  # whoever reads it as text says what is wrong


def device_speeds(path: str | Path, *, count: int, seed: int, batch_size: int) -> NDArray[np.float64]:
    """The clients' speeds in mini-batches per second, from `computation`, the milliseconds that a sample takes."""
    devices = _devices(*_version(path))
    return np.asarray(1000.0 / (devices[_drawn(len(devices), count, seed), 0] * batch_size))


def device_links(path: str | Path, *, count: int, seed: int) -> NDArray[np.float64]:
    """The clients' bandwidths in Mbit/s, either way, from `communication`, in kbit/s; of the same devices."""
    devices = _devices(*_version(path))
    return np.asarray(devices[_drawn(len(devices), count, seed), 1] / 1000.0)


def times_online(path: str | Path, *, count: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows of (client, from, until), by client and time, and the seconds after which each client's repeat."""
    times, period_s = _availability(*_version(path))
    drawn = _drawn(len(times), count, seed)
    found = [times[device] for device in drawn]
    if sum(map(len, found)) > _MOST_TIMES:
        raise SafaError(f"{path} names more than {_MOST_TIMES:,} times online for {count} clients")
    client = np.repeat(np.arange(count, dtype=np.float64), [len(rows) for rows in found])
    if not len(client):
        raise SafaError(f"{path} names no time at which a client is online: nobody would ever train")
    return np.column_stack([client, np.concatenate(found)]), period_s[drawn]


def _drawn(devices: int, count: int, seed: int) -> NDArray[np.int64]:
    """The device of each client: every device once, in a random order, and then any, again and again."""
    order = stream(seed, "device").permutation(devices)[:count]
    again = (stream(seed, "device again").random(count) * devices).astype(np.int64)
    return np.concatenate([order, again[devices:]])


def _version(path: str | Path) -> tuple[str, int, int]:
    """A file as it is now: what was read from it is kept until it changes, since many runs may use it."""
    try:
        now = Path(path).stat()
    except OSError as error:
        raise SafaError(f"cannot read {path}: {error.strerror}") from None
    return str(path), now.st_mtime_ns, now.st_size


@lru_cache(maxsize=2)
def _devices(path: str, _changed: int, _size: int) -> NDArray[np.float64]:
    """A row (computation, communication) for each device, by id."""
    rows = []
    for where, device in _entries(path):
        row = [_number(device, name, where) for name in ("computation", "communication")]
        if min(row) <= 0:
            raise SafaError(f"{where}: computation and communication must be above 0, not {row[0]:g} and {row[1]:g}")
        rows.append(row)
    return np.array(rows)


@lru_cache(maxsize=2)
def _availability(path: str, _changed: int, _size: int) -> tuple[list[NDArray[np.float64]], NDArray[np.float64]]:
    """For each device, by id, rows (from, until) by time, and the period."""
    entries = list(_entries(path))
    if sum(_length(device.get("active")) for _, device in entries) > _MOST_TIMES:  # many may have the same list
        raise SafaError(f"{path} names more than {_MOST_TIMES:,} times online")
    period_s = [_number(device, "finish_time", where) for where, device in entries]
    times = [_times(device, period, where) for (where, device), period in zip(entries, period_s, strict=True)]
    return times, np.array(period_s)


def _times(device: dict[Any, Any], period_s: float, where: str) -> NDArray[np.float64]:
    """The times online of a device within one period."""
    if period_s <= 0:
        raise SafaError(f"{where}: finish_time must be above 0, not {period_s:g}")
    start, end = (_list(device, name, where) for name in ("active", "inactive"))
    if len(start) != len(end):
        raise SafaError(f"{where}: active and inactive must be equally long, not {len(start)} and {len(end)}")
    rows = np.column_stack([start, end]).reshape(-1, 2)
    if (rows[:, 0] < 0).any() or (rows[:, 0] > rows[:, 1]).any():
        raise SafaError(f"{where}: a time online must start at 0 s or later and end after it starts")
    rows = np.minimum(rows, period_s)
    rows = rows[rows[:, 0] < rows[:, 1]]
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if (rows[1:, 0] < rows[:-1, 1]).any():
        raise SafaError(f"{where}: this client is online already at one of these times")
    return np.asarray(rows)


def _entries(path: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    """The entries of a file in the order of their ids, each with where it is."""
    found = read_plain_pickle(path)
    if not isinstance(found, dict) or not found:
        raise SafaError(f"{path} must hold a dictionary of devices by id")
    kinds = {type(key) for key in found}
    if kinds not in ({int}, {str}):
        raise SafaError(f"{path}: the ids of devices must be whole numbers or texts, all alike")
    for key in sorted(found):
        where = f"{path}, device {repr(key)[:40]}"
        if not isinstance(found[key], dict):
            raise SafaError(f"{where}: must be a dictionary, not {_kind(found[key])}")
        yield where, found[key]


def _number(device: dict[Any, Any], name: str, where: str) -> float:
    if name not in device:
        raise SafaError(f"{where}: has no {name}")
    return _finite(device[name], name, where)


def _list(device: dict[Any, Any], name: str, where: str) -> list[float]:
    found = device.get(name)
    if not isinstance(found, list):
        raise SafaError(f"{where}: {name} must be a list, not {_kind(found)}")
    return [_finite(value, name, where) for value in found]


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _finite(value: Any, name: str, where: str) -> float:
    if type(value) not in (int, float):
        raise SafaError(f"{where}: {name} must be a number, not {_kind(value)}")
    if not -_LARGEST <= value <= _LARGEST:  # nor nan, nor inf
        raise SafaError(f"{where}: {name} must be a number below 2**53 in size")
    return float(value)


def _kind(value: Any) -> str:
    names = {dict: "a dictionary", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number")


def read_plain_pickle(path: str | Path) -> Any:
    """What a pickle of dictionaries, lists, numbers and texts holds; any other is refused, and nothing of it is run."""
    try:
        if Path(path).stat().st_size > _MOST_BYTES:
            raise SafaError(f"{path} is larger than {_MOST_BYTES // 2**20} MiB")
        data = Path(path).read_bytes()
    except OSError as error:
        raise SafaError(f"cannot read {path}: {error.strerror}") from None
    try:
        _check_instructions(data, str(path))
        return _Unpickler(io.BytesIO(data)).load()
    except SafaError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError, EOFError, pickle.UnpicklingError):
        raise SafaError(f"{path} is not a whole pickle: it is cut off or damaged") from None


def _check_instructions(data: bytes, path: str) -> None:
    """Refuse a pickle with any instruction that is not among those accepted, or with too many lists in it."""
    containers, before = 0, ("", "")
    for done, (code, argument, _) in enumerate(pickletools.genops(data)):
        name = code.name
        if name not in _ACCEPTED:
            _refuse(path, name, argument, before)
        if name in _MEMO and int(argument or 0) > done:  # the memory of the reader would grow to that
            raise ValueError
        if isinstance(argument, int) and argument.bit_length() > 64:
            raise SafaError(f"{path} holds a number of more than 64 bits")
        if isinstance(argument, str):
            before = before[1], argument
        containers += name in _CONTAINERS
        if containers > _MOST_CONTAINERS:
            raise SafaError(f"{path} holds more than {_MOST_CONTAINERS:,} dictionaries and lists")


def _refuse(path: str, name: str, argument: Any, before: tuple[str, str]) -> NoReturn:
    if name in ("GLOBAL", "INST"):
        wanted = str(argument).replace(" ", ".")
    elif name == "STACK_GLOBAL":
        wanted = ".".join(before)
    else:
        raise SafaError(f"{path} contains the pickle instruction {name}; {_ALLOWED}")
    raise SafaError(f"{path} asks for {wanted[:80]!r}, which may run code; {_ALLOWED}")


class _Unpickler(pickle.Unpickler):
    """Builds what the accepted instructions build; by them nothing is ever looked up."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError

    def persistent_load(self, _: Any) -> NoReturn:
        raise pickle.UnpicklingError
