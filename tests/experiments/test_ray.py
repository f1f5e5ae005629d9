"""Sweeps and training on a real Ray cluster with two nodes, of one core each."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safa import Run, resume, simulate, sweep
from safa.cli.program import main
from safa.cluster import QUIET, Workers, connect
from safa.errors import SafaError
from safa.experiments.engines import LocalEngine, make_engine
from safa.paper.collect import Results, collect
from safa.paper.grid import job
from safa.training import torch_threads
from safa.training.optimiser import Optimiser
from safa.training.setup import make_trainer
from tests.experiments import dying
from tests.programs import MARK, left_behind
from tests.test_docs import blocks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a cluster is, to which this process is connected."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setenv("RAY_worker_niceness", "0")  # as fast as the tests beside them
        patch.setenv(dying.PLACE, str(tmp_path_factory.mktemp("ray") / "die"))
        from ray.cluster_utils import Cluster

        node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        cluster: Any = Cluster(initialize_head=True, head_node_args=node)
        connect(cluster.address)
        try:
            cluster.add_node(**node)
            yield cluster.address
        finally:
            connect().shutdown()
            cluster.shutdown()
            for pid in left_behind(os.environ[MARK]):
                wait_for(pid)


def wait_for(pid: int) -> None:
    """Wait until a process has ended; workers notice by themselves that their node has."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        select.select([handle], [], [], 30)
        os.close(handle)


def kill_a_worker() -> Path:
    """Have the next worker killed that computes the loss of the problem in `dying`."""
    path = Path(os.environ[dying.PLACE])
    path.write_text(str(os.getpid()))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_address_where_nobody_answers_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main(["sweep", "boston", "--engine", "ray", "--address", f"127.0.0.1:{port}"]) == 2
    assert f"no Ray answers at 127.0.0.1:{port}" in capsys.readouterr().err


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["records", "nothing"])
def test_a_sweep_comes_to_the_same_bytes_as_here(address: str, keep: str, tmp_path: Path) -> None:
    command = f"sweep boston --no-train --rounds 5 --protocol safa,fedavg --seed 0-2 --quiet --keep {keep} --out"
    assert main([*command.split(), str(tmp_path / "here"), "--workers", "1"]) == 0
    assert main([*command.split(), str(tmp_path / "ray"), "--engine", "ray", "--address", address]) == 0
    assert files(tmp_path / "ray") == files(tmp_path / "here")


def test_a_sweep_comes_to_the_same_bytes_although_a_worker_is_killed(address: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"rounds": 3, "clients": 4, "seed": range(4), "keep": "models"}
    sweep("tests.experiments.dying:problem", **asked, out=tmp_path / "here")
    killed = kill_a_worker()
    sweep("tests.experiments.dying:problem", **asked, out=tmp_path / "ray", engine="ray", address=address)
    assert not killed.exists()
    assert files(tmp_path / "ray") == files(tmp_path / "here")
    assert "runs/0004/model.safetensors" in files(tmp_path / "ray")


KILLED = """
import os, signal, sys
from pathlib import Path
from safa.experiments.engines import RayEngine
from safa.experiments.sweep import combinations, run_sweep

runs = combinations(["boston"], {"rounds": [5], "seed": list(range(6)), "train": [False]})
for done, _ in enumerate(run_sweep(runs, Path(sys.argv[1]), engine=RayEngine(sys.argv[2])), start=1):
    if done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_sweep_whose_driver_was_killed_is_resumed_to_the_same_bytes(address: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"rounds": 5, "seed": range(6), "train": False}
    sweep("boston", **asked, out=tmp_path / "here")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "ray"), address]
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    assert (tmp_path / "ray" / "results.csv").read_bytes().count(b"\n") == 3
    sweep("boston", **asked, out=tmp_path / "ray", engine="ray")
    assert files(tmp_path / "ray") == files(tmp_path / "here")


def test_results_of_a_reproduction_are_kept_as_they_come_in(address: str, tmp_path: Path) -> None:
    jobs = [job("as printed", "boston", "safa", crash_rate=0.3, fraction=0.3, train=False, seed=s) for s in range(3)]
    here, there = (Results(tmp_path / name) for name in ("here", "ray"))
    assert len(list(collect(jobs, here, engine=LocalEngine()))) == 3
    assert len(list(collect(jobs, there, engine=make_engine("ray", [], address=address)))) == 3
    for each in jobs:
        (first, second) = (results.get(each) for results in (here, there))
        assert first is not None
        assert second is not None
        assert first["summary"] == second["summary"]


@pytest.mark.usefixtures("address")
def test_the_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("docs/cluster.md")
    exec(example, {})
    assert capsys.readouterr().out == "4 runs\n"


@pytest.mark.usefixtures("address")
def test_an_error_of_a_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "sweep boston --rounds 2 --clients 4 --seed 0 --device cuda:77 --quiet --engine ray --out"
    assert main([*command.split(), str(tmp_path / "ray")]) == 2
    assert capsys.readouterr().err.endswith("which every worker needs\n")
    with pytest.raises(SafaError, match=r"^no such thing$"):
        list(make_engine("ray", []).finished({"run 1": refuse}))


def refuse() -> None:
    raise SafaError("no such thing")


@pytest.mark.usefixtures("address")
def test_what_is_lost_again_and_again_is_named() -> None:
    with pytest.raises(SafaError, match=r"^run 7 was lost with its worker 3 times: "):
        list(make_engine("ray", [], workers=1).finished({"run 7": die}))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- the clients of one run --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("address")
def test_a_run_comes_to_the_same_bytes_with_its_clients_on_workers(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"rounds": 4, "clients": 30, "threads": 1, "epochs": 2}
    here, there = (simulate("boston", **asked, trainer=trainer) for trainer in ("batched", "ray"))
    assert [record.to_json() for record in here.records()] == [record.to_json() for record in there.records()]
    assert model(here) == model(there)


def model(run: Run) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in run.model().items()}


@pytest.mark.usefixtures("address")
def test_updates_are_those_of_the_batched_trainer_although_a_worker_is_killed() -> None:
    problem = dying.problem()
    shards = [np.arange(k % 5, 60, 1 + k % 4) for k in range(20)]
    how: dict[str, Any] = {"batch_size": 8, "optimiser": Optimiser(lr=0.1), "device": torch.device("cpu")}
    with torch_threads(1):
        batched, on_ray = (make_trainer(kind, problem, shards, **how, shuffle=True) for kind in ("batched", "ray"))
        rng = np.random.default_rng(1)
        clients = rng.permutation(20)[:17]
        start = torch.from_numpy(rng.normal(size=(17, batched.layout.size))).float()
        amount: dict[str, Any] = {
            "steps": rng.integers(1, 9, 17),
            "lr": rng.uniform(0.01, 0.1, 17),
            "bases": rng.integers(0, 3, 17),
            "correction": 0.01 * start,
        }
        expected, found = (trainer.train(clients, start, **amount) for trainer in (batched, on_ray))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        killed = kill_a_worker()
        again = on_ray.train(clients, start, **amount)
    assert not killed.exists()
    assert torch.equal(again, found)


@pytest.mark.usefixtures("address")
def test_a_worker_that_no_machine_has_room_for_is_refused() -> None:
    with pytest.raises(SafaError, match="no machine of the Ray cluster has 3 cores, which every worker needs"):
        Workers(connect(), lambda: refuse, cores=3)


@pytest.mark.usefixtures("address")
def test_a_problem_that_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()
    problem = replace(dying.problem(), loss=lambda output, target: (dying.loss(output, target), lock)[0])
    how: dict[str, Any] = {"batch_size": 8, "optimiser": Optimiser(lr=0.1), "device": torch.device("cpu")}
    with pytest.raises(SafaError, match="the problem cannot be sent to the workers of Ray: "):
        make_trainer("ray", problem, [np.arange(60)], **how)


# -- without Ray -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("sweep boston --engine ray --out out", "Ray is not installed: pip install 'safa[ray]'"),
        ("run boston --trainer ray --out out", "Ray is not installed: pip install 'safa[ray]'"),
        (
            "sweep boston --address 10.0.0.1:6379 --out out",
            "an address is that of a Ray cluster, and needs the engine ray",
        ),
        ("run boston --address 10.0.0.1:6379 --out out", "--address is that of a Ray cluster, and needs --trainer ray"),
        (
            "sweep boston --engine ray --trainer ray --out out",
            "the engine ray spreads whole runs, and the trainer ray the clients of one; choose one of them",
        ),
        ("sweep boston --engine rai --out out", "engine must be one of local, ray, not 'rai'"),
    ],
)
def test_what_is_missing_is_one_sentence(
    command: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(command.split()) == 2
    assert capsys.readouterr().err == f"safa: {sentence}\n"
    assert not Path("out").exists()


def test_a_run_on_ray_is_not_resumed_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate("boston", rounds=1, clients=3, out=tmp_path)
    (tmp_path / "summary.json").unlink()
    config = tmp_path / "config.toml"
    config.write_text(config.read_text().replace('trainer = "batched"', 'trainer = "ray"'))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SafaError, match="Ray is not installed"):
        resume(tmp_path)
