"""What is seen at a glance, while files grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from safa.experiments.sweep import run_sweep
from safa.report.live import glance as module
from safa.report.live.folders import Kind
from safa.report.live.glance import Lines, State, watcher_of
from safa.report.live.markup import glance_html, row_html
from safa.runs import write_config
from safa.runs.lock import hold
from safa.runs.settings import Settings
from tests.report.live.serving import records, written

SETTINGS = Settings.of("digits", rounds=2, train=False)


def test_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = Lines(path)
    assert lines.new() == (False, [])
    path.write_bytes(b"one\ntw")
    assert lines.new() == (True, [b"one"])
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert lines.new() == (False, [b"two", b"three"])
    assert lines.new() == (False, [])


@pytest.mark.parametrize("now", [b"one\n", b"other\nlines\nof\nlater\n", b""])
def test_a_file_that_was_cut_off_or_replaced_is_read_anew(tmp_path: Path, now: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n")
    lines = Lines(path)
    lines.new()
    path.write_bytes(now)
    assert lines.new() == (True, now.split(b"\n")[:-1])


def test_of_a_long_file_some_lines_are_read_and_then_all_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 2000)
    monkeypatch.setattr(module, "_SAMPLE", 200)
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"%06d\n" % n for n in range(5000)))
    lines = Lines(path, sampled=True)
    fresh, found = lines.new()
    numbers = [int(line) for line in found]
    assert fresh
    assert 40 < len(numbers) < 100
    assert numbers == sorted(numbers)
    assert (numbers[0] < 100, numbers[-1]) == (True, 4999)
    with path.open("ab") as file:
        file.write(b"005000\n")
    assert lines.new() == (False, [b"005000"])


def test_a_run_is_running_then_stopped_and_in_the_end_finished(tmp_path: Path) -> None:
    watcher = watcher_of(tmp_path / "run", Kind.RUN)
    with written(tmp_path / "run", done=3) as run:
        begun = watcher.look()
        run.add(2)
        later = watcher.look()
    assert (begun.state, begun.done, begun.total, begun.unit) == (State.RUNNING, 3, 12, "rounds")
    assert (later.done, later.metric) == (5, "accuracy")
    assert later.points == pytest.approx([1 - 0.5 / n for n in range(1, 6)])
    assert watcher.look().state is State.STOPPED
    (tmp_path / "run" / "summary.json").write_text("{}")
    assert watcher.look().state is State.FINISHED


@pytest.mark.parametrize(
    ("protocol", "words"), [("safa", "SAFA on digits, C = 0.3"), ("fedsecant", "FedSecant on digits")]
)
def test_c_is_named_where_the_protocol_has_one(tmp_path: Path, protocol: str, words: str) -> None:
    with written(tmp_path / "run", done=1, protocol=protocol):
        found = watcher_of(tmp_path / "run", Kind.RUN).look()
    assert found.words == f"{words}, 20 clients, seed 0"


def test_a_run_that_begins_anew_is_counted_anew(tmp_path: Path) -> None:
    watcher = watcher_of(tmp_path / "run", Kind.RUN)
    with written(tmp_path / "run", done=6):
        assert watcher.look().done == 6
    first = "".join(record.to_json() + "\n" for record in records()[:2])
    (tmp_path / "run" / "rounds.jsonl").write_text(first)
    again = watcher.look()
    assert (again.done, len(again.points)) == (2, 2)


def test_a_sweep_shows_how_many_of_its_runs_are_there(tmp_path: Path) -> None:
    runs = [Settings.of("digits", rounds=2, train=False, seed=seed) for seed in range(3)]
    made = run_sweep(runs, tmp_path)
    next(made)
    watcher = watcher_of(tmp_path, Kind.SWEEP)
    half = watcher.look()
    list(made)
    whole = watcher.look()
    assert (half.state, half.done, half.total) == (State.RUNNING, 1, 3)
    assert (whole.state, whole.done, whole.total) == (State.FINISHED, 3, 3)
    with hold(tmp_path):
        assert watcher.look().state is State.RUNNING


def test_an_arena_adds_up_its_sweeps(tmp_path: Path) -> None:
    for step in ("rates", "judged"):
        list(run_sweep([SETTINGS], tmp_path / "world" / step, keep="curves"))
    watcher = watcher_of(tmp_path, Kind.ARENA)
    found = watcher.look()
    assert (found.state, found.done, found.total) == (State.STOPPED, 2, 2)
    (tmp_path / "tables.json").touch()
    assert watcher.look().state is State.FINISHED


def test_a_reproduction_counts_its_results(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(
        '{"key":"a","summary":{"last_accuracy":0.5}}\n{"key":"b","summary":{"last_accuracy":null}}\n{"ke'
    )
    found = watcher_of(tmp_path, Kind.REPRODUCTION).look()
    assert (found.done, found.points) == (2, (0.5,))


def test_names_and_settings_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder, SETTINGS)
    found = watcher_of(folder, Kind.RUN).look()
    hostile = '"><script>alert(1)</script>'
    row = row_html(hostile, found)
    assert "<script" not in row
    assert 'value="&quot;&gt;&lt;script&gt;' in row
    assert "/run/%22%3E%3Cscript%3E" in row
    assert glance_html(found) in row
