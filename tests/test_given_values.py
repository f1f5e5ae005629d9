"""Speeds, sizes, links and traces that are given as lists, arrays and frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from safa import Settings, load_run, replay, simulate
from safa.cli import main
from safa.cli.deploy.resume import _compare
from safa.errors import SafaError
from safa.fleet import check_sizes, make_fleet
from safa.report import write_report
from safa.runs.values import Given, shown

SPEEDS = [1.5, 2.0, 0.3]
LINKS = [(10.0, 1.0), (20.0, 2.0), (30.0, 3.0)]
TRACE = [(1, 50, 60), (0, 0, 10), (1, 0, 5)]
DEVICES = pd.DataFrame(LINKS, columns=["down_mbps", "up_mbps"]).assign(speeds=SPEEDS, sizes=[5, 6, 7], name=list("abc"))


def settings(**given: Any) -> Settings:
    return Settings.of("boston", **{"clients": 3, "train": False} | given)


@pytest.mark.parametrize(
    "speeds",
    [
        SPEEDS,
        tuple(SPEEDS),
        np.array(SPEEDS),
        pd.Series(SPEEDS, index=[7, 8, 9]),
        torch.tensor(SPEEDS, dtype=torch.float64),
        DEVICES,
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_of_all_clients_may_be_of_any_kind(speeds: Any) -> None:
    given = settings(speeds=speeds)
    assert given == settings(speeds=SPEEDS)
    assert given.speeds == (1.5, 2.0, 0.3)
    assert make_fleet(given).speeds.tolist() == SPEEDS


def test_one_frame_may_hold_everything() -> None:
    given = settings(speeds=DEVICES, sizes=DEVICES, links=DEVICES)
    assert given == settings(speeds=SPEEDS, sizes=[5, 6, 7], links=LINKS)
    assert given.links == tuple(LINKS)
    assert make_fleet(given).sizes.tolist() == [5, 6, 7]
    assert make_fleet(given).down_s.tolist() == [8.0, 4.0, pytest.approx(8 / 3)]


def test_a_trace_may_be_a_frame(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    frame = pd.DataFrame(TRACE, columns=["client", "online_from_s", "online_until_s"])
    frame.to_csv(file, index=False)
    given: list[Given] = [frame[frame.columns[::-1]], TRACE, np.array(TRACE), file]
    ways = [settings(trace=trace) for trace in given]
    ends = [
        make_fleet(way).faults.crash_times(
            np.arange(3), np.full(3, 2.0), np.full(3, 99.0), round_number=1, ordinal=np.zeros(3, dtype=np.int64)
        )
        for way in ways
    ]
    assert ways[0].trace == tuple(map(tuple, TRACE))
    assert ways[0] == ways[1] == ways[2]
    for end in ends[1:]:
        assert end.tolist() == ends[0].tolist()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"speeds": [1, 2]}, "speeds are given for 2 clients, but there are 3"),
        ({"speeds": []}, "speeds are given for 0 clients, but there are 3"),
        ({"speeds": np.array([])}, "speeds are given for 0 clients, but there are 3"),
        ({"speeds": [1, 2, 0]}, "speeds, element 2: speeds must be above 0, not 0"),
        ({"sizes": [1, -2, 3]}, "sizes, element 1: sizes must be above 0, not -2"),
        ({"speeds": [1, np.nan, 3]}, "speeds, element 1: speeds must be a number, not 'nan'"),
        ({"speeds": [1, 2, np.inf]}, "speeds, element 2: speeds must be a number, not 'inf'"),
        ({"speeds": [1, "2", 3]}, "speeds, element 1: speeds must be a number, not '2'"),
        ({"speeds": [1, None, 3]}, "speeds, element 1: speeds must be a number, not None"),
        ({"speeds": pd.Series([1, 2, None], dtype="Int64")}, "speeds, element 2: speeds must be a number, not 'nan'"),
        ({"speeds": [True, 2.5, None]}, "speeds, element 0: speeds must be a number, not True"),
        ({"speeds": [1, [2], 3]}, "speeds must be the name of a file, or a number for each client, not"),
        ({"speeds": [[1], [2], [3]]}, "speeds must be the name of a file, or a number for each client, not"),
        ({"speeds": {"a": 1}}, "speeds must be the name of a file, or a number for each client, not {'a': 1}"),
        ({"speeds": [10**400, 1, 1]}, "speeds must be the name of a file, or a number for each client, not"),
        ({"speeds": DEVICES[["name"]]}, "speeds need a column speeds; the frame has name"),
        ({"links": DEVICES[["down_mbps", "name"]]}, "links need a column up_mbps; the frame has down_mbps, name"),
        ({"links": DEVICES.rename(columns={"down_mbps": "x", "name": "down_mbps"})}, "element 0: down_mbps must be"),
        ({"links": [1, 2, 3]}, "links must be the name of a file, or rows of down_mbps,up_mbps, not"),
        ({"links": [(1, 2, 3)]}, "links must be the name of a file, or rows of down_mbps,up_mbps, not"),
        ({"links": LINKS[:2]}, "links are given for 2 clients, but there are 3"),
        ({"links": [(1, 2), (1, 0), (1, 1)]}, "links, element 1: up_mbps must be above 0, not 0"),
        ({"trace": [(3, 0, 1)]}, "trace, element 0: client must be a number from 0 to 2, not '3'"),
        ({"trace": [(0.5, 0, 1)]}, "trace, element 0: client must be a number from 0 to 2, not '0.5'"),
        ({"trace": [(0, 0, 1), (0, 5, 5)]}, "trace, element 1: a time online must start at 0 s or later"),
        ({"trace": [(0, 9, 12), (1, 0, 9), (0, 0, 10)]}, "trace, element 0: this client is online already"),
        ({"trace": []}, "trace names no time at which a client is online: nobody would ever train"),
        ({"speeds": SPEEDS, "speed_mean": 2.0}, "speed_mean has no effect where speeds are given; leave out one"),
    ],
    ids=str,
)
def test_wrong_values_say_where(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SafaError, match=complaint):
        make_fleet(settings(**given))


def test_a_config_file_holds_them(tmp_path: Path) -> None:
    odd = [1e-7, 0.1 + 0.2, float(np.float32(1 / 3))]
    given = settings(speeds=odd, sizes=[5, 6, 7], links=LINKS, trace=TRACE)
    (tmp_path / "config.toml").write_text(given.to_toml())
    values = Settings.read_toml(tmp_path / "config.toml")
    assert values["trace"] == [list(map(float, row)) for row in TRACE]
    assert Settings.of(values.pop("task"), base=values) == given


@pytest.mark.slow
def test_a_run_with_them_is_resumed_replayed_and_shown(tmp_path: Path) -> None:
    world: dict[str, Any] = {"speeds": SPEEDS, "sizes": [90, 100, 110], "links": np.array(LINKS)}
    run = simulate("boston", out=tmp_path / "run", clients=3, rounds=4, checkpoint_every=2, **world)
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been stopped
    assert main(["run", "--resume", str(tmp_path / "run"), "--quiet"]) == 0
    again = load_run(tmp_path / "run")
    assert again.settings == run.settings
    for model in (again.model(), replay(again)):
        assert all((model[name] == tensor).all() for name, tensor in run.model().items())
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert page.count(">3 values<") == 3


def test_a_deployment_is_resumed_with_the_same_numbers_only() -> None:
    held = settings(speeds=SPEEDS).values()
    _compare({"speeds": SPEEDS}, held, Path("run"))
    with pytest.raises(SafaError, match="speeds is 3 values in run, and 2 values is given; "):
        _compare({"speeds": SPEEDS[:2]}, held, Path("run"))


def test_tables_show_how_many_there_are() -> None:
    assert shown((1.0, 2.0)) == "2 values"
    assert shown("speeds.txt") == "speeds.txt"
    assert shown(None) is None


def test_sizes_that_are_given_may_not_exceed_the_data() -> None:
    given = settings(sizes=[300, 300, 300], train=True)
    with pytest.raises(SafaError, match="the sizes add up to 900 samples, but boston has 506; train on fewer"):
        check_sizes(given, make_fleet(given), 506)
