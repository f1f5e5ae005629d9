"""The gallery in `examples/`: its programs and notebooks, run as a user would run them, and what they are to print.

python -m tests.gallery [NAME ...]     # run these, or all, and write what they print beside them
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.golden.frozen import is_same_kind

__all__ = ["EXAMPLES", "NOTEBOOKS", "PROGRAMS", "check", "executed", "outputs", "printed"]

EXAMPLES = Path(__file__).parent.parent / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
_PICTURE, _NEAR = "image/png", 0.3
_PATIENCE_S = 240
_NUMBER = re.compile(r"\d[\d,.]*")


def printed(name: str, folder: Path) -> str:
    """What a program prints; it is started in a folder that holds nothing but the examples."""
    copied = shutil.copytree(EXAMPLES, folder / "examples")
    command = [sys.executable, str(copied / f"{name}.py")]
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=_PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, ""), f"{name} ended with {done.returncode}:\n{done.stderr}"
    return done.stdout


def executed(name: str, folder: Path) -> Any:
    """A notebook after all its cells have been executed in a folder, by a kernel of its own."""
    notebook = _read(name)
    before = notebook.metadata.copy()
    client = NotebookClient(
        notebook, timeout=_PATIENCE_S, record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=_environment() | {"IPYTHONDIR": str(folder / "ipython")})
    notebook.metadata = before  # without the versions of this machine
    return notebook


def _environment() -> dict[str, str]:
    """That of these tests, with one thread, of which the last bits of a sum depend."""
    return dict(os.environ) | {"OMP_NUM_THREADS": "1"}


def _read(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]


def outputs(notebook: Any) -> str:
    """What the cells of a notebook show, as one text; of a picture, that it is there."""
    shown = [part for cell in notebook.cells for one in cell.get("outputs", ()) for part in _parts(one)]
    return "\n".join(shown)


def _parts(output: Any) -> Iterator[str]:
    if output.output_type == "stream":
        yield output.text
    for kind, content in sorted(output.get("data", {}).items()):
        yield f"({kind})" if kind.startswith("image/") else content


def check(said: str, found: str) -> None:
    """Fail if what was printed is not what is said.

    The last bits of a model depend on the kind of machine. On another kind than that of the frozen results
    (`tests/golden`) words must be the same and numbers near; marks that stand for numbers do not count.
    """
    if is_same_kind():
        assert found == said
        return
    assert _words(found) == _words(said)
    for one, other in zip(_numbers(found), _numbers(said), strict=True):
        assert abs(one - other) <= _NEAR * max(abs(one), abs(other)) + 1, (one, other)


def _words(text: str) -> list[str]:
    return _NUMBER.sub("", text.replace("#", "")).split()


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "").rstrip(".") or 0) for number in _NUMBER.findall(text)]


def _make(name: str, folder: Path) -> None:
    """Write what an example prints beside it; of a notebook, also its first picture."""
    if name in PROGRAMS:
        (EXAMPLES / f"{name}.txt").write_text(printed(name, folder), encoding="utf-8")
        return
    notebook = executed(name, folder)
    nbformat.write(notebook, EXAMPLES / f"{name}.ipynb")  # type: ignore[no-untyped-call]
    data = [one.get("data", {}) for cell in notebook.cells for one in cell.get("outputs", ())]
    pictures = [one[_PICTURE] for one in data if _PICTURE in one]
    (EXAMPLES / f"{name}.png").write_bytes(base64.b64decode(pictures[0]))


def main(names: list[str]) -> None:
    """Make these examples, or all."""
    for name in names or [*PROGRAMS, *NOTEBOOKS]:
        with tempfile.TemporaryDirectory() as folder:
            _make(name, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
