"""FedScale's files: what they say, and what a hostile one cannot do."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safa.cli import main
from safa.errors import SafaError
from safa.fleet import Faults, make_fleet
from safa.fleet.fedscale import device_links, device_speeds, is_pickle, read_plain_pickle, times_online
from safa.runs.settings import Settings
from safa.simulation import run_rounds

DEVICES = {key: {"computation": 10.0 * key, "communication": 1000.0 * key} for key in (7, 3, 12, 5)}
AVAILABLE = {
    1: {"duration": 30, "active": [0, 50], "inactive": [10, 70], "finish_time": 100, "model": "A"},
    2: {"duration": 20, "active": [80, 0], "inactive": [100, 5], "finish_time": 100, "model": "A"},
    3: {"duration": 200, "active": [0], "inactive": [200], "finish_time": 200, "model": "B"},
    4: {"duration": 0, "active": [], "inactive": [], "finish_time": 100, "model": "B"},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "devices"


def write(file: Path, content: Any, protocol: int = 4) -> Path:
    file.write_bytes(pickle.dumps(content, protocol=protocol))
    return file


# -- what they say ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(6))
def test_devices_become_speeds_and_links_of_the_same_devices(file: Path, protocol: int) -> None:
    write(file, DEVICES, protocol)
    speeds = device_speeds(file, count=4, seed=1, batch_size=20)
    mbps = device_links(file, count=4, seed=1)
    assert sorted(mbps) == [3.0, 5.0, 7.0, 12.0]
    assert speeds.tolist() == [1000 / (10 * one * 20) for one in mbps]  # device 3: 30 ms a sample and 3,000 kbit/s


def test_a_client_keeps_its_device_when_the_fleet_grows(file: Path) -> None:
    write(file, DEVICES)
    few, all_of_them, many = (device_links(file, count=count, seed=1).tolist() for count in (2, 4, 1000))
    assert few == many[:2]
    assert sorted(all_of_them) == sorted(many[:4]) == [3.0, 5.0, 7.0, 12.0]
    assert np.unique(many[4:], return_counts=True)[1] == pytest.approx([249] * 4, abs=50)
    assert device_links(file, count=1000, seed=2).tolist() != many


def test_ids_may_be_texts(file: Path) -> None:
    write(file, {str(key): device for key, device in DEVICES.items()})
    assert sorted(device_links(file, count=4, seed=0)) == [3.0, 5.0, 7.0, 12.0]


def test_times_online_repeat(file: Path) -> None:
    rows, period_s = times_online(write(file, AVAILABLE), count=4, seed=0)
    found = {tuple(map(tuple, rows[rows[:, 0] == client, 1:])): period_s[client] for client in range(4)}
    assert found == {
        ((0, 10), (50, 70)): 100,
        ((0, 5), (80, 100)): 100,
        ((0, 200),): 200,
        (): 100,
    }


def test_a_run_takes_all_three_files(tmp_path: Path) -> None:
    devices, available = write(tmp_path / "devices.pkl", DEVICES), write(tmp_path / "available", AVAILABLE, protocol=0)
    setting = Settings.of(
        "boston", clients=4, rounds=3, speeds=devices, links=devices, trace=available, train=False, model_size_mb=0.1
    )
    fleet = make_fleet(setting)
    assert fleet.speeds.tolist() == device_speeds(devices, count=4, seed=0, batch_size=5).tolist()
    assert fleet.up_s.tolist() == fleet.down_s.tolist() == (0.8 / device_links(devices, count=4, seed=0)).tolist()
    assert fleet.faults.availability is not None
    assert len(list(run_rounds(setting))) == 3


def test_a_file_is_known_by_its_first_bytes(file: Path) -> None:
    assert all(is_pickle(str(write(file, DEVICES, protocol))) for protocol in range(6))
    file.write_text("1.5\n")
    assert not is_pickle(str(file))
    assert not is_pickle("nowhere")
    assert not is_pickle((1.0, 2.0))


def test_a_file_that_changes_is_read_again(file: Path) -> None:
    write(file, DEVICES)
    before = device_links(file, count=4, seed=0)
    write(file, {1: {"computation": 1, "communication": 9000}})
    assert set(before) != set(device_links(file, count=4, seed=0)) == {9.0}


def test_what_lies_behind_the_period_is_never_reached(file: Path) -> None:
    entry = {"active": [0, 90, 120], "inactive": [0, 130, 140], "finish_time": 100}
    rows, _ = times_online(write(file, {1: entry}), count=1, seed=0)
    assert rows.tolist() == [[0, 90, 100]]  # from 0 to 0 is no time, from 120 on neither


# -- periods, once more and slowly -----------------------------------------------------------------------------------


Repeating = tuple[list[tuple[int, int]], int]
"""A client's times online, and its period."""


def slow_offline_s(times: list[tuple[int, int]], period_s: int, at_s: int) -> float:
    """When a client is offline next, looking at one second after the other."""
    for second in range(at_s, at_s + 3 * period_s):
        if not any(start <= second % period_s < end for start, end in times):
            return float(second)
    return np.inf


@st.composite
def clients(draw: st.DrawFn) -> Repeating:
    period_s = draw(st.integers(1, 30))
    marks = sorted(draw(st.sets(st.integers(0, period_s), max_size=8)))
    times = list(zip(marks[::2], marks[1::2], strict=False))
    return times, period_s


@settings(max_examples=100, deadline=None)
@given(st.lists(clients(), min_size=1, max_size=4), st.integers(0, 200))
def test_periodic_traces_are_as_the_slow_version_says(fleet: list[Repeating], at_s: int) -> None:
    trace = np.array([(k, *time) for k, (times, _) in enumerate(fleet) for time in times], dtype=float).reshape(-1, 3)
    faults = Faults(
        len(fleet), seed=0, crash_rate=0.0, trace=trace, period_s=np.array([period for _, period in fleet], dtype=float)
    )
    cut_s = faults.crash_times(
        np.arange(len(fleet)),
        np.full(len(fleet), float(at_s)),
        np.full(len(fleet), 1e9),
        round_number=1,
        ordinal=np.zeros(len(fleet), dtype=np.int64),
    )
    assert cut_s.tolist() == [slow_offline_s(times, period_s, at_s) for times, period_s in fleet]


@pytest.mark.parametrize("protocol", ["safa", "fedavg", "fedbuff"])
def test_a_run_on_a_periodic_trace_is_one_on_the_trace_written_out(file: Path, protocol: str) -> None:
    write(file, {k: {"active": [40 * k, 400], "inactive": [300, 490], "finish_time": 500 + k} for k in range(1, 6)})
    rows, period_s = times_online(file, count=5, seed=0)
    written_out = [
        (client, start + lap * period_s[int(client)], end + lap * period_s[int(client)])
        for lap in range(200)
        for client, start, end in rows
    ]
    periodic, plain = (
        Settings.of("boston", protocol=protocol, rounds=30, trace=trace, train=False, crash_rate=0.0, model_size_mb=2.0)
        for trace in (file, written_out)
    )
    records = list(run_rounds(periodic))
    assert [record.to_json() for record in records] == [record.to_json() for record in run_rounds(plain)]
    assert 500 < records[-1].closed_s < 200 * 500
    assert any(len(record.crashed) for record in records)


# -- what they cannot do ---------------------------------------------------------------------------------------------


class Hostile:
    """Runs a command when it is read as pickles usually are."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


class Own:
    """Does nothing, but is a class."""


@pytest.mark.parametrize("protocol", range(6))
def test_no_command_is_run(file: Path, tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "made"
    write(file, {1: Hostile(target)}, protocol)
    with pytest.raises(SafaError, match=r"asks for '(posix|nt)\.system', which may run code; it may hold nothing but"):
        read_plain_pickle(file)
    assert not target.exists()
    pickle.loads(file.read_bytes())
    assert target.exists()  # so the file was hostile indeed


ENTRY: dict[str, Any] = {"duration": 1, "active": [0], "inactive": [1], "finish_time": 9}
NESTED = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (pickle.dumps({1: Own()}, 2), "asks for '.*Own', which may run code"),
        (pickle.dumps({1: Own()}, 0), "asks for 'copy_reg._reconstructor', which may run code"),
        (pickle.dumps({1: {"computation": np.float64(3)}}), r"asks for 'numpy\..*scalar', which may run code"),
        (pickle.dumps({1: np.ones(3)}), "asks for 'numpy"),
        (pickle.dumps({1: b"bytes"}, 4), "contains the pickle instruction SHORT_BINBYTES; it may hold nothing but"),
        (pickle.dumps({1: (1, 2)}, 4), "contains the pickle instruction TUPLE2"),
        (pickle.dumps({1: {2}}, 4), "contains the pickle instruction EMPTY_SET"),
        (b"\x80\x04\x82\x01.", "contains the pickle instruction EXT1"),
        (b"\x80\x04K\x01Q.", "contains the pickle instruction BINPERSID"),
        (b"(dpX\n.", "is not a whole pickle: it is cut off or damaged"),
        (b"\x80\x04(ios\nsystem\n.", "asks for 'os.system'"),
        (b"\x80\x04K\x01)R.", r"contains the pickle instruction EMPTY_TUPLE"),
        (b"\x80\x04}K\x01b.", "contains the pickle instruction BUILD"),
        (b"\x80\x04K\x01" + b"2" * 10 + b".", "contains the pickle instruction DUP"),
        (pickle.dumps(DEVICES)[:-1], "is not a whole pickle: it is cut off or damaged"),
        (pickle.dumps(DEVICES)[:40], "is not a whole pickle: it is cut off or damaged"),
        (b"\x80", "is not a whole pickle: it is cut off or damaged"),
        (b"\x80\x63}.", "is not a whole pickle: it is cut off or damaged"),
        (b"\x80\x04X\xff\xff\xff\x7fabc.", "is not a whole pickle: it is cut off or damaged"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"abc.", "is not a whole pickle: it is cut off or damaged"),
        (b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"}.", "is not a whole pickle: it is cut off or damaged"),
        (b"\x80\x04}r\xff\xff\xff\xff.", "is not a whole pickle: it is cut off or damaged"),  # a place in memory
        (b"\x80\x04}p4000000000\n.", "is not a whole pickle: it is cut off or damaged"),
        (b"\x80\x04}h\x07.", "is not a whole pickle: it is cut off or damaged"),
        (b"\x80\x04}]K\x01s.", "is not a whole pickle: it is cut off or damaged"),  # a list is no key
        (b"\x80\x04K\x01K\x02a.", "is not a whole pickle: it is cut off or damaged"),  # a number is no list
        (b"\x80\x04a.", "is not a whole pickle: it is cut off or damaged"),
        (b"\x80\x04L" + b"9" * 5000 + b"L\n.", "is not a whole pickle: it is cut off or damaged"),
        (b"\x80\x04\x8a\x20" + b"\x7f" * 32 + b".", "holds a number of more than 64 bits"),
        (NESTED, "must hold a dictionary of devices by id"),
        (b"\x80\x04}" + b"K\x01}" * 100_000 + b"s" * 100_000 + b".", "device 1: has no computation"),
        (pickle.dumps([1]), "must hold a dictionary of devices by id"),
        (pickle.dumps({}), "must hold a dictionary of devices by id"),
        (pickle.dumps({1: {}, "a": {}}), "the ids of devices must be whole numbers or texts, all alike"),
        (pickle.dumps({1.5: {}}), "the ids of devices must be whole numbers or texts, all alike"),
        (pickle.dumps({True: {}}), "the ids of devices must be whole numbers or texts, all alike"),
        (pickle.dumps({1: 3}), "device 1: must be a dictionary, not a number"),
        (pickle.dumps({"\x1b[2J": [3]}), r"device '\\x1b\[2J': must be a dictionary, not a list"),
        (pickle.dumps({1: {"computation": 3.0}}), "device 1: has no communication"),
        (pickle.dumps({1: {"computation": "3"}}), "device 1: computation must be a number, not text"),
        (pickle.dumps({1: {"computation": True}}), "device 1: computation must be a number, not true or false"),
        (pickle.dumps({1: {"computation": float("nan")}}), "device 1: computation must be a number below 2"),
        (pickle.dumps({1: {"computation": 2**60}}), "device 1: computation must be a number below 2"),
        (
            pickle.dumps({1: {"computation": -3.0, "communication": 1}}),
            "device 1: computation and communication must be above 0, not -3 and 1",
        ),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_wrong_file_of_devices_is_one_sentence(file: Path, content: bytes, complaint: str) -> None:
    file.write_bytes(content)
    with pytest.raises(SafaError, match=complaint) as error:
        device_speeds(file, count=3, seed=0, batch_size=1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"active": [0, 5]}, "active and inactive must be equally long, not 2 and 1"),
        ({"active": [-1]}, "a time online must start at 0 s or later and end after it starts"),
        ({"active": [3]}, "a time online must start at 0 s or later and end after it starts"),
        ({"active": 3}, "active must be a list, not a number"),
        ({"inactive": None}, "inactive must be a list, not nothing"),
        ({"active": [[0]]}, "active must be a number, not a list"),
        ({"finish_time": 0}, "finish_time must be above 0, not 0"),
        ({"finish_time": {}}, "finish_time must be a number, not a dictionary"),
        ({"active": [0, 1], "inactive": [2, 3]}, "this client is online already at one of these times"),
        ({"active": [], "inactive": []}, "names no time at which a client is online: nobody would ever train"),
    ],
    ids=str,
)
def test_a_wrong_file_of_availability_is_one_sentence(file: Path, changed: dict[str, Any], complaint: str) -> None:
    write(file, {1: ENTRY | changed})
    with pytest.raises(SafaError, match=complaint):
        times_online(file, count=2, seed=0)


def test_one_long_list_shared_by_all_devices_does_not_fill_the_memory(file: Path) -> None:
    long = list(range(0, 200_000, 2))
    entry = {"active": long, "inactive": [second + 1 for second in long], "finish_time": 10**6}
    write(file, dict.fromkeys(range(10_000), entry))
    with pytest.raises(SafaError, match="names more than 20,000,000 times online"):
        times_online(file, count=2, seed=0)


def test_a_file_may_be_only_so_large(file: Path) -> None:
    with file.open("wb") as large:
        large.write(b"\x80\x04")
        large.truncate(2**27 + 1)  # which takes no space on the disk
    with pytest.raises(SafaError, match="is larger than 128 MiB"):
        read_plain_pickle(file)
    with pytest.raises(SafaError, match=r"cannot read .*: No such file"):
        read_plain_pickle(file.parent / "nowhere")
    with pytest.raises(SafaError, match=r"cannot read .*: No such file"):
        device_links(file.parent / "nowhere", count=1, seed=0)


@pytest.mark.parametrize("option", ["--speeds", "--links", "--trace"])
def test_the_command_says_it_and_ends_with_2(
    file: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, {1: Hostile(tmp_path / "made")})
    assert main(["run", "boston", "--no-train", "--out", str(tmp_path / "run"), option, str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "which may run code" in said.err
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "run").exists()
