"""Trackers: what they have written is read back through their own APIs, without a network."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import safa
from safa import RoundRecord, Run, SafaError, load_run, simulate, sweep
from safa.analysis import METRICS
from safa.cli.deploy.output import show_run
from safa.cli.program import main
from safa.deploy.launcher.follow import run_events
from safa.experiments.sweep import combinations, run_sweep
from safa.report import write_report
from safa.runs.frames import round_row
from safa.trackers import Place, TrackedRun, Tracker, available, find_trackers
from safa.trackers.tracker import library
from tests.deploy.harness import Harness
from tests.experiments.kill_and_resume import RESULTS
from tests.experiments.test_callbacks import fail_at

NAMES = ["tensorboard", "mlflow", "wandb"]
GIVEN: dict[str, Any] = {"rounds": 6, "checkpoint_every": 2, "seed": 1, "threads": 1}
METADATA = "Metadata-Version: 2.1\nName: elsewhere-trackers\nVersion: 1.0\n"
PACKAGE = '''
import json, os
from pathlib import Path
from safa.trackers import Tracker


class Lines(Tracker):
    """Lines of JSON in one file.

    More about it.
    """

    name = "lines"

    def begin(self, run):
        self.run, self.file = run.place.name, run.place.beside / f"{run.place.key}.jsonl"
        self.write(name=run.place.name, sweep=run.place.sweep, rounds=run.settings["rounds"])
        lines = map(json.loads, self.file.read_text().splitlines())
        return max((line["round"] for line in lines if "round" in line), default=0)

    def write(self, **values):
        with self.file.open("a") as file:
            file.write(json.dumps(values) + "\\n")

    def log(self, round_number, time_s, values):
        if os.environ.get("STOP_AT") == f"{self.run}:{round_number}":
            raise KeyboardInterrupt
        self.write(round=round_number, time_s=time_s, picked=values["round/picked"])

    def end(self, summary, page):
        self.write(futility=summary["futility"], page=page and page.read_text()[:15])
'''


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is connected to but this machine, and nothing of the user's environment counts."""
    connect = socket.socket.connect

    def to_this_machine(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "localhost", "::1"), address
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", to_this_machine)
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a tracker, the way that pip lays it out."""
    place = tmp_path_factory.mktemp("elsewhere")
    (place / "elsewhere_trackers.py").write_text(PACKAGE)
    (place / "elsewhere_trackers-1.0.dist-info").mkdir()
    (place / "elsewhere_trackers-1.0.dist-info" / "METADATA").write_text(METADATA)
    points = place / "elsewhere_trackers-1.0.dist-info" / "entry_points.txt"
    points.write_text("[safa.trackers]\nlines = elsewhere_trackers:Lines\n")
    monkeypatch.syspath_prepend(place)
    yield points
    sys.modules.pop("elsewhere_trackers", None)


# -- what the trackers' own APIs say -----------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a tracker has of one run."""

    settings: dict[str, Any] = field(default_factory=dict)
    rounds: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)
    page: bytes | None = None
    state: str = ""

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.rounds]


def in_tensorboard(beside: Path, name: str) -> list[Seen]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
    from tensorboard.plugins.hparams import plugin_data_pb2  # type: ignore[import-untyped]

    folder, seen = beside / "tensorboard" / name, Seen()
    if not folder.exists():
        return []
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    rounds: dict[tuple[int, int], dict[str, float]] = {}
    for tag in found.scalars.Keys():
        for place, event in enumerate(found.Scalars(tag)):
            if tag.startswith("summary/"):
                seen.summary[tag.removeprefix("summary/")] = event.value
            else:
                count = sum(one.step == event.step for one in found.Scalars(tag)[:place])
                rounds.setdefault((event.step, count), {})[tag] = event.value
                rounds[event.step, count]["time of the event"] = event.wall_time
    seen.rounds = [(step, values) for (step, _), values in sorted(rounds.items())]
    start = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(start).session_start_info.hparams
    seen.settings = {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in hparams.items()}
    seen.page = (folder / "report.html").read_bytes() if (folder / "report.html").exists() else None
    return [seen]


def in_mlflow(beside: Path, name: str) -> list[Seen]:
    from mlflow.tracking import MlflowClient

    client, seen = MlflowClient((beside / "mlruns").as_uri()), []
    experiment = client.get_experiment_by_name("safa")
    assert experiment is not None
    for run in client.search_runs([experiment.experiment_id]):
        if run.info.run_name != name:
            continue
        one = Seen(dict(run.data.params), state=run.info.status)
        histories = {tag: client.get_metric_history(run.info.run_id, tag) for tag in run.data.metrics}
        one.summary = {
            tag.removeprefix("summary/"): all_[-1].value for tag, all_ in histories.items() if "summary/" in tag
        }
        steps = [metric.step for metric in histories["virtual_time_s"]]
        one.rounds = [
            (step, {tag: m.value for tag, all_ in histories.items() for m in all_ if m.step == step}) for step in steps
        ]
        pages = [file.path for file in client.list_artifacts(run.info.run_id)]
        if pages:
            one.page = Path(client.download_artifacts(run.info.run_id, *pages)).read_bytes()
        seen.append(one)
    return seen


def in_wandb(beside: Path, name: str) -> list[Seen]:
    """By wandb's own reader of offline files; files of one id are one run."""
    from wandb.util import get_core_path

    seen: dict[str, Seen] = {}
    for file in sorted((beside / "wandb").glob("offline-run-*/*.wandb")):
        options = ["--no-observability", "--json", "--run-file", str(file), str(beside / "wandb")]
        command = [get_core_path(), "leet", "inspect", *options]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        run = next(record["run"] for record in map(json.loads, lines) if record["type"] == "run")
        if run["display_name"] == name:
            _take_records(seen.setdefault(run["run_id"], Seen()), [json.loads(line) for line in lines])
    return list(seen.values())


def _take_records(seen: Seen, records: list[dict[str, Any]]) -> None:
    for record in records:
        kind, held = record["type"], record.get(record["type"], {})
        if kind == "run":
            seen.settings = held["config"]["update"]
        elif kind == "history":
            seen.rounds.append((held["step"]["num"], held["item"]))
        elif kind == "summary":
            seen.summary |= held.get("update", {})
        elif kind == "artifact":
            (file,) = held["manifest"]["contents"]
            seen.page = Path(file["local_path"]).read_bytes()
        elif kind == "exit":
            seen.state = str(held.get("exit_code", 0))


READERS: Mapping[str, Callable[[Path, str], list[Seen]]] = {
    "tensorboard": in_tensorboard,
    "mlflow": in_mlflow,
    "wandb": in_wandb,
}


def check_rounds(seen: Seen, records: list[RoundRecord]) -> None:
    """Every round is there once, with everything that its record says."""
    assert seen.numbers == [record.round for record in records]
    for record, (_, values) in zip(records, seen.rounds, strict=True):
        expected: dict[str, Any] = {"virtual_time_s": record.closed_s, "loss": record.loss, **record.metrics}
        row = {name: value for name, value in round_row(record).items() if name not in expected}
        numbers = {f"round/{name}": value for name, value in row.items() if isinstance(value, int | float)}
        expected |= {name: value for name, value in numbers.items() if name.split("/")[1] not in ("round", "opened_s")}
        expected.pop("round/closed_s")
        assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        measured = safa.measure(records[: record.round])
        so_far = {f"run/{name}": measured[name] for name in METRICS if name != "virtual_time_s"}
        assert {name: values[name] for name in so_far} == pytest.approx(so_far, rel=1e-6)
        assert values.get("time of the event", record.closed_s) == record.closed_s  # TensorBoard's axis "relative"


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that is tracked in these tests, without a tracker."""
    return simulate("boston", **GIVEN, out=tmp_path_factory.mktemp("alone") / "run")


@pytest.fixture(scope="module")
def page(alone: Run) -> bytes:
    return write_report(alone).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_read_back(name: str, tmp_path: Path, alone: Run, page: bytes) -> None:
    beside = tmp_path / "my runs"
    run = simulate("boston", **GIVEN, out=beside / "a run", track=name)
    (seen,) = READERS[name](beside, "a run")
    check_rounds(seen, list(run.records()))
    assert str(seen.settings["protocol"]) == "safa"
    assert float(seen.settings["seed"]) == 1
    assert run.summary is not None
    expected = {name: value for name, value in run.summary.items() if isinstance(value, int | float)}
    assert {name: seen.summary[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert seen.page == page
    assert seen.state in ("", "FINISHED", "0")
    for file in RESULTS:  # nothing about a run changes because it is tracked
        assert (beside / "a run" / file).read_bytes() == (alone.folder or beside).joinpath(file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_same_run_and_no_round_is_there_twice(name: str, tmp_path: Path, page: bytes) -> None:
    with pytest.raises(RuntimeError):
        simulate("boston", **GIVEN, out=tmp_path / "run", track=name, callbacks=[fail_at(6)])
    (stopped,) = READERS[name](tmp_path, "run")
    assert stopped.numbers == [1, 2, 3, 4, 5]  # of the sixth, trackers are not told
    assert stopped.state in ("", "KILLED", "1")
    run = safa.resume(tmp_path / "run", track=name)  # from the checkpoint after round 4
    (seen,) = READERS[name](tmp_path, "run")
    check_rounds(seen, list(run.records()))
    assert seen.page == page
    assert seen.state in ("", "FINISHED", "0")


KILLED = """
import os, signal, sys, safa
from safa.trackers import Tracker
class Killer(Tracker):
    name = "killer"
    def begin(self, run): return 0
    def log(self, round_number, time_s, values):
        if round_number == 70: os.kill(os.getpid(), signal.SIGKILL)
    def end(self, summary, page): pass
trackers = ["tensorboard", "mlflow", "wandb", Killer()]
safa.simulate("boston", rounds=75, checkpoint_every=60, threads=1, out=sys.argv[1], track=trackers)
"""


@pytest.mark.slow
def test_a_run_that_was_killed_lacks_no_round_when_it_is_resumed(tmp_path: Path) -> None:
    """wandb has not written the last rounds by then, and MLflow was not sent them."""
    environment = os.environ | {"PYTHONPATH": str(Path(safa.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], env=environment)
    assert done.returncode == -signal.SIGKILL
    run = safa.resume(tmp_path / "run", track=NAMES)
    for name in NAMES:
        (seen,) = READERS[name](tmp_path, "run")
        check_rounds(seen, list(run.records()))


def test_rounds_that_a_tracker_has_missed_are_logged_when_the_run_is_resumed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        simulate("boston", **GIVEN, out=tmp_path / "run", callbacks=[fail_at(5)])
    run = safa.resume(tmp_path / "run", track="tensorboard")
    (seen,) = in_tensorboard(tmp_path, "run")
    check_rounds(seen, list(run.records()))


def test_a_run_that_replaces_another_is_a_new_one(tmp_path: Path) -> None:
    for seed in (1, 2):
        run = simulate("boston", rounds=3, seed=seed, out=tmp_path / "run", force=True, track=["tensorboard", "mlflow"])
        check_rounds(in_tensorboard(tmp_path, "run")[0], list(run.records()))
    assert sorted(seen.settings["seed"] for seen in in_mlflow(tmp_path, "run")) == ["1", "2"]


@pytest.mark.parametrize("name", NAMES)
def test_a_value_may_be_any_number(name: str, tmp_path: Path) -> None:
    (tracker,) = find_trackers(name)
    (tmp_path / "run").mkdir()
    place = Place.of(tmp_path / "run")
    assert tracker.begin(TrackedRun(place=place, settings={"lr": math.inf, "a": "x" * 3000, "b": True})) == 0
    tracker.log(1, 1.0, {"virtual_time_s": 1.0, "loss": math.nan, "run/best_loss": math.inf})
    tracker.end({}, None)
    ((number, values),) = READERS[name](tmp_path, "run")[0].rounds
    assert number == 1
    assert math.isnan(float(values["loss"]))
    assert float(values["run/best_loss"]) == math.inf


# -- trackers that fail ------------------------------------------------------------------------------------------------


class Failing(Tracker):
    """Its disk is full from some round on."""

    name = "failing"

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, list[str]()

    def begin(self, run: TrackedRun) -> int:
        self.calls.append("begin")
        return 0

    def log(self, round_number: int, time_s: float, values: Mapping[str, float]) -> None:
        self.calls.append(f"log {round_number}")
        if round_number >= self.at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    def end(self, summary: Mapping[str, float], page: Path | None) -> None:
        self.calls.append("end")

    def stop(self) -> None:
        self.calls.append("stop")


def test_one_that_fails_is_given_up_with_one_warning_and_the_run_goes_on(tmp_path: Path) -> None:
    failing, sound = Failing(3), Failing(7)
    with pytest.warns(UserWarning, match="given up") as told:
        run = simulate("boston", **GIVEN, out=tmp_path / "run", track=[failing, sound])
    assert [str(one.message) for one in told] == [
        "the tracker failing failed and is given up for this run: "
        "OSError: [Errno 28] No space left on device: 'somewhere'"
    ]
    assert failing.calls == ["begin", "log 1", "log 2", "log 3"]
    assert sound.calls == ["begin", *(f"log {number}" for number in range(1, 7)), "end"]
    assert run.summary == load_run(tmp_path / "run").summary


@pytest.mark.parametrize("name", NAMES)
def test_a_place_that_cannot_be_written_stops_no_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("tensorboard", "mlruns", "wandb"):
        (tmp_path / folder).write_text("a file")
    command = ["run", "boston", "--rounds", "2", "--quiet", "--out", str(tmp_path / "run"), "--track", name]
    assert main(command) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"safa: the tracker {name} failed and is given up for this run: ")
    assert load_run(tmp_path / "run").summary is not None


def test_a_service_that_cannot_be_reached_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.warns(UserWarning, match=r"the tracker mlflow failed and is given up for this run: .*127\.0\.0\.1"):
        run = simulate("boston", rounds=2, out=tmp_path / "run", track="mlflow")
    assert run.summary is not None
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.parametrize(
    ("name", "modules", "library"),
    [
        ("tensorboard", ["tensorboard.compat.proto.event_pb2"], "TensorBoard"),
        ("mlflow", ["mlflow.tracking"], "MLflow"),
        ("wandb", ["wandb"], "wandb"),
    ],
)
@pytest.mark.parametrize("command", ["run boston", "sweep boston", "deploy local boston", "deploy server boston"])
def test_without_its_library_nothing_is_begun(
    command: str,
    name: str,
    modules: list[str],
    library: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    assert main([*command.split(), "--track", name, "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == (
        f"safa: the tracker {name} needs {library}, which is not installed: pip install 'safa[{name}]'\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder such as trackers make, beside a script, can be imported."""
    (tmp_path / "some_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        SafaError, match=r"the tracker some needs it, which is not installed: pip install 'safa\[some\]'"
    ):
        library("some_tracker", needs="it", extra="some")


# -- trackers by name --------------------------------------------------------------------------------------------------


def test_a_name_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "boston", "--track", "tensorbord", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == (
        "safa: there is no tracker 'tensorbord' (did you mean tensorboard?); there are tensorboard, mlflow, wandb\n"
    )
    assert not (tmp_path / "run").exists()
    with pytest.raises(SafaError, match="track needs out, the folder of the run: trackers put their files beside it"):
        simulate("boston", rounds=1, track="tensorboard")


def test_they_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert main(["trackers"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["tracker", "installed", "summary"]
    assert [line.split()[0] for line in lines] == NAMES
    assert "pip install 'safa[mlflow]'" in lines[1]


def test_a_tracker_of_another_package(elsewhere: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(available()) == [*NAMES, "lines"]
    assert available()["lines"] == (True, "Lines of JSON in one file.")
    command = ["run", "boston", "--no-train", "--rounds", "2", "--quiet", "--out", str(tmp_path / "run")]
    assert main([*command, "--track", "lines", "--track", "tensorboard,lines"]) == 0
    assert capsys.readouterr().err == ""
    (file,) = tmp_path.glob("*.jsonl")
    begun, *rounds, ended = map(json.loads, file.read_text().splitlines())
    records = list(load_run(tmp_path / "run").records())
    assert begun == {"name": "run", "sweep": "", "rounds": 2}
    assert [line["round"] for line in rounds] == [1, 2]
    assert [line["picked"] for line in rounds] == [len(record.picked) for record in records]
    assert [line["time_s"] for line in rounds] == [record.closed_s for record in records]
    assert ended["page"] == "<!doctype html>"
    assert in_tensorboard(tmp_path, "run")[0].numbers == [1, 2]


@pytest.mark.parametrize("value", ["elsewhere_trackers:PACKAGE", "elsewhere_trackers:Path", "nowhere:Lines"])
def test_an_entry_point_must_name_a_tracker(value: str, elsewhere: Path) -> None:
    elsewhere.write_text(f"[safa.trackers]\nlines = {value}\n")
    with pytest.raises(SafaError, match=r"the entry point 'lines' of safa\.trackers (cannot be loaded|does not name)"):
        find_trackers("lines")


# -- commands ----------------------------------------------------------------------------------------------------------


def test_the_command_resumes_what_is_tracked(elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["run", "boston", "--rounds", "5", "--checkpoint-every", "2", "--quiet", "--out", "run"]
    monkeypatch.setenv("STOP_AT", "run:4")
    assert main([*command, "--track", "tensorboard,lines"]) == 130
    assert in_tensorboard(tmp_path, "run")[0].numbers == [1, 2, 3, 4]
    monkeypatch.delenv("STOP_AT")
    assert main(["run", "--resume", "run", "--quiet", "--track", "tensorboard,lines"]) == 0
    check_rounds(in_tensorboard(tmp_path, "run")[0], list(load_run("run").records()))
    (file,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["round"] for line in lines if "round" in line] == [1, 2, 3, 4, 5]


def test_the_runs_of_a_sweep_are_tracked_each(tmp_path: Path) -> None:
    found = sweep("boston", seed=[1, 2], rounds=3, out=tmp_path / "swept", track=["tensorboard", "mlflow"])
    for number, row in enumerate(found.rows, start=1):
        name = f"swept/{number:04d}"
        run = load_run(tmp_path / "swept" / "runs" / f"{number:04d}")
        for read in (in_tensorboard, in_mlflow):
            (seen,) = read(tmp_path, name)
            check_rounds(seen, list(run.records()))
            assert float(seen.settings["seed"]) == row["seed"]
            assert seen.summary["futility"] == pytest.approx(row["futility"])
            assert seen.page is None  # that of the whole sweep says more


def test_a_sweep_that_was_stopped_continues_the_run_that_it_runs_again(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = combinations(["boston"], {"seed": [1, 2], "rounds": [4], "train": [False]})
    monkeypatch.setenv("STOP_AT", "swept/0002:3")
    with pytest.raises(KeyboardInterrupt):
        list(run_sweep(runs, tmp_path / "swept", keep="nothing", track=["lines,tensorboard"]))
    monkeypatch.delenv("STOP_AT")
    assert in_tensorboard(tmp_path, "swept/0002")[0].numbers == [1, 2]
    list(run_sweep(runs, tmp_path / "swept", keep="nothing", track=["lines,tensorboard"]))
    for number in ("0001", "0002"):
        assert in_tensorboard(tmp_path, f"swept/{number}")[0].numbers == [1, 2, 3, 4]
        (file,) = tmp_path.glob(f"*-{number}.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["round"] for line in lines if "round" in line] == [1, 2, 3, 4]
        assert lines[0]["sweep"] == "swept"
    assert len(lines) == 7  # begun twice, ended once


class Elsewhere:
    """An engine whose machines have other disks."""

    shares_disk = False

    def finished(self, jobs: Mapping[str, Callable[[], Any]]) -> Iterator[tuple[str, Any]]:
        raise AssertionError


def test_a_sweep_on_other_machines_is_not_tracked(tmp_path: Path) -> None:
    runs = combinations(["boston"], {"rounds": [1], "train": [False]})
    with pytest.raises(SafaError, match="tracked on this machine only"):
        next(run_sweep(runs, tmp_path / "swept", engine=Elsewhere(), track=["tensorboard"]))
    assert not (tmp_path / "swept").exists()
    with pytest.raises(SafaError, match="track needs out"):
        sweep("boston", rounds=1, track="tensorboard")


def test_a_tracker_that_fails_is_named_by_a_quiet_deployment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = Harness(tmp_path, {"rounds": 1})
    (tmp_path / "tensorboard").write_text("a file")

    def run(folder: Path, notify: Callable[[Any], None]) -> None:
        for event in run_events(folder, lambda: harness.coordinator.protocol.round > 1, sleep=lambda _: harness.step()):
            notify(event)

    show_run(argparse.Namespace(quiet=True, track=["tensorboard"]), "local", tmp_path / "run", run)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("safa: the tracker tensorboard failed and is given up for this run: ")


@pytest.mark.slow
def test_a_deployment_is_tracked_and_resumed(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"rounds": 4})
    folder, given = tmp_path / "run", argparse.Namespace(quiet=True, track=["tensorboard", "mlflow"])

    def follow(until: int) -> Callable[[Path, Callable[[Any], None]], None]:
        def run(folder: Path, notify: Callable[[Any], None]) -> None:
            over = lambda: harness.coordinator.protocol.round > until  # noqa: E731
            for event in run_events(folder, over, sleep=lambda _: harness.step()):
                notify(event)
            if load_run(folder).summary is None:
                raise SafaError("the server stopped")

        return run

    with pytest.raises(SafaError, match="the server stopped"):
        show_run(given, "local", folder, follow(2))
    assert in_mlflow(tmp_path, "run")[0].state == "KILLED"
    harness.kill_server()
    show_run(given, "local", folder, follow(4))
    run: Run = load_run(folder)
    for read in (in_tensorboard, in_mlflow):
        (seen,) = read(tmp_path, "run")
        check_rounds(seen, list(run.records()))
        assert seen.page == write_report(run, tmp_path / "page.html").read_bytes()
