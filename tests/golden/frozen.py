"""The files of frozen results: written, read, and held against a run."""

from __future__ import annotations

import gzip
import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

import safa

__all__ = ["check", "write"]

FOLDER = Path(__file__).parent
TOLERANCE = 1e-7
"""How far a number of a model may be from the frozen one."""


def _rounds_of(run: safa.Run) -> bytes:
    assert run.folder is not None
    return (run.folder / "rounds.jsonl").read_bytes()


def write(name: str, run: safa.Run) -> None:
    """Freeze a run under a name."""
    _rounds_file(name).write_bytes(gzip.compress(_rounds_of(run), mtime=0))
    _model_file(name).write_bytes(save(run.model()))


def check(name: str, run: safa.Run) -> None:
    """Fail if a run has other rounds, in any byte, or another model than the frozen one."""
    frozen, made = gzip.decompress(_rounds_file(name).read_bytes()), _rounds_of(run)
    assert made == frozen, f"{name}: {_first_difference(frozen, made)}"
    _check_model(name, load(_model_file(name).read_bytes()), run.model())


def _rounds_file(name: str) -> Path:
    return FOLDER / f"{name}.rounds.jsonl.gz"


def _model_file(name: str) -> Path:
    return FOLDER / f"{name}.safetensors"


def _check_model(name: str, frozen: dict[str, Tensor], made: dict[str, Tensor]) -> None:
    shapes = [{key: (value.shape, value.dtype) for key, value in model.items()} for model in (frozen, made)]
    assert shapes[0] == shapes[1], f"{name}: the model has other parameters"
    for key, value in frozen.items():
        if not torch.equal(value, made[key]):
            apart = float((value.double() - made[key].double()).abs().max())
            assert apart <= TOLERANCE, f"{name}: {key} of the model is up to {apart:g} away from the frozen one"


def _first_difference(frozen: bytes, made: bytes) -> str:
    """In which round and field two files of rounds differ first."""
    pairs = zip_longest(frozen.splitlines(), made.splitlines())
    for number, (before, after) in enumerate(pairs, 1):
        if before is None or after is None:
            return f"there is {'no' if after is None else 'a'} round {number}, unlike in the frozen file"
        if before != after:
            return f"round {number}: {_first_field(json.loads(before), json.loads(after))}"
    return "the rounds are alike, but not the ends of lines"


def _first_field(frozen: dict[str, Any], made: dict[str, Any]) -> str:
    for key in frozen | made:
        before, after = frozen.get(key, "(absent)"), made.get(key, "(absent)")
        if repr(before) != repr(after):
            return f"{key} is {after!r}, not {before!r}"
    return f"the fields are in the order {', '.join(made)}, not {', '.join(frozen)}"
