"""Records and run folders: written, read back, cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safa import Settings, load_run, measure, run_rounds
from safa.errors import SafaError
from safa.protocol.records import RoundRecord
from safa.runs import RunWriter, write_atomically


def records() -> list[RoundRecord]:
    return list(run_rounds(Settings.of("boston", rounds=5)))


def test_a_record_survives_json() -> None:
    for record in records():
        again = RoundRecord.from_json(record.to_json())
        assert again.to_json() == record.to_json()
        assert again.rule is record.rule
        assert again.verdict.dtype == record.verdict.dtype


def test_what_only_the_driver_of_a_server_knows_may_be_missing() -> None:
    record = records()[1]
    values = json.loads(record.to_json())
    known = {"bytes_up", "bytes_down", "work_done", "work_lost", "distribution_s", "diverged", "loss", "metrics"}
    again = RoundRecord.from_json(json.dumps({name: value for name, value in values.items() if name not in known}))
    assert (again.bytes_up, again.work_done, again.diverged, again.loss) == (0.0, 0.0, 0, None)
    assert again.client.tolist() == record.client.tolist()


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


# -- damaged records ---------------------------------------------------------------------------------------------------


def damaged(lines: list[str], number: int, **fields: Any) -> list[str]:
    """The lines with some fields of one record changed: lists in their first places, one that is ... removed."""
    old = json.loads(lines[number - 1])
    begun = {name: v + old[name][len(v) :] for name, v in fields.items() if isinstance(v, list)}
    values = old | fields | begun
    line = json.dumps({name: value for name, value in values.items() if value is not ...})
    return [*lines[: number - 1], line, *lines[number:]]


@pytest.mark.parametrize(
    ("number", "fields", "complaint"),
    [
        (2, {"client": [0] * 6}, "the lists client, base, verdict, refusal, arrival_s, weight, into, work must be"),
        (2, {"sent": [77]}, "sent names client 77, but there are 5, counted from 0"),
        (2, {"crashed": [5]}, "crashed names client 5, but there are 5"),
        (2, {"crashed": [-1]}, "crashed must hold numbers from 0"),
        (2, {"verdict": [3, 0, 0]}, "verdict must hold numbers from 0 to 2 only"),
        (2, {"verdict": [300, 0, 0]}, "verdict must hold numbers from 0 to 2 only"),
        (2, {"refusal": [8, 0, 0]}, "refusal must hold numbers from 0 to 7 only"),
        (2, {"refusal": [1, 0, 0]}, "refusal must be above 0 where verdict is 2, and only there"),
        (2, {"weight": ["much", 0.5, 0.5]}, "weight must be a list of numbers"),
        (2, {"weight": [float("nan"), 0.5, 0.5]}, "weight must hold numbers from"),
        (2, {"weight": [10**400, 0, 0]}, "weight holds a number that is too large"),
        (2, {"client": [10**30, 0, 1]}, "client holds a number that is too large"),
        (2, {"client": [0.5, 1, 2]}, "client must be a list of whole numbers"),
        (2, {"client": [True, 1, 2]}, "client must be a list of whole numbers"),
        (2, {"client": [[0], [1], [2]]}, "client must be a list of whole numbers"),
        (2, {"client": 3}, "client must be a list of whole numbers"),
        (2, {"work": [0, 1, 1]}, "work must be above 0"),
        (2, {"work": [1.5, 1, 1]}, "work must hold numbers from 0 to 1 only"),
        (2, {"base": [9, 0, 0]}, "base must be from 0 to the version"),
        (2, {"into": [9, 0, 0]}, "into must be at most the version that comes next"),
        (2, {"into": [0, 0, 0]}, "into must be above base"),
        (2, {"sent_version": [9]}, "sent_version must be at most the version"),
        (2, {"sent": [3], "deprecated": [1]}, "deprecated must name clients out of sent"),
        (2, {"rule": "magic"}, 'rule must be one of cache, average, delta, own, not "magic"'),
        (2, {"rule": "own"}, "rule must be 'cache', as that of the protocol"),
        (2, {"ended_by": 3}, "ended_by must be one of quota, nobody left, deadline, not 3"),
        (2, {"round": 3}, "round must be 2, not 3"),
        (2, {"round": 1}, "round must be 2, not 1"),
        (1, {"round": 0}, "round must be at least 1, not 0"),
        (2, {"round": "two"}, 'round must be a whole number, not "two"'),
        (2, {"version": 10**12}, "version must be from 1 to"),
        (1, {"clients": 10**12}, "clients must be at most 5 before the first round"),
        (2, {"clients": 4}, "clients must be 5 after who joined and left, not 4"),
        (2, {"clients": -1}, "clients must be at least 0"),
        (2, {"uploads": 10**30}, "uploads must be at least 0 and finite"),
        (2, {"closed_s": float("inf")}, "closed_s must be at least 0 and finite"),
        (2, {"closed_s": 0.0}, "closed_s must not be before opened_s"),
        (2, {"metrics": {"auc": 1.0}}, "metrics must be empty where loss is null"),
        (2, {"loss": "low"}, 'loss must be a number or null, not "low"'),
        (2, {"loss": 1.0, "metrics": {"auc": None}}, 'metrics must be numbers by name, not {"auc": null}'),
        (2, {"loss": 1.0, "metrics": 0.5}, "metrics must be numbers by name, not 0.5"),
        (2, {"quota": ...}, "there is no quota"),
        (2, {"colour": 3}, 'there is a field "colour", which no record has'),
        (2, {"joined": [5, 5], "joined_size": [1, 1], "clients": 7}, "joined names a client twice"),
        (2, {"joined": [9], "joined_size": [1], "clients": 6}, "joined names client 9, but there are 6"),
    ],
)  # fmt: skip
def test_a_damaged_record_is_named_with_its_line_and_what_is_wrong(
    number: int, fields: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    settings = Settings.of("boston", rounds=3, crash_rate=0.0, fraction=0.5)
    lines = [record.to_json() for record in run_rounds(settings)]
    assert len(json.loads(lines[1])["client"]) == 5
    RunWriter.begin(tmp_path / "run", settings).close()
    (tmp_path / "run" / "rounds.jsonl").write_text("\n".join(damaged(lines, number, **fields)) + "\n")
    with pytest.raises(SafaError) as told:
        list(load_run(tmp_path / "run").records())
    assert f"rounds.jsonl, line {number}: {complaint}" in str(told.value)


@pytest.mark.parametrize("line", ["", "{", "[]", "3", "[" * 100_000, '{"round": ' * 100_000, "\x00"])
def test_a_line_that_is_no_record_is_an_error_in_the_middle_only(line: str, tmp_path: Path) -> None:
    write(tmp_path / "run")
    rounds = tmp_path / "run" / "rounds.jsonl"
    good = rounds.read_text()
    rounds.write_text(good + line)
    assert len(list(load_run(tmp_path / "run").records())) == 5
    rounds.write_text(line + "\n" + good)
    with pytest.raises(SafaError, match=r"rounds\.jsonl, line 1: it is not (JSON|a JSON object)"):
        list(load_run(tmp_path / "run").records())


def test_an_update_of_a_stranger_may_name_any_number(tmp_path: Path) -> None:
    settings = Settings.of("boston", rounds=3, crash_rate=0.0, fraction=0.5)
    lines = [record.to_json() for record in run_rounds(settings)]
    RunWriter.begin(tmp_path / "run", settings).close()
    strange = {"client": [-9, 10**15, 1], "verdict": [2, 2, 0], "refusal": [1, 1, 0], "into": [-1, -1, 2]}
    (tmp_path / "run" / "rounds.jsonl").write_text("\n".join(damaged(lines, 2, **strange)) + "\n")
    assert [record.round for record in load_run(tmp_path / "run").records()] == [1, 2, 3]
