"""Wall clocks that are wrong, or set in mid-run: real processes under libfaketime."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from safa.deploy.keys import make_keys
from safa.deploy.processes import Processes, free_port
from tests.deploy.real import records, safa, stage, wait_for

_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/opt/homebrew/lib")
_SLEEP = """# Where libfaketime 0.9.10 leaves the monotonic clock alone, clock_nanosleep fails, which is Python's sleep.
import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""


def _libfaketime() -> Path:
    found = [path for folder in _FOLDERS for path in Path(folder).glob("**/libfaketimeMT.so.1")]
    assert found, "libfaketime is missing: apt-get install libfaketime"
    return found[0]


class FakeClock:
    """A wall clock that can be set, for processes that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self.set(0)
        (folder / "sitecustomize.py").write_text(_SLEEP)
        self.environment = {
            "LD_PRELOAD": str(_libfaketime()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }

    def set(self, ahead_s: int) -> None:
        """Set it so many seconds ahead of the true time."""
        part = self._file.with_suffix(".part")
        part.write_text(f"{ahead_s:+d}\n")
        part.replace(self._file)


@pytest.mark.slow
def test_a_run_goes_on_while_the_servers_clock_is_set_back_and_forth(tmp_path: Path) -> None:
    run, log, port = tmp_path / "run", tmp_path / "log", str(free_port())
    make_keys(tmp_path / "keys", hosts=[], clients=["c0", "c1"])
    clock = FakeClock(tmp_path)
    given = ("--clients", "2", "--rounds", "8", "--fraction", "1", "--epochs", "1", "--start-with", "2")
    where = ("--host", "127.0.0.1", "--port", port, "--keys", str(tmp_path / "keys"), "--out", str(run))
    command = [sys.executable, "-m", "safa", "deploy", "server", "boston", *given, *where]
    with stage() as processes:
        server = processes.start(command, log=log, environment=clock.environment)
        for part in range(2):
            _client(processes, tmp_path, part, port)
        for seen, ahead_s in ((2, 900), (4, 0), (6, -900)):
            wait_for(lambda: len(records(run)) >= seen, server, log=log)  # noqa: B023
            clock.set(ahead_s)
        wait_for(lambda: server.poll() is not None, log=log)
    assert server.returncode == 0, log.read_text()
    rounds = records(run)
    assert [record.round for record in rounds] == list(range(1, 9))
    assert all(len(record.picked) == 2 for record in rounds), "nobody was lost or refused"
    assert rounds[-1].closed_s < 150


def _client(processes: Processes, folder: Path, part: int, port: str) -> None:
    name = f"c{part}"
    where = ("--server", f"127.0.0.1:{port}", "--keys", str(folder / "keys"), "--state", str(folder / name))
    safa(processes, folder / f"{name}.log", "deploy", "client", *where, "--name", name, "--partition", str(part))
