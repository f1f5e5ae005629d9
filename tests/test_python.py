"""The Python interface as a user meets it: typed settings, references, and somebody's own parts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import GenericAlias, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from mypy import api

import safa
from safa import Metric, Problem, RoundRecord, Settings, load_run, simulate
from safa.errors import SafaError
from safa.experiments.sweep import _listed
from safa.runs.options import SettingsOptions, SweepOptions, Table

NOT_GIVEN = {"task", "metrics"}
"""What a call does not give: the task is an argument, and the metrics are the problem's."""
SETTINGS = {item.name: item for item in fields(Settings) if item.name not in NOT_GIVEN}


# -- typed settings ----------------------------------------------------------------------------------------------------


def options() -> dict[str, Any]:
    return get_type_hints(SettingsOptions)


def test_the_typed_settings_are_all_settings() -> None:
    assert list(options()) == list(SETTINGS)
    assert list(get_type_hints(SweepOptions)) == list(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_typed_setting_is_of_the_type_that_is_checked(name: str) -> None:
    typed, item = options()[name], SETTINGS[name]
    if item.metadata.get("is_file"):
        assert typed == Table | None
    elif item.metadata.get("choices"):
        assert get_args(typed) == item.metadata["choices"]
    elif name == "schedule":
        assert set(get_args(typed)) == {str, Callable[[int], float]}
    else:
        assert typed == get_type_hints(Settings)[name]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_sweep_takes_a_value_or_a_list_of_values(name: str) -> None:
    one, several = options()[name], get_type_hints(SweepOptions)[name]
    if SETTINGS[name].metadata.get("is_file"):
        assert set(get_args(several)) == {*get_args(Table), Sequence[str | os.PathLike[str]], type(None)}
    else:
        members = get_args(one) if get_origin(one) in (Union, UnionType) else (one,)
        assert set(get_args(several)) == {*members, GenericAlias(Sequence, (one,))}


USER = """
import numpy as np
from safa import Every, RoundRecord, Settings, StopAt, resume, simulate, sweep


class Mine:
    def on_round(self, record: RoundRecord, server: object) -> bool:
        return record.round > 3


run = simulate(
    "digits", protocol="safa", fraction=0.3, lr="auto", clock="causal", rounds=3, speeds=np.ones(20), train=True,
    sizes=[1.0] * 20, links="links.csv", schedule=lambda number: 1 / number, protocol_options={"mine": 3},
    callbacks=[StopAt(accuracy=0.9), Every(2, lambda record, server: print(record.round)), Mine(), lambda r, s: None],
)
sweep("digits", protocol=["safa", "fedavg"], seed=range(3), fraction=0.1, clock=["causal", "paper"], lr=[0.1, "auto"])
resume("folder", callbacks=[Mine()])
Settings.of("digits", rounds=3, optimiser="sgd")
"""
WRONG = {
    'simulate("digits", fracton=0.3)': 'Unexpected keyword argument "fracton"',
    'simulate("digits", fraction="many")': 'Argument "fraction" to "simulate" has incompatible type "str"',
    'simulate("digits", clock="wall")': 'Argument "clock" to "simulate" has incompatible type',
    'simulate("digits", lr="fast")': 'Argument "lr" to "simulate" has incompatible type',
    'simulate("digits", callbacks=[3])': "List item 0 has incompatible type",
    "simulate(3)": 'Argument 1 to "simulate" has incompatible type "int"',
    'Settings.of("digits", round=3)': 'Unexpected keyword argument "round"',
    'sweep("digits", seed=["a"])': "List item 0 has incompatible type",
    'sweep("digits", protocl=["safa"])': 'Unexpected keyword argument "protocl"',
}


@pytest.mark.slow
def test_mypy_checks_the_call_of_a_user(tmp_path: Path) -> None:
    """One run over both files, because mypy reads the whole package first."""
    (tmp_path / "right.py").write_text(USER)
    lines = ["from safa import Settings, simulate, sweep", *WRONG]
    (tmp_path / "wrong.py").write_text("\n".join(lines) + "\n")
    files = [str(tmp_path / name) for name in ("right.py", "wrong.py")]
    source = Path(safa.__file__).parent.parent
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = true\nmypy_path = {source}\nfollow_imports = silent\n"
        "[mypy-torch.*,altair.*,rich.*,flwr.*,pandas.*]\nfollow_imports = skip\n"
    )
    ways = [f"--config-file={tmp_path / 'mypy.ini'}", f"--cache-dir={tmp_path / 'cache'}", "--no-error-summary"]
    out, err, _ = api.run([*files, *ways])
    assert err == ""
    assert "right.py" not in out, out
    for number, complaint in enumerate(WRONG.values(), 2):
        assert any(f"wrong.py:{number}: error: {complaint}" in line for line in out.splitlines()), (number, out)


def test_a_wrong_setting_is_a_sentence_where_nobody_checks_types() -> None:
    with pytest.raises(SafaError, match=r"there is no setting 'fracton' \(did you mean fraction\?\)"):
        simulate("boston", fracton=0.3)  # type: ignore[call-arg]


# -- references --------------------------------------------------------------------------------------------------------

MINE = """
import torch
from safa import Metric, Problem, StopAt

def error(output, target):
    return (output[:, 0] - target).abs().max()

def make():
    x = torch.randn(90, 3, generator=torch.Generator().manual_seed(0))
    return Problem(
        model=lambda: torch.nn.Linear(3, 1),
        loss=lambda output, target: ((output[:, 0] - target) ** 2).mean(),
        metrics={"worst": Metric(error, higher_is_better=False)},
        train=(x[:60], x[:60, 0]), test=(x[60:], x[60:, 0]),
    )

def falling(number):
    return 1 / number

class Stop:
    def __init__(self, worst):
        self.worst, self.run = worst, None

    def on_round(self, record, server):
        return record.metrics["worst"] < self.worst

    def on_end(self, run):
        self.run = run
"""
SCRIPT = (
    MINE
    + """
import safa

def stop(record, server):
    if record.round == 5:
        raise KeyboardInterrupt

if __name__ == "__main__":
    safa.simulate(make, rounds=8, checkpoint_every=2, threads=1, lr=0.1, out="whole")
    safa.simulate(make, rounds=8, checkpoint_every=2, threads=1, lr=0.1, out="cut", callbacks=[stop])
"""
)
GIVEN: dict[str, Any] = {"rounds": 8, "checkpoint_every": 2, "lr": 0.1}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of a user."""
    (tmp_path / "elsewhere_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    import elsewhere_mine  # type: ignore[import-not-found]

    yield elsewhere_mine
    del sys.modules["elsewhere_mine"]


def make_here() -> Problem:
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    return Problem(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda output, target: ((output - target) ** 2).mean(),
        metrics={"error": Metric(lambda output, target: (output - target).abs().mean(), higher_is_better=False)},
        train=(x, x),
        test=(x, x),
    )


def test_a_function_that_makes_a_problem_names_the_task() -> None:
    assert simulate(make_here, **GIVEN).settings.task == "tests.test_python:make_here"
    assert simulate(make_here(), **GIVEN).settings.task == "your own"
    assert simulate(lambda: make_here(), **GIVEN).settings.task == "your own"


def test_a_run_is_resumed_and_replayed_by_function_problem_or_name(tmp_path: Path) -> None:
    def stop(record: RoundRecord, server: object) -> None:
        if record.round == 5:
            raise KeyboardInterrupt

    whole = simulate(make_here, **GIVEN)
    problems: list[Any] = [make_here, make_here(), "tests.test_python:make_here"]
    for number, problem in enumerate(problems):
        folder = tmp_path / str(number)
        with pytest.raises(KeyboardInterrupt):
            simulate(make_here, **GIVEN, out=folder, callbacks=[stop])
        with pytest.raises(SafaError, match=r"is not built in; if you trust it, name it: safa\.resume"):
            safa.resume(folder)
        run = safa.resume(folder, problem)
        assert [record.to_json() for record in run.records()] == [record.to_json() for record in whole.records()]
        assert all((safa.replay(run, problem)[name] == tensor).all() for name, tensor in whole.model().items())


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (3, "must be a Problem or a callable that takes nothing and makes one, not a int"),
        (lambda given: given, "must be a Problem or a callable that takes nothing"),
        (dict, "dict must make a Problem, not a dict"),
        (lambda: 1 / 0, "failed: ZeroDivisionError"),
    ],
)
def test_what_makes_no_problem_is_a_sentence(given: Any, complaint: str) -> None:
    with pytest.raises(SafaError, match=complaint):
        simulate(given)


@pytest.mark.slow
def test_the_run_of_a_script_is_resumed_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "experiment.py").write_text(SCRIPT)
    source = os.pathsep.join(filter(None, (str(Path(safa.__file__).parent.parent), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": source}

    def python(*arguments: str) -> int:
        return subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, check=False).returncode

    assert python("experiment.py") != 0
    assert load_run(tmp_path / "cut").settings.task == "experiment:make"
    assert python("-m", "safa", "run", "experiment:make", "--resume", "cut", "--quiet") == 0
    for name in ("config.toml", "rounds.jsonl", "summary.json", "model.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# -- somebody's own metric, schedule and callback ----------------------------------------------------------------------


def test_a_metric_and_a_callback_of_ones_own_stop_a_run_at_a_target(mine: Any, tmp_path: Path) -> None:
    whole = [record.metrics["worst"] for record in simulate(mine.make, **GIVEN).records()]
    stop = mine.Stop(worst=sorted(whole)[3])
    run = simulate(mine.make, **GIVEN, out=tmp_path / "run", callbacks=[stop])
    assert stop.run is run
    found = [record.metrics["worst"] for record in run.records()]
    assert found == whole[: len(found)]
    assert found[-1] < stop.worst
    assert min(found[:-1]) >= stop.worst
    summary = load_run(tmp_path / "run").summary
    assert summary is not None
    assert summary["best_worst"] == min(found)
    assert run.settings.metrics == {"worst": "lower"}


def test_a_schedule_of_ones_own_is_kept_by_name_and_given_again(mine: Any, tmp_path: Path) -> None:
    whole = simulate(mine.make, **GIVEN, schedule=mine.falling)
    assert whole.settings.schedule == "elsewhere_mine:falling"
    stop = mine.Stop(worst=-1.0)
    run = simulate(mine.make, **GIVEN, schedule=mine.falling, out=tmp_path / "run", callbacks=[stop])
    losses = [[record.loss for record in one.records()] for one in (run, whole, simulate(mine.make, **GIVEN))]
    assert losses[0] == losses[1] != losses[2]
    model = safa.replay(load_run(tmp_path / "run"), mine.make, schedule=mine.falling)
    assert all((model[name] == tensor).all() for name, tensor in whole.model().items())


# -- a loss that does not fall -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [3.0, 1e30])
def test_a_loss_that_did_not_fall_is_warned_of(lr: float) -> None:
    with pytest.warns(UserWarning, match=r"the loss on the test set did not fall: .* learning rate, .* may be wrong"):
        simulate(make_here, rounds=4, lr=lr)


def test_a_loss_that_fell_is_not(recwarn: pytest.WarningsRecorder) -> None:
    simulate(make_here, rounds=4, lr=0.1)
    simulate(make_here, rounds=1, lr=3.0)  # one evaluation alone says nothing
    simulate("boston", rounds=2, lr=1e3)  # settings of a task that is built in are its author's
    assert not recwarn


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_a_sweep_takes_lists_and_a_function_that_makes_a_problem(tmp_path: Path) -> None:
    given: dict[str, Any] = {"protocol": ["safa", "fedavg"], "seed": range(2), "rounds": 2, "lr": 0.1}
    swept = safa.sweep(make_here, **given, out=tmp_path / "sweep")
    found = [(row["task"], row["protocol"], row["seed"]) for row in swept.rows]
    name = "tests.test_python:make_here"
    assert found == [(name, "safa", 0), (name, "safa", 1), (name, "fedavg", 0), (name, "fedavg", 1)]


@pytest.mark.parametrize("name", ["speeds", "sizes", "links", "trace"])
def test_numbers_about_clients_are_one_value_of_a_sweep(name: str) -> None:
    assert _listed(name, [4.0, 3.0]) == [[4.0, 3.0]]
    assert _listed(name, ["a.txt", Path("b.txt")]) == ["a.txt", Path("b.txt")]
    assert _listed("fraction", (0.1, 0.3)) == [0.1, 0.3]


@pytest.mark.parametrize(
    ("name", "one"),
    [("speeds", [1.0, 0.5]), ("sizes", np.ones(2)), ("links", [(1.4, 1.4), (2.0, 2.0)]), ("trace", [[0, 0.0, 9.0]])],
)
def test_several_lists_of_numbers_are_several_values(name: str, one: Any) -> None:
    assert len(_listed(name, one)) == 1
    assert len(_listed(name, [one, one])) == 2
    assert len(_listed(name, [one, "speeds.txt"])) == 2


def test_workers_need_a_problem_with_a_name() -> None:
    with pytest.raises(SafaError, match="a problem that is given as an object runs with workers=1"):
        safa.sweep(make_here(), seed=[0, 1], rounds=2, workers=2)
