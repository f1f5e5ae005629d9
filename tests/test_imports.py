"""The rooms of the house: who may import whom. What a room must never see, its code cannot name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "safa"
HALL = {"safa.errors", "safa.protocol.records", "safa.vocabulary"}  # what every room shares

MAY_IMPORT: dict[str, set[str]] = {
    "protocol": {"numpy"},
    "fleet": {"numpy"},
    "simulation": {"numpy", "safa.protocol", "safa.fleet", "safa.runs.settings"},
    "tasks": {"numpy", "torch", "pooch", "requests", "tqdm"},
    "aggregation": {"numpy", "torch"},
    "learning": {"numpy", "torch", "safa.tasks"},
    "analysis": {"numpy"},
    "report": {"numpy", "altair", "vl_convert", "safa.analysis", "safa.runs", "safa.runs.settings"},
    "paper": {"numpy", "torch", "altair", "rich", "safa"},
    "testing": {"numpy", "torch", "safa.aggregation", "safa.protocol"},
    "deploy": {"numpy", "torch", "flwr", "httpx", "uvicorn", "cryptography", "safetensors", "rich", "safa"},
}
"""Room -> what it may import besides the standard library, itself and the hall."""

IMPURE = {"random", "time", "datetime", "os", "io", "pathlib", "socket", "asyncio", "threading", "secrets"}


def imports(file: Path) -> set[str]:
    """The modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports by a relative path"
            found.add(node.module or "")
    return found


def belongs(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    allowed = MAY_IMPORT[room] | HALL | {f"safa.{room}"} | set(sys.stdlib_module_names)
    for file in (SOURCE / room).rglob("*.py"):
        strangers = {module for module in imports(file) if not belongs(module, allowed)}
        assert not strangers, f"{file.relative_to(SOURCE)} must not import {', '.join(sorted(strangers))}"


def test_every_room_is_in_the_table() -> None:
    rooms = {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()}
    assert rooms == MAY_IMPORT.keys()


def test_the_hall_stands_alone() -> None:
    for name in ("errors.py", "records.py", "vocabulary.py"):
        assert not {m for m in imports(SOURCE / name) if m.startswith("safa")}


def test_the_protocol_room_is_pure() -> None:
    """No clock, no random number, no file, no socket."""
    for file in (SOURCE / "protocol").rglob("*.py"):
        assert not {module.split(".")[0] for module in imports(file)} & IMPURE
        text = file.read_text(encoding="utf-8")
        assert "np.random" not in text
        assert "open(" not in text.replace("def open(", "")


def test_simulating_needs_no_torch_and_no_rich() -> None:
    """Rounds alone are simulated without loading a tensor library or anything of the command line."""
    code = (
        "import sys, safa; list(safa.run_rounds(safa.Settings.of('boston', rounds=2))); "
        "print(sorted({'torch', 'rich', 'hypothesis'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
