"""The tests themselves: on a bare machine, as a background job, with programs that do not end by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.programs import MARK, left_behind, started

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

CHILD = """
import signal, subprocess, sys

def test_a_child_can_be_interrupted():
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\\n"
"""
LEAVES = """
import subprocess, sys

def test_that_forgets_a_program():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""
NEEDS = """
from tests.programs import chromium

def test_a_page():
    chromium()
"""


def pytest_of(
    folder: Path, text: str, environment: Mapping[str, str] | None = None, *, deaf: bool = False
) -> subprocess.CompletedProcess[str]:
    """What pytest says of a file of tests under this project's own conftest, SIGINT being ignored or not."""
    (folder / "test_of_a_test.py").write_text(text)
    arguments = ["-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", str(folder), "-q", str(folder)]
    code = "import os, signal, sys; signal.signal(signal.SIGINT, signal.{}); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", code.format("SIG_IGN" if deaf else "SIG_DFL")]
    return subprocess.run(
        [*command, sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def test_children_of_tests_can_be_interrupted_although_the_tests_cannot(tmp_path: Path) -> None:
    done = pytest_of(tmp_path, CHILD, deaf=True)
    assert done.returncode == 0, done.stdout


def test_a_program_that_a_test_leaves_behind_is_ended_and_reported(tmp_path: Path) -> None:
    done = pytest_of(tmp_path, LEAVES)
    assert done.returncode == 1
    assert "tests left processes behind, which were killed" in done.stdout
    assert not any("time.sleep(600)" in line for line in left_behind(os.environ[MARK]).values())


def test_a_program_ends_with_its_block_whatever_happens() -> None:
    with (
        pytest.raises(KeyError),
        started([sys.executable, "-c", "import signal; signal.pause()"]) as process,
    ):
        raise KeyError
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("ci", "code", "said"), [("true", 1, "1 failed"), ("", 0, "1 skipped")])
def test_in_ci_a_missing_program_is_a_failure(tmp_path: Path, ci: str, code: int, said: str) -> None:
    done = pytest_of(tmp_path, NEEDS, {"PATH": str(tmp_path), "CI": ci})
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    assert "`make test` installs it on Debian as root" in done.stdout or not ci


def test_missing_programs_are_installed_where_that_is_possible_and_named_elsewhere(tmp_path: Path) -> None:
    """The real script, in a world in which chromium is missing and apt-get only writes down what it was asked."""
    for name in ("ls", "echo"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    _script(tmp_path / "id", "echo 0")
    _script(tmp_path / "apt-get", f'echo "$@" >> {tmp_path}/asked')
    root = _installed(tmp_path)
    assert (tmp_path / "asked").read_text().splitlines()[0] == "update -qq"
    assert "chromium" in (tmp_path / "asked").read_text().splitlines()[1]
    assert (root.returncode, root.stderr) == (0, "")
    _script(tmp_path / "id", "echo 1000")
    person = _installed(tmp_path)
    assert person.returncode == 0
    assert "as root: apt-get install chromium" in person.stderr


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _installed(folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(ROOT / "tests" / "programs.sh")]
    return subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True, check=False)
