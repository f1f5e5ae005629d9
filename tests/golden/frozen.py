"""The files of frozen results: written, read, and held against a run.

The last bits of a model depend on torch and on the instructions that it computes with. Where both are those that the
files were made with, a run must have the same rounds to the last byte, and the same model up to `EXACT`. Elsewhere the
scores and the models must be near, and everything else in the rounds the same bytes.
"""

from __future__ import annotations

import gzip
import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

import safa

__all__ = ["check", "is_same_kind", "write", "write_kind"]

FOLDER = Path(__file__).parent
EXACT, NEAR = 1e-7, 1e-4
"""How far a number of a model may be from the frozen one: on the same kind of machine, and on others."""
LOSS, METRIC = 1e-3, 0.01
"""How far a loss and a metric may be from the frozen ones on another kind of machine: some samples may change sides."""
_KIND = FOLDER / "kind.json"


def _kind() -> dict[str, str]:
    """What the last bits of a model depend on."""
    makers = re.findall(r"^vendor_id\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    version, _, _ = torch.__version__.partition("+")
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": version, "instructions": capability, "processor": makers[0] if makers else "unknown"}


def write_kind() -> None:
    """Note on what kind of machine the files are made."""
    _KIND.write_text(json.dumps(_kind(), indent=2) + "\n", encoding="utf-8")


def is_same_kind() -> bool:
    """Whether this machine is of the kind that the files were made on."""
    return bool(json.loads(_KIND.read_text(encoding="utf-8")) == _kind())


def write(name: str, run: safa.Run) -> None:
    """Freeze a run under a name."""
    _rounds_file(name).write_bytes(gzip.compress(_rounds_of(run), mtime=0))
    _model_file(name).write_bytes(save(run.model()))


def check(name: str, run: safa.Run) -> None:
    """Fail if a run has other rounds or another model than the frozen one."""
    frozen, made = gzip.decompress(_rounds_file(name).read_bytes()), _rounds_of(run)
    if not is_same_kind():
        frozen = _with_near_scores(frozen, made)
    assert made == frozen, f"{name}: {_first_difference(frozen, made)}"
    _check_model(name, load(_model_file(name).read_bytes()), run.model(), EXACT if is_same_kind() else NEAR)


def _rounds_of(run: safa.Run) -> bytes:
    assert run.folder is not None
    return (run.folder / "rounds.jsonl").read_bytes()


def _rounds_file(name: str) -> Path:
    return FOLDER / f"{name}.rounds.jsonl.gz"


def _model_file(name: str) -> Path:
    return FOLDER / f"{name}.safetensors"


def _with_near_scores(frozen: bytes, made: bytes) -> bytes:
    """The frozen rounds with the scores of others in place of their own, where these are near."""
    lines = frozen.splitlines()
    for number, (before, after) in enumerate(zip(lines, made.splitlines(), strict=False)):
        record, other = json.loads(before), json.loads(after)
        lines[number] = json.dumps(record | _near_scores(record, other), separators=(",", ":")).encode()
    return b"".join(line + b"\n" for line in lines)


def _near_scores(frozen: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """The frozen scores of a round, with those of another in their place that are near."""
    before, after = frozen["metrics"], made.get("metrics", {})
    metrics = {k: after[k] if _is_near(v, after.get(k), METRIC) else v for k, v in before.items()}
    is_near = _is_near(frozen["loss"], made.get("loss"), LOSS)
    return {"loss": made["loss"] if is_near else frozen["loss"], "metrics": metrics}


def _is_near(one: float | None, other: float | None, tolerance: float) -> bool:
    return one is not None and other is not None and abs(one - other) <= tolerance


def _check_model(name: str, frozen: dict[str, Tensor], made: dict[str, Tensor], tolerance: float) -> None:
    shapes = [{key: (value.shape, value.dtype) for key, value in model.items()} for model in (frozen, made)]
    assert shapes[0] == shapes[1], f"{name}: the model has other parameters"
    for key, value in frozen.items():
        if not torch.equal(value, made[key]):
            apart = float((value.double() - made[key].double()).abs().max())
            assert apart <= tolerance, f"{name}: {key} of the model is up to {apart:g} away from the frozen one"


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
    return f"the fields are in the order {', '.join(made)}, not {', '.join(frozen)}, or written in another way"
