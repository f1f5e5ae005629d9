"""Stories of somebody who brings data, and changes nothing in the package.

One adds a partition in a distribution of their own, one has a task with its clients' own shards in a module, and two
have files in LEAF's format. Each is run in a process of its own, killed, resumed by the command, replayed and shown.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safa import load_run
from tests import leaf
from tests.programs import started
from tests.test_stories import SAME, Shell, _environment

PARTITION = '''
import numpy as np
from safa.tasks import decides_sizes

@decides_sizes
def alternating(samples, rng, step):
    """Every client holds every so many samples, and the first one all that are left."""
    order, step = np.arange(len(samples.targets)), int(step)
    parts = [order[client::step] for client in range(1, samples.clients)]
    return [np.setdiff1d(order, np.concatenate(parts)), *parts]

def twice(samples, rng):
    """Everybody holds everything."""
    return [np.arange(len(samples.targets))] * samples.clients

def nothing(samples, rng):
    return samples.targets.reshape(-1, 7)
'''
TASK = """
import torch
from safa.tasks import Problem

def problem():
    x = torch.randn(120, 3, generator=torch.Generator().manual_seed(1))
    y = (x.sum(dim=1) > 0).long()
    clients = [(x[start : start + size], y[start : start + size]) for start, size in ((0, 10), (10, 30), (40, 60))]
    return Problem.of_clients(
        clients,
        test=(x[100:], y[100:]),
        model=lambda: torch.nn.Linear(3, 2),
        loss=torch.nn.functional.cross_entropy,
        metrics={"accuracy": lambda output, target: (output.argmax(dim=1) == target).float().mean()},
    )
"""
LEAF_TASKS = """
from pathlib import Path
from safa.tasks.leaf import femnist, shakespeare

HERE = Path(__file__).parent

def images():
    return femnist(HERE / "images", width=2)

def texts():
    return shakespeare(HERE / "texts", embedding=4, hidden=8, layers=1)
"""
METADATA = "Metadata-Version: 2.1\nName: elsewhere-data\nVersion: 1.0\n"
ENTRY_POINTS = """
[safa.partitions]
alternating = elsewhere_partition:alternating
twice = elsewhere_partition:twice
nothing = elsewhere_partition:nothing
"""
QUICK = "--rounds 3 --fraction 0.6 --checkpoint-every 1 --threads 1 --quiet"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distribution that adds partitions, modules with tasks, and data in LEAF's format."""
    place = tmp_path_factory.mktemp("elsewhere")
    (place / "elsewhere_data-1.0.dist-info").mkdir()
    (place / "elsewhere_data-1.0.dist-info" / "METADATA").write_text(METADATA)
    (place / "elsewhere_data-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    (place / "elsewhere_partition.py").write_text(PARTITION)
    (place / "my_task.py").write_text(TASK)
    (place / "my_leaf.py").write_text(LEAF_TASKS)
    leaf.write_images(place / "images")
    leaf.write_texts(place / "texts")
    return place


@pytest.fixture(scope="module")
def server(elsewhere: Path) -> Iterator[subprocess.Popen[str]]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started([sys.executable, "-m", "tests.test_stories"], env=_environment(elsewhere), **pipes) as process:
        yield process


@pytest.fixture
def shell(server: subprocess.Popen[str], tmp_path: Path) -> Shell:
    (tmp_path / "work").mkdir()
    return Shell(server, tmp_path / "work")


def stopped_resumed_and_replayed(shell: Shell, task: str, options: str, kill_at: str = "000002") -> None:
    """A run that is killed over a checkpoint, and resumed, comes to the same bytes as one that is not."""
    shell.works(f"run {task} {options} --out whole")
    code, _, _ = shell(f"run {task} {options} --out stopped", kill_at=kill_at)
    assert code == -signal.SIGKILL
    assert not (shell.folder / "stopped" / "summary.json").exists()
    assert list((shell.folder / "stopped" / "checkpoint").iterdir())
    own = task if ":" in task else ""
    shell.works(f"run {own} --resume stopped --quiet")
    assert shell.results("stopped") == shell.results("whole")
    assert shell.works(f"replay whole {f'--task {own}' if own else ''}") == SAME


@pytest.mark.slow
def test_a_partition_is_listed_run_stopped_and_resumed(shell: Shell) -> None:
    listed = shell.works("partitions")
    summary = "Every client holds every so many samples, and the first one all that are left."
    assert ["alternating:STEP", *summary.split()] in [line.split() for line in listed.splitlines()]
    assert listed.index("natural") < listed.index("alternating")
    stopped_resumed_and_replayed(shell, "digits", f"--partition alternating:7 --clients 4 {QUICK}")
    shell.works(f"run digits --partition alternating:5 --clients 4 --out other {QUICK}")
    assert shell.results("other")[1:] != shell.results("whole")[1:]  # the parameter has reached the partition
    shell.works("run digits --partition alternating:7 --clients 4 --no-train --rounds 3 --out rounds --quiet")


@pytest.mark.slow
def test_a_partition_is_refused_in_one_sentence(shell: Shell) -> None:
    run = "run digits --clients 4 --out run --partition"
    assert shell.refuses(f"{run} twice") == "sample 0 is in a part more than once; a sample has one owner"
    assert shell.refuses(f"{run} nothing").startswith(
        "the partition nothing failed: ValueError: cannot reshape array of size"
    )
    assert shell.refuses(f"{run} alternating") == (
        "the partition alternating is written alternating:STEP, not 'alternating'"
    )
    assert shell.refuses(f"{run} alternating:x").startswith(
        "the partition alternating:x failed: ValueError: invalid literal"
    )
    assert shell.refuses(f"{run} altern").endswith(", natural, alternating, twice, nothing")
    assert shell.refuses(f"{run} alternating:7 --mean-size 9") == (
        "mean_size has no effect with partition = alternating:7, which decides what every client holds"
    )


@pytest.mark.slow
def test_a_task_with_shards_is_run_stopped_and_resumed(shell: Shell) -> None:
    stopped_resumed_and_replayed(shell, "my_task:problem", QUICK)
    settings = load_run(shell.folder / "whole").settings
    assert (settings.clients, settings.partition, settings.mean_size) == (3, "natural", 100 / 3)
    sentence = "the data are those of 3 clients, and not of 4"
    assert shell.refuses(f"run my_task:problem --clients 4 --out more {QUICK}") == sentence
    shell.works("run my_task:problem --no-train --rounds 3 --clients 2 --out rounds --quiet")
    assert (shell.folder / "rounds" / "rounds.jsonl").read_text().count("\n") == 3


@pytest.mark.slow
@pytest.mark.parametrize(("task", "options"), [("images", "--lr 0.1"), ("texts", "--lr 1.0")])
def test_leaf_files_are_learnt_stopped_resumed_replayed_and_shown(shell: Shell, task: str, options: str) -> None:
    rounds = f"--rounds 6 --fraction 0.2 --batch-size 4 --checkpoint-every 2 --threads 1 --quiet {options}"
    stopped_resumed_and_replayed(shell, f"my_leaf:{task}", rounds, kill_at="000004")
    run = load_run(shell.folder / "whole")
    assert (run.settings.clients, run.settings.partition) == (50, "natural")
    losses = [record.loss for record in run.records()]
    assert losses[0] is not None
    assert losses[-1] is not None
    assert losses[-1] < losses[0]
    shell.works("report whole")
    page = (shell.folder / "whole" / "report.html").read_text()
    assert f" on my_leaf:{task}</h1>" in page
    assert "50 clients, " in page
