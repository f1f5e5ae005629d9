"""Records and run folders: written, read back, cut off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from safa import Settings, load_run, measure, run_rounds
from safa.errors import SafaError
from safa.records import RoundRecord
from safa.runs import RunWriter, write_atomically


def records() -> list[RoundRecord]:
    return list(run_rounds(Settings.of("boston", rounds=5)))


def test_a_record_survives_json() -> None:
    for record in records():
        again = RoundRecord.from_json(record.to_json())
        assert again.to_json() == record.to_json()
        assert again.rule is record.rule
        assert again.verdict.dtype == record.verdict.dtype


def test_a_record_cannot_be_changed() -> None:
    record = records()[0]
    with pytest.raises(ValueError, match="read-only"):
        record.client[0] = 3
    with pytest.raises(AttributeError):
        record.round = 3  # type: ignore[misc]


def write(folder: Path, *, finish: bool = True) -> Settings:
    settings = Settings.of("boston", rounds=5, seed=4, round_limit_s=np.inf)
    writer = RunWriter.begin(folder, settings)
    done = []
    for record in run_rounds(settings):
        writer.add(record)
        done.append(record)
    writer.close(measure(done) if finish else None)
    return settings


def test_a_run_is_read_back(tmp_path: Path) -> None:
    settings = write(tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.settings == settings
    assert run.summary == measure(run.records())


def test_a_run_that_was_cut_off_is_readable(tmp_path: Path) -> None:
    write(tmp_path / "run", finish=False)
    rounds = tmp_path / "run" / "rounds.jsonl"
    rounds.write_bytes(rounds.read_bytes()[:-10])  # killed in mid-write
    run = load_run(tmp_path / "run")
    assert run.summary is None
    assert [record.round for record in run.records()] == [1, 2, 3, 4]


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(SafaError, match=r"holds no run: there is no config\.toml"):
        load_run(tmp_path)


def test_a_config_that_is_no_runs_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("colour = 3")
    with pytest.raises(SafaError, match="does not hold the settings of a run"):
        load_run(tmp_path)


def test_an_atomic_write_leaves_the_old_file_if_it_fails(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")
    target.with_name("file.part").mkdir()  # in the way
    with pytest.raises(IsADirectoryError):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
