"""Two stories of somebody who adds something in a distribution of their own, and changes nothing in the package.

One adds a protocol, the other an aggregator with a setting of its own. Each is listed, run, stopped, resumed, replayed
and deployed like those of the package. Commands run in processes that have the distribution on their path; `serve`
loads torch once and forks a process for every command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safa import load_run
from safa.aggregation import registry as aggregators
from safa.errors import SafaError
from safa.experiments.replay import replay
from safa.protocol import registry as protocols
from safa.protocol.records import Verdict
from safa.testing import TakenStep, check_aggregator, check_protocol
from tests.deploy.harness import Harness, apart, fed_again
from tests.programs import started

OLDEST_FIRST = '''
import numpy as np
from safa.protocol import Dispatch, Protocol
from safa.protocol.records import Verdict

NOBODY = np.empty(0, dtype=np.int64)

class OldestFirst(Protocol):
    """Those who hold the oldest model train first."""

    name = "oldest-first"

    def _invite(self, draws, expected_s):
        there = np.flatnonzero(self.active)
        order = np.lexsort((draws[there], self.versions[there]))
        return Dispatch(sync=np.sort(there[order[: self.quota]]), resume=NOBODY, deprecated=NOBODY)

    def _settle(self, clients, late):
        self.version = self.round
        weight = self.sizes[clients] / self.sizes[clients].sum()
        return np.full(len(clients), Verdict.PICKED, np.int8), weight, np.full(len(clients), self.version)
'''
CLIPPED = '''
import torch
from safa.aggregation import Aggregator
from safa.errors import SafaError
from safa.protocol.records import Rule

class Clipped(Aggregator):
    """The mean of the deltas, each clipped to a norm."""

    name = "clipped"
    rules = frozenset({Rule.AVERAGE, Rule.CACHE})

    def __init__(self, *, clip=1.0):
        if not clip > 0:
            raise SafaError(f"clip must be above 0, not {clip}")
        self.clip = clip

    def step(self, step):
        model, total, whole = self.versions.model, 0.0, 0.0
        for part in step.updates:
            deltas = part.deltas.double()
            weight = deltas.new_tensor(part.weight)
            scale = (self.clip / deltas.norm(dim=1)).clamp(max=1.0)
            total, whole = total + (weight * scale) @ deltas, whole + float(weight.sum())
        return model + (total / whole).to(model) if whole else model
'''
METADATA = "Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n"
ENTRY_POINTS = """
[safa.protocols]
oldest-first = elsewhere_protocol:OldestFirst

[safa.aggregators]
clipped = elsewhere_aggregator:Clipped
"""
BROKEN = "broken = nowhere:Nothing"
SMALL = "--clients 5 --fraction 0.6 --rounds 3 --checkpoint-every 1 --threads 1 --quiet"
RESULTS = ("config.toml", "rounds.jsonl", "summary.json", "model.safetensors")
SAME = "The model trained again from the records is equal to the run's own.\n"
THREE_OF_FIVE = {"clients": 5, "rounds": 4, "fraction": 0.6, "threads": 1}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a distribution in it, the way that pip lays it out."""
    return install(tmp_path_factory.mktemp("elsewhere"), ENTRY_POINTS)


def install(place: Path, entry_points: str) -> Path:
    (place / "elsewhere_protocol.py").write_text(OLDEST_FIRST)
    (place / "elsewhere_aggregator.py").write_text(CLIPPED)
    (place / "elsewhere-1.0.dist-info").mkdir()
    (place / "elsewhere-1.0.dist-info" / "METADATA").write_text(METADATA)
    (place / "elsewhere-1.0.dist-info" / "entry_points.txt").write_text(entry_points)
    return place


@pytest.fixture
def _installed(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The distribution is there in this process, too."""
    monkeypatch.syspath_prepend(elsewhere)
    yield
    for name in ("elsewhere_protocol", "elsewhere_aggregator"):
        sys.modules.pop(name, None)


# -- commands ----------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Run the commands that come in, a line each, each in a forked process; answer each with how it ended."""
    import torch._dynamo  # noqa: F401  (loads it before the forks)

    import safa.training  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_forked(**json.loads(line))), flush=True)


def _forked(arguments: list[str], folder: str, kill_at: str) -> list[Any]:
    """The exit code of a command, negative for a signal, and what it printed on both channels."""
    written = [Path(f"{folder}.{name}") for name in ("out", "err")]
    child = os.fork()
    if child == 0:
        _run_here(arguments, folder, kill_at, written)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [code, *(file.read_text() for file in written)]


def _run_here(arguments: list[str], folder: str, kill_at: str, written: list[Path]) -> None:
    """Run a command and end; the process is killed when it touches the checkpoint of that name."""
    from safa.cli.program import main

    for file, channel in zip(written, (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), channel)
    os.chdir(folder)
    if kill_at:
        sys.addaudithook(partial(_kill_at, kill_at))
    code = 99  # an exception that nobody has caught
    try:
        code = main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _kill_at(name: str, event: str, arguments: tuple[object, ...]) -> None:
    files = [Path(argument) for argument in arguments if isinstance(argument, str | Path)]
    if any(file.parent.name == "checkpoint" and name in file.name for file in files):
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Shell:
    """Runs commands in a folder, each in a process of its own."""

    server: subprocess.Popen[str]
    folder: Path

    def __call__(self, *command: str, kill_at: str = "") -> tuple[int, str, str]:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        request = {"arguments": " ".join(command).split(), "folder": str(self.folder), "kill_at": kill_at}
        print(json.dumps(request), file=self.server.stdin, flush=True)
        code, out, err = json.loads(self.server.stdout.readline())
        return code, out, err

    def works(self, *command: str) -> str:
        """What a command prints that ends well and has nothing to complain about."""
        code, out, err = self(*command)
        assert (code, err) == (0, "")
        return out

    def refuses(self, command: str) -> str:
        """The one sentence of a command that is refused; it has written nothing."""
        before = sorted(self.folder.rglob("*"))
        code, out, err = self(command)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert sorted(self.folder.rglob("*")) == before
        return err.removeprefix("safa: ").rstrip("\n")

    def results(self, name: str) -> list[bytes]:
        """What a run comes to, byte by byte."""
        return [(self.folder / name / file).read_bytes() for file in RESULTS]


def _environment(elsewhere: Path) -> dict[str, str]:
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, (str(elsewhere), os.environ.get("PYTHONPATH"), root)))
    return os.environ | {"PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def server(elsewhere: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.test_stories"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started(command, env=_environment(elsewhere), **pipes) as process:
        yield process


@pytest.fixture
def shell(server: subprocess.Popen[str], tmp_path: Path) -> Shell:
    folder = tmp_path / "work"
    folder.mkdir()
    return Shell(server, folder)


def safa(elsewhere: Path, folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it."""
    line = [sys.executable, "-m", "safa", *command.split()]
    return subprocess.run(line, env=_environment(elsewhere), cwd=folder, capture_output=True, text=True, check=False)


def stopped_and_resumed(shell: Shell, command: str) -> None:
    """A run that is killed over its second checkpoint, and resumed, comes to the same bytes as one that is not."""
    shell.works(f"{command} --out whole", SMALL)
    code, _, _ = shell(f"{command} --out stopped", SMALL, kill_at="000002")
    assert code == -signal.SIGKILL
    assert not (shell.folder / "stopped" / "summary.json").exists()
    assert list((shell.folder / "stopped" / "checkpoint").iterdir())
    shell.works("run --resume stopped --quiet")
    assert shell.results("stopped") == shell.results("whole")
    assert shell.works("replay whole") == SAME


# -- a protocol --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
def test_a_protocol_is_listed_and_run_as_a_user_types_it(elsewhere: Path, tmp_path: Path) -> None:
    listed = safa(elsewhere, tmp_path, "protocols")
    assert "oldest-first  Those who hold the oldest model train first." in listed.stdout
    assert listed.stdout.index("fedbuff") < listed.stdout.index("oldest-first")
    done = safa(elsewhere, tmp_path, f"run digits --protocol oldest-first {SMALL} --out run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    accuracies = [record.metrics["accuracy"] for record in load_run(tmp_path / "run").records()]
    assert len(accuracies) == 3
    assert all(0 < accuracy <= 1 for accuracy in accuracies)


@pytest.mark.slow
def test_a_protocol_is_stopped_resumed_and_replayed(shell: Shell) -> None:
    stopped_and_resumed(shell, "run digits --protocol oldest-first")


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
def test_a_protocol_is_deployed(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"task": "digits", "protocol": "oldest-first", **THREE_OF_FIVE})
    harness.run(until=harness.in_round(3))
    harness.kill_server()
    run = harness.run()
    assert [record.ended_by.name for record in run.records()] == ["NOBODY_LEFT"] * 4
    first, second = (set(record.sent.tolist()) for record in list(run.records())[:2])
    assert first | second == {0, 1, 2, 3, 4}  # who was not asked in the first round goes first in the second
    assert apart(replay(run), run.model()) <= 1e-6
    assert apart(fed_again(run), run.model()) <= 1e-6


@pytest.mark.usefixtures("_installed")
def test_a_protocol_keeps_the_contract() -> None:
    check_protocol(lambda sizes: protocols.build("oldest-first", sizes, {"fraction": 0.5}), scripts=3)


@pytest.mark.slow
def test_a_protocol_is_refused_in_one_sentence(shell: Shell) -> None:
    run = "run digits --protocol oldest-first --out run"
    assert shell.refuses(f"{run} --set age=3") == "oldest-first has no setting 'age'; it has fraction, round_limit_s"
    assert shell.refuses(f"{run} --lag-tolerance 3") == (
        "lag_tolerance has no effect with protocol = oldest-first; it is for protocol = safa"
    )
    assert shell.refuses(f"{run} --clock paper") == (
        "the paper clock knows safa, fedavg, fedcs and local only; run oldest-first with clock = causal"
    )
    assert shell.refuses(f"{run} --aggregator own").startswith(
        "the aggregator own needs a protocol that lets every client train its own model; oldest-first averages updates"
    )


# -- an aggregator -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_aggregator_is_listed_and_run_as_a_user_types_it(elsewhere: Path, tmp_path: Path) -> None:
    listed = safa(elsewhere, tmp_path, "aggregators")
    assert "clipped           The mean of the deltas, each clipped to a norm." in listed.stdout
    command = f"run digits --protocol fedavg --aggregator clipped --set aggregator.clip=0.5 {SMALL} --out run"
    done = safa(elsewhere, tmp_path, command)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert load_run(tmp_path / "run").settings.aggregator_options == {"clip": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--protocol fedavg --server-optimiser adam", "--protocol safa"])
def test_an_aggregator_is_stopped_resumed_and_replayed(shell: Shell, more: str) -> None:
    stopped_and_resumed(shell, f"run digits --aggregator clipped --set aggregator.clip=0.5 {more}")
    shell.works(f"run digits --aggregator clipped --set aggregator.clip=0.1 {more} --out other", SMALL)
    assert shell.results("other")[1:] != shell.results("whole")[1:]  # the setting has reached the aggregator


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("more", [{"protocol": "fedavg", "server_optimiser": "adam"}, {"protocol": "safa"}])
def test_an_aggregator_is_deployed(tmp_path: Path, more: dict[str, Any]) -> None:
    own = {"task": "digits", "aggregator": "clipped", "aggregator_options": {"clip": 0.5}}
    harness = Harness(tmp_path, own | THREE_OF_FIVE | more)
    harness.run(until=harness.in_round(3))
    harness.kill_server()
    run = harness.run()
    assert all(np.any(record.verdict == Verdict.PICKED) for record in run.records())
    assert apart(replay(run), run.model()) <= 1e-6
    assert apart(fed_again(run), run.model()) <= 1e-6


def clipped_mean(steps: Any) -> Any:
    """The literal formula: w + the mean of the deltas, weighted as the record says, each clipped to the norm 0.5."""
    step: TakenStep = steps[-1]
    deltas = step.rows - step.start
    moves = [delta * min(1.0, 0.5 / max(float(np.linalg.norm(delta)), 1e-300)) for delta in deltas]
    return step.before + np.average(moves, axis=0, weights=step.weight) if len(moves) else step.before


@pytest.mark.usefixtures("_installed")
def test_an_aggregator_keeps_the_contract() -> None:
    make = aggregators.find("clipped")
    check_aggregator(lambda: make(clip=0.5), naive=clipped_mean, refused=[lambda: make(clip=0.0)], scripts=2)  # type: ignore[call-arg]


@pytest.mark.slow
def test_an_aggregator_is_refused_in_one_sentence(shell: Shell) -> None:
    run = "run digits --out run --aggregator clipped"
    assert shell.refuses(f"{run} --set aggregator.clop=1") == (
        "clipped has no setting 'clop' (did you mean clip?); it has clip"
    )
    assert shell.refuses(f"{run} --set aggregator.clip=-1") == "clip must be above 0, not -1"
    assert shell.refuses(f"{run} --protocol fedbuff") == (
        "the aggregator clipped needs a protocol that gives every client a share of a cache or averages updates; "
        "fedbuff adds up deltas"
    )
    assert shell.refuses(f"{run} --set aggregator.clip=tight") == (
        "clipped refuses its settings: '>' not supported between instances of 'str' and 'int'"
    )
    assert shell.refuses(f"{run}s").startswith(
        "there is no aggregator 'clippeds' (did you mean clipped?); there are mean,"
    )


@pytest.mark.parametrize("kind", ["protocols", "aggregators"])
def test_what_cannot_be_loaded_is_named_and_in_the_way_of_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    point = "oldest-first = elsewhere_protocol:OldestFirst" if kind == "protocols" else "mean = nowhere:Mean"
    install(tmp_path, f"[safa.{kind}]\n{BROKEN}\n{point}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "elsewhere_protocol", raising=False)
    registry: Any = protocols if kind == "protocols" else aggregators
    reason = f"the entry point 'broken' of safa.{kind} cannot be loaded: No module named 'nowhere'"
    for look in (registry.available, lambda: registry.find("broken")):
        with pytest.raises(SafaError) as refused:
            look()
        assert str(refused.value) == reason
    name = point.partition(" ")[0]
    assert registry.find(name).name == name
    monkeypatch.delitem(sys.modules, "elsewhere_protocol", raising=False)


if __name__ == "__main__":
    serve()
