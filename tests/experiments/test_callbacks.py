"""Callbacks: what they are told, and how they end a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import safa
from safa import Every, RoundRecord, Run, StopAt, load_run, simulate
from safa.errors import SafaError
from safa.server import Server
from tests.experiments.kill_and_resume import RESULTS

GIVEN: dict[str, Any] = {"rounds": 12, "checkpoint_every": 3, "seed": 1}


class Told:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.ended: list[Run] = []

    def on_round(self, record: RoundRecord, server: Server) -> None:
        assert server.metrics.scores[-1]["loss"] == record.loss
        self.rounds.append(record.round)

    def on_end(self, run: Run) -> None:
        self.ended.append(run)


def fail_at(number: int) -> Any:
    def fail(record: RoundRecord, server: Server) -> None:
        if record.round == number:
            raise RuntimeError("a mistake of the user")

    return fail


def same(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in RESULTS)


def test_it_is_told_every_round_and_the_end(tmp_path: Path) -> None:
    told = Told()
    run = simulate("boston", **GIVEN, out=tmp_path / "told", callbacks=[told])
    assert told.rounds == list(range(1, 13))
    assert told.ended == [run]
    assert run.summary == load_run(tmp_path / "told").summary
    simulate("boston", **GIVEN, out=tmp_path / "alone")
    assert same(tmp_path / "told", tmp_path / "alone")


def test_one_that_returns_true_ends_the_run_and_all_are_called(tmp_path: Path) -> None:
    told = Told()
    run = simulate("boston", **GIVEN, out=tmp_path / "run", callbacks=[lambda record, _: record.round == 5, told])
    assert told.rounds == [1, 2, 3, 4, 5]
    assert len(list(run.records())) == 5
    assert load_run(tmp_path / "run").summary is not None
    assert load_run(tmp_path / "run").model()["weight"].shape == (1, 12)
    with pytest.raises(SafaError, match="is finished; there is nothing to resume"):
        safa.resume(tmp_path / "run")


def test_every_so_many_rounds() -> None:
    seen: list[int] = []
    simulate("boston", **GIVEN, callbacks=[Every(5, lambda record, server: seen.append(record.round))])
    assert seen == [5, 10]
    run = simulate("boston", **GIVEN, callbacks=[Every(4, lambda record, server: True)])
    assert len(list(run.records())) == 4


@pytest.mark.parametrize("held", [1, 3])
@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_stop_at_a_target_is_what_until_does(metric: str, held: int) -> None:
    records = list(simulate("boston", **GIVEN).records())
    value = {"loss": records[5].loss, **records[5].metrics}[metric]
    assert value is not None
    stopped = simulate("boston", **GIVEN, callbacks=[StopAt(held=held, **{metric: value})])
    until = simulate("boston", **GIVEN, until=f"{metric}={value!r},held={held}")
    assert [record.to_json() for record in stopped.records()] == [record.to_json() for record in until.records()]
    assert 1 < len(list(stopped.records())) < 12


@pytest.mark.parametrize("number", [1, 3, 5, 6])
def test_an_exception_stops_the_run_which_is_resumed_to_the_same_bytes(number: int, tmp_path: Path) -> None:
    simulate("boston", **GIVEN, out=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="a mistake of the user"):
        simulate("boston", **GIVEN, out=tmp_path / "cut", callbacks=[fail_at(number)])
    cut = load_run(tmp_path / "cut")
    assert cut.summary is None
    assert len(list(cut.records())) == number
    told = Told()
    run = safa.resume(tmp_path / "cut", callbacks=[told])
    checkpoint = number // 3 * 3
    assert told.rounds == list(range(max(1, checkpoint), 13))  # that of the checkpoint once more
    assert told.ended == [run]
    assert same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("number", [4, 6, 8])
def test_a_resumed_run_is_stopped_at_the_same_round(number: int, tmp_path: Path) -> None:
    accuracy = [record.metrics["accuracy"] for record in simulate("boston", **GIVEN).records()][5]
    stop = StopAt(accuracy=accuracy, held=2) if number < 6 else StopAt(accuracy=accuracy)
    simulate("boston", **GIVEN, out=tmp_path / "whole", callbacks=[stop])
    rounds = len(list(load_run(tmp_path / "whole").records()))
    with pytest.raises(RuntimeError):  # in the round that should have been the last one, too
        simulate("boston", **GIVEN, out=tmp_path / "cut", callbacks=[fail_at(min(number, rounds))])
    safa.resume(tmp_path / "cut", callbacks=[stop])
    assert same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    ("callback", "complaint"),
    [
        (3, r"a callback must be a function of \(record, server\), or an object with on_round or on_end, not 3"),
        (Told, "a callback must be a function .*, not <class"),
        (StopAt(acuracy=0.9), r"no metric 'acuracy' to reach \(did you mean accuracy\?\); there is loss, accuracy"),
        (StopAt(accuracy=0.9, held=0), "a target must be METRIC=VALUE"),
    ],
    ids=["number", "class", "metric", "held"],
)
def test_what_is_no_callback_is_refused_before_the_first_round(callback: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SafaError, match=complaint):
        simulate("boston", **GIVEN, out=tmp_path / "run", callbacks=[callback])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: StopAt(), "StopAt takes one metric with its value, such as accuracy=0.9, not 0"),
        (lambda: StopAt(accuracy=0.9, loss=0.1), "not 2"),
        (lambda: Every(0, print), "a number of rounds of at least 1, not 0"),
        (lambda: Every(2, 3), r"a function of \(record, server\), not 3"),  # type: ignore[arg-type]
        (lambda: simulate("boston", train=False, callbacks=[StopAt(loss=1)]), "no effect where nothing is trained"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(make: Any, complaint: str) -> None:
    with pytest.raises(SafaError, match=complaint):
        make()


def test_a_bad_callback_changes_nothing_in_the_folder_of_a_stopped_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        simulate("boston", **GIVEN, out=tmp_path / "cut", callbacks=[fail_at(5)])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SafaError, match="a callback must be"):
        safa.resume(tmp_path / "cut", callbacks=[3])  # type: ignore[list-item]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
