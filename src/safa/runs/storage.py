"""Files that are there whole or not at all, and files of tensors that tell whether they are damaged."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safa.errors import SafaError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PART",
    "append",
    "read_json",
    "read_sealed",
    "read_tensors",
    "reading",
    "write_atomically",
    "write_sealed",
    "writing",
]

PART = ".part"
"""What is added to the name of a file while it is being written."""
_CHECK = "check"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, also if the machine stops in between.

    Where that fails, the `OSError` names the file, and what was there before is there still.
    """
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def _sync_folder(folder: Path) -> None:
    """Bring the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_sealed(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    """Write tensors and notes, atomically, as a safetensors file with a checksum of everything in it; return that."""
    from safetensors.torch import save

    check = _checksum(tensors, notes)
    write_atomically(path, save(dict(tensors), metadata={**notes, _CHECK: check}))
    return check


def read_sealed(path: Path, *, check: str | None = None) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The notes and tensors of a file that `write_sealed` wrote; a damaged one is an error.

    So is another than the one with this checksum, where that is given.
    """
    notes, tensors = read_tensors(path)
    found = notes.pop(_CHECK, None)
    if found is None:
        raise SafaError(f"{path} is damaged: there is no checksum in it")
    if found != _checksum(tensors, notes):
        raise SafaError(f"{path} is damaged: its checksum is not that of its content")
    if check not in (None, found):
        raise SafaError(f"{path} is another file than the one that was written under that name")
    return notes, tensors


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and tensors of any safetensors file; one that cannot be read is an error."""
    from safetensors import SafetensorError, safe_open

    try:
        with reading(path), path.open("rb"):  # which names the reason where it cannot be read
            pass
        with reading(path), safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafaError:
        raise
    except (SafetensorError, ValueError, TypeError, RuntimeError, OverflowError, MemoryError):
        raise SafaError(f"{path} is damaged: it is not a whole safetensors file") from None


def read_json(path: Path) -> Any:
    """What a file of JSON holds; one that cannot be read is an error."""
    try:
        with reading(path):
            return json.loads(path.read_bytes().decode())
    except SafaError:
        raise
    except (ValueError, RecursionError):
        raise SafaError(f"{path} is damaged: it is not JSON") from None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an `OSError` into one sentence that names the file."""
    try:
        yield
    except OSError as error:
        raise SafaError(f"cannot read {path}: {error.strerror or error}") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` into one sentence that names the file."""
    try:
        yield
    except OSError as error:
        raise SafaError(f"cannot write {error.filename or path}: {error.strerror or error}") from None


def append(file: BinaryIO, content: bytes) -> None:
    """Write all of it to a file without a buffer, which may take a part at a time when the disk is nearly full."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def _checksum(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    """SHA-256 of notes and tensors, with the names, types and shapes of these."""
    import torch

    found = hashlib.sha256(json.dumps(sorted(notes.items())).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{json.dumps(name)}:{tensor.dtype}:{list(tensor.shape)};".encode())
        numbers = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
        found.update(numbers.view(torch.uint8).numpy().data)
    return found.hexdigest()
