"""Files that are there whole or not at all, and files of tensors that tell whether they are damaged."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safa.errors import SafaError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PART", "read_sealed", "write_atomically", "write_sealed"]

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
    except OSError as problem:
        with suppress(OSError):
            part.unlink()
        raise OSError(problem.errno, problem.strerror, str(path)) from None


def _sync_folder(folder: Path) -> None:
    """Bring the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_sealed(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write tensors and notes, atomically, as a safetensors file with a checksum of everything in it."""
    from safetensors.torch import save

    write_atomically(path, save(dict(tensors), metadata={**notes, _CHECK: _checksum(tensors, notes)}))


def read_sealed(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The notes and tensors of a file that `write_sealed` wrote; a damaged one is an error."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb"):  # which names the reason where it cannot be read
            pass
        with safe_open(path, framework="pt") as file:
            notes = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as problem:
        raise SafaError(f"cannot read {path}: {problem.strerror or problem}") from None
    except (SafetensorError, ValueError, TypeError, RuntimeError, OverflowError, MemoryError):
        raise SafaError(f"{path} is damaged: it is not a whole safetensors file") from None
    check = notes.pop(_CHECK, None)
    if check is None:
        raise SafaError(f"{path} is damaged: there is no checksum in it")
    if check != _checksum(tensors, notes):
        raise SafaError(f"{path} is damaged: its checksum is not that of its content")
    return notes, tensors


def _checksum(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    """SHA-256 of notes and tensors, with the names, types and shapes of these."""
    import torch

    found = hashlib.sha256(json.dumps(sorted(notes.items())).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{json.dumps(name)}:{tensor.dtype}:{list(tensor.shape)};".encode())
        numbers = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
        found.update(numbers.view(torch.uint8).numpy().data)
    return found.hexdigest()
