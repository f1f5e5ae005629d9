"""Freeze the results of the present code: the files that tests hold later code against.

Run it only where results are meant to change; `git diff --stat` then says which did.

    python -m tests.golden.make [CASE ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.golden.cases import CASES, simulate
from tests.golden.deployed import DEPLOYED, deploy
from tests.golden.frozen import write, write_kind


def make(name: str, folder: Path) -> None:
    """Run a case in a new folder and freeze what comes out."""
    write(name, deploy(name, folder) if name in DEPLOYED else simulate(name, folder))


def main(names: list[str]) -> None:
    """Freeze these cases, or all."""
    write_kind()
    for name in names or [*CASES, *DEPLOYED]:
        with tempfile.TemporaryDirectory() as folder:
            make(name, Path(folder, name))


if __name__ == "__main__":
    main(sys.argv[1:])
