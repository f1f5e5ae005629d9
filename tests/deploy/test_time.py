"""The server lives by a clock of its own: steps of the wall clock change nothing, and restarts do not turn it back."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from safa.deploy.exchange.coordinator import Coordinator
from safa.deploy.flower import server_app
from safa.runs.folder import STATUS
from tests.deploy.harness import Harness, apart, fed_again, prepare


class _Over(Exception):  # noqa: N818
    """Enough was seen."""


class _EmptyGrid:
    """A grid on which nobody is."""

    _retry_invoker = SimpleNamespace(should_giveup=None, on_backoff=None, on_success=None)

    def get_node_ids(self) -> list[int]:
        return []


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock steps by a quarter of an hour, back and forth, whenever anybody looks at it."""
    real, looks = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + (900.0 if next(looks) % 2 else -900.0))


@pytest.mark.usefixtures("stepping")
def test_the_server_app_passes_a_clock_that_does_not_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path / "run", {}, {"poll_s": 0.001})
    coordinator = Coordinator(tmp_path / "run", now=time.monotonic())
    heard: list[float] = []
    on_nodes = coordinator.on_nodes

    def noted(nodes: Any, *, now: float) -> None:
        heard.append(now)
        if len(heard) == 20:
            raise _Over
        on_nodes(nodes, now=now)

    monkeypatch.setattr(coordinator, "on_nodes", noted)
    began = time.monotonic()
    with pytest.raises(_Over):
        server_app.coordinate(coordinator, cast(Any, _EmptyGrid()))
    assert len(heard) == 20
    assert all(began <= one <= other <= time.monotonic() for one, other in pairwise(heard))
    assert json.loads((tmp_path / "run" / STATUS).read_text())["clients"] == []  # for those who watch


def test_steps_of_the_wall_clock_change_no_round(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    steady = Harness(tmp_path / "steady", {"rounds": 5}).run()
    request.getfixturevalue("stepping")
    stepped = Harness(tmp_path / "stepped", {"rounds": 5}).run()
    one, other = ([record.to_json() for record in run.records()] for run in (steady, stepped))
    assert one == other


def test_a_clock_that_goes_back_or_stands_still_does_no_harm(tmp_path: Path) -> None:
    """Whatever clock is passed: it never goes back inside."""
    harness = Harness(tmp_path, {"rounds": 5})
    harness.run(until=harness.in_round(2))
    harness.now -= 900.0
    for _ in range(10):
        harness.step()
    harness.now += 900.0
    run = harness.run()
    assert apart(fed_again(run), run.model()) <= 1e-6


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_restart_continues_in_time_whatever_its_clock_says(tmp_path: Path, jump: float) -> None:
    """The clock of another process, or of the machine after a boot, has nothing to do with that of the last one."""
    harness = Harness(tmp_path, {"rounds": 6}, {"leave_after_s": 100.0})
    harness.run(until=harness.in_round(3))
    harness.now += jump
    harness.kill_server()
    harness.run(until=harness.in_round(5))
    harness.now -= jump / 2
    harness.kill_server()
    assert len(harness.coordinator.membership.roster.present) == 4, "known clients count as just seen"
    run = harness.run()
    records = list(run.records())
    times = [at_s for record in records for at_s in (record.opened_s, *record.arrival_s, record.closed_s)]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] < 300
    assert not any(len(record.left) for record in records)
    assert apart(fed_again(run), run.model()) <= 1e-6
