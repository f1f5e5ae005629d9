"""What the docs show is run, so that it stays true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safa.aggregation.registry import available, optimisers
from safa.fleet import make_fleet
from safa.protocol import FedAvg, Protocol
from safa.runs import Settings
from safa.server import Server
from safa.simulation import drive
from safa.testing import check_protocol
from safa.vocabulary import FLEETS

ROOT = Path(__file__).parent.parent


def blocks(page: str) -> list[str]:
    """The Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("README.md")[0], {})
    shown = re.findall(r"```\n(safa: accuracy.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    accuracy = re.compile(r"(\w+): accuracy (\d\.\d+)")
    printed, said = dict(accuracy.findall(capsys.readouterr().out)), dict(accuracy.findall(shown))
    assert printed.keys() == said.keys() == {"safa", "fedavg", "fedasync"}
    for protocol, value in said.items():  # other processors round differently
        assert float(printed[protocol]) == pytest.approx(float(value), abs=0.02)


def test_the_problem_of_the_docs_is_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("docs/learning.md")[0], {})
    assert "['0.weight', '0.bias', '2.weight', '2.bias']" in capsys.readouterr().out


def test_the_run_of_the_docs_is_resumed_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    problem, resuming = blocks("docs/learning.md")[:2]
    names: dict[str, Any] = {}
    exec(problem, names)
    exec(resuming.replace("out=", "checkpoint_every=2, out=").split("run = ")[0], names)
    (tmp_path / "runs" / "mine" / "summary.json").unlink()  # as if it had been stopped
    exec("import safa\nrun = " + resuming.split("run = ")[1], names)
    assert all((names["model"][name] == tensor).all() for name, tensor in names["run"].model().items())


def test_the_local_work_of_the_docs_learns(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("docs/local-work.md")[0], {"__name__": "local_work"})
    reached = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(reached) == 4
    assert min(reached) > 0.5


def test_the_protocol_of_the_docs_keeps_the_contract() -> None:
    names: dict[str, Any] = {}
    protocol_example, _, test_example = blocks("docs/own-protocol.md")
    exec(protocol_example, names)
    first_come: type[Protocol] = names["FirstCome"]
    check_protocol(lambda sizes: first_come(sizes, fraction=0.3, round_limit_s=9.0), scripts=10)
    exec(test_example, names)
    assert np.isfinite(first_come([1.0], fraction=1.0).quota)


def test_the_protocol_of_the_docs_that_asks_for_parts_has_shorter_rounds() -> None:
    names: dict[str, Any] = {}
    exec(blocks("docs/own-protocol.md")[1], names)
    sparing: type[FedAvg] = names["Sparing"]
    check_protocol(lambda sizes: sparing(sizes, fraction=0.5, round_limit_s=9.0), scripts=10)
    settings = Settings.of("boston", protocol="fedavg", fraction=0.5, rounds=5, crash_rate=0.0)
    fleet = make_fleet(settings)
    all_of_it, parts = (
        list(drive(Server(kind(fleet.sizes, fraction=0.5), seed=0, rounds=5), fleet, settings))
        for kind in (FedAvg, sparing)
    )
    assert {share for record in parts for share in record.work.tolist()} == {0.5, 1.0}
    assert all(one.length_s < other.length_s for one, other in zip(parts, all_of_it, strict=True))


def test_the_aggregator_of_the_docs_keeps_the_contract() -> None:
    names: dict[str, Any] = {}
    aggregator_example, test_example = blocks("docs/aggregation.md")
    exec(aggregator_example, names)
    exec(test_example, names)
    names["test_clipped_mean"]()


def test_the_fleets_of_the_docs_are_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    by_name, from_python, from_fedscale = blocks("docs/fleets.md")
    exec(by_name, {})
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(FLEETS)
    exec(from_python, {})
    assert capsys.readouterr().out == "(2.0, 1.0, 0.2) (20.0, 5.0)\n"
    names: dict[str, Any] = {}
    exec(from_fedscale, names)
    assert names["run"].settings.speeds == tuple(names["slower"])


def test_every_aggregator_and_optimiser_has_a_line_in_the_docs() -> None:
    page = (ROOT / "docs" / "aggregation.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE)) >= {*available(), *optimisers()}


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))],
)
def test_what_the_docs_link_to_is_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = {link.partition("#")[0] for link in re.findall(r"\]\(([^):]+)\)", text)}
    missing = [target for target in targets if target and not ((ROOT / page).parent / target).exists()]
    assert not missing, missing


def test_the_picture_is_drawn_from_the_run_it_names() -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    exec((ROOT / "docs" / "client_map.py").read_text(encoding="utf-8"), names)
    drawn = names["draw"](list(names["run_rounds"](names["SETTINGS"])))
    assert (ROOT / "docs" / "client-map.svg").read_text(encoding="utf-8").strip() == drawn.strip()
