"""Runs come to the frozen results (`tests/golden`): the same bytes of rounds, and the same models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import safa
from tests.golden.cases import CASES, RESUMED, needs_file, simulate
from tests.golden.frozen import check

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", [name for name in CASES if not needs_file(name)])
def test_a_run_comes_to_the_frozen_result(name: str, tmp_path: Path) -> None:
    check(name, simulate(name, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if needs_file(name)])
@pytest.mark.usefixtures("real_files")
def test_a_run_on_downloaded_data_comes_to_the_frozen_result(name: str, tmp_path: Path) -> None:
    check(name, simulate(name, tmp_path / "run"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs that were killed in the middle."""
    folder = tmp_path_factory.mktemp("stopped")
    subprocess.run([sys.executable, "-m", "tests.golden.stop", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_was_killed_and_resumed_comes_to_the_frozen_result(name: str, stopped: Path) -> None:
    there = safa.load_run(stopped / name)
    assert there.summary is None
    assert sum(1 for _ in there.records()) == 6
    assert len(list((stopped / name / "checkpoint").glob("state-*.safetensors"))) == 2
    check(name, safa.resume(stopped / name))
