"""Wall clocks that are wrong, or set in mid-run: real processes under libfaketime."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from safa.deploy.flower.clock import Steps, _Either
from safa.deploy.flower.ports import free_port
from safa.deploy.launcher.keys import make_keys
from safa.deploy.launcher.processes import Processes
from tests.deploy.real import records, running, wait_for
from tests.programs import libfaketime

_SLEEP = """# Where libfaketime 0.9.10 leaves the monotonic clock alone, clock_nanosleep fails, which is Python's sleep.
import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""


class FakeClock:
    """A wall clock that can be set, for processes that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._file = folder / "clock"
        self.set(0)
        (folder / "sitecustomize.py").write_text(_SLEEP)
        self.environment = {
            "LD_PRELOAD": libfaketime(),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # else waiting threads spin
            "FAKETIME_CACHE_DURATION": "1",
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }

    def set(self, ahead_s: int) -> None:
        """Set it so many seconds ahead of the true time."""
        part = self._file.with_suffix(".part")
        part.write_text(f"{ahead_s:+d}\n")
        part.replace(self._file)


@pytest.mark.slow
def test_a_run_continues_while_clocks_are_wrong(tmp_path: Path) -> None:
    """The server's is set forward and back in mid-run; that of a third device is two hours ahead all the time."""
    run, log, port = tmp_path / "run", tmp_path / "log", str(free_port())
    make_keys(tmp_path / "keys", hosts=[], clients=["c0", "c1", "c2"])
    servers, ahead = FakeClock(tmp_path / "server-clock"), FakeClock(tmp_path / "device-clock")
    ahead.set(7200)
    given = ("--clients", "3", "--rounds", "5", "--fraction", "1", "--epochs", "1", "--start-with", "2")
    where = ("--host", "127.0.0.1", "--port", port, "--keys", str(tmp_path / "keys"), "--out", str(run))
    with running() as processes:
        server = _safa(processes, log, servers, "server", "boston", *given, *where)
        for part in range(3):
            _client(processes, tmp_path, part, port, ahead if part == 2 else None)
        for seen, ahead_s in ((1, 900), (2, 0), (3, -900)):
            wait_for(lambda: len(records(run)) >= seen, server, log=log)  # noqa: B023
            servers.set(ahead_s)
        wait_for(lambda: server.poll() is not None, log=log)
        wait_for(lambda: "ahead of the server's" in (tmp_path / "c2.log").read_text(), log=tmp_path / "c2.log")
    assert server.returncode == 0, log.read_text()
    rounds = records(run)
    assert [record.round for record in rounds] == list(range(1, 6))
    assert all(len(record.picked) == 2 for record in rounds), "nobody was lost or refused"
    took = np.diff([0.0, *(record.closed_s for record in rounds)])
    assert max(took) < 120, f"no round waited for a clock: {took}"
    said = (tmp_path / "log").read_text()
    assert re.search(r"the clock of this machine was set forward by (899|900|901) s; the run is not affected", said)
    assert re.search(r"the clock of this machine was set back by (899|900|901) s; the run is not affected", said)
    told = (tmp_path / "c2.log").read_text()
    assert re.search(r"c2's clock is 7[12]\d\d s ahead of the server's; .*: use NTP", told)
    assert "the server does not accept its signature: is its clock right" in told
    assert "clock" not in (tmp_path / "c0.log").read_text()


def _safa(processes: Processes, log: Path, clock: FakeClock | None, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "safa", "deploy", *arguments]
    return processes.start(command, log=log, environment=clock.environment if clock else None)


def _client(processes: Processes, folder: Path, part: int, port: str, clock: FakeClock | None) -> None:
    name = f"c{part}"
    where = ("--server", f"127.0.0.1:{port}", "--keys", str(folder / "keys"), "--state", str(folder / name))
    _safa(processes, folder / f"{name}.log", clock, "client", *where, "--name", name, "--partition", str(part))


# -- without processes -----------------------------------------------------------------------------------------------


def test_a_wall_clock_that_is_set_is_reported_once() -> None:
    wall, running = [1000.0], [50.0]
    steps = Steps(lambda: wall[0], lambda: running[0])
    assert steps.look() == ""
    for step, said in ((900, "set forward by 900 s"), (-1800, "set back by 1800 s"), (3, "")):
        wall[0] += 7 + step
        running[0] += 7
        assert said in steps.look()
        assert steps.look() == ""


def test_a_signature_is_judged_by_the_clock_that_suits_it() -> None:
    now = datetime(2026, 11, 15, tzinfo=UTC)
    wrong = now + timedelta(minutes=15)
    for age_s in (-3, 0, 200, 304, 900, -600):
        signed_at = now - timedelta(seconds=age_s)
        assert (_Either(lambda: now, lambda: now) - signed_at).total_seconds() == age_s
        if -5 < age_s < 305:  # it would be taken, had the clock not been set
            assert (_Either(lambda: now, lambda: wrong) - signed_at).total_seconds() == age_s
            assert (_Either(lambda: wrong, lambda: now) - signed_at).total_seconds() == age_s
