"""Runs and sweeps side by side: `safa report A B ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from safa import load_run, simulate
from safa.cli.program import main
from safa.errors import SafaError
from safa.experiments.sweep import combinations, run_sweep
from safa.report import compare_page, compare_sections, write_report
from safa.report.page import Headline
from safa.runs import Run
from tests.report.test_pages import specs_of, text_of

ROUNDS = 6


def run(protocol: str, seed: int = 0, *, out: Path | None = None, fraction: float = 0.6) -> Run:
    return simulate("boston", protocol=protocol, rounds=ROUNDS, epochs=1, seed=seed, fraction=fraction, out=out)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs `safa` and `fedavg`, the sweep `swept` over both of these and two more seeds, and one of FedCS."""
    folder = tmp_path_factory.mktemp("compared")
    for name in ("safa", "fedavg"):
        run(name, out=folder / name)
    given: dict[str, list[Any]] = {"rounds": [ROUNDS], "epochs": [1], "fraction": [0.6]}
    for name, protocols in (("swept", ["safa", "fedavg"]), ("other", ["fedcs"])):
        list(run_sweep(combinations(["boston"], given | {"protocol": protocols, "seed": [1, 2]}), folder / name))
    return folder


def first(things: list[Path | Run]) -> list[str]:
    (headline,) = [block for block in compare_sections(things)[0].blocks if isinstance(block, Headline)]
    return [fact.value for fact in headline.facts]


def test_two_runs_are_called_by_what_differs(place: Path) -> None:
    page = compare_page([place / "safa", place / "fedavg"])
    said = text_of(page)
    assert "Comparison on boston" in said
    assert "Compared: safa , fedavg ." in said
    assert "Cannot tell one seed has no interval: add seeds" in said
    assert '"domain":["SAFA","FedAvg"]' in page.replace(" ", "") or '"domain":["FedAvg","SAFA"]' in page.replace(
        " ", ""
    )
    assert len(specs_of(page)) > 3


def test_runs_and_sweeps_are_put_together_by_their_settings(place: Path) -> None:
    said = text_of(compare_page([place / "safa", place / "swept", place / "fedavg", place / "other"]))
    assert "swept (4 runs)" in said
    assert "3 seeds compared one by one" in said
    assert "Not ranked, as they have not the same seeds: FedCS." in said, "it has two seeds, and the others have three"
    assert "swept SAFA" not in said, "the folder is no part of the name"


def test_the_same_run_twice_is_told_apart_by_its_folder(place: Path, tmp_path: Path) -> None:
    run("safa", out=tmp_path / "again")
    page = compare_page([place / "safa", tmp_path / "again"], target="accuracy=0.01")
    assert first([place / "safa", tmp_path / "again"])[2] == "1×"  # noqa: RUF001
    assert '"again"' in page


def test_what_is_given_twice_is_compared_once(place: Path) -> None:
    again = place / "other" / ".." / "safa"
    assert compare_page([place / "safa", place / "fedavg", again]) == compare_page([place / "safa", place / "fedavg"])


def test_runs_that_differ_in_much_are_called_by_their_folders(place: Path, tmp_path: Path) -> None:
    simulate("boston", protocol="fedavg", rounds=4, epochs=2, fraction=0.8, lr=0.01, out=tmp_path / "mine")
    assert '"domain":["mine","safa"]' in compare_page([tmp_path / "mine", place / "safa"]) or (
        '"domain":["safa","mine"]' in compare_page([tmp_path / "mine", place / "safa"])
    )


def test_runs_without_a_seed_in_common_are_not_ranked() -> None:
    said = text_of(compare_page([run("safa", 0), run("fedavg", 1)]))
    assert "Not ranked, as they have not the same seeds: FedAvg." in said
    assert "Accuracy over time" in said


def test_a_run_in_memory_and_one_that_is_not_finished(place: Path, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    for name in ("config.toml", "rounds.jsonl"):
        (tmp_path / "half" / name).write_bytes((place / "fedavg" / name).read_bytes())
    half = load_run(tmp_path / "half")
    assert half.summary is None
    assert len(first([run("safa"), half])) == 4


def test_a_comparison_is_written_where_it_is_told(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_report([place / "safa", place / "fedavg"]) == Path("comparison.html")
    assert main(["report", str(place / "safa"), str(place / "swept"), "--out", "page.html"]) == 0
    assert "Comparison on boston" in (tmp_path / "page.html").read_text()
    assert main(["report", str(place / "safa"), "--out", "one.html"]) == 0
    assert "SAFA on boston" in (tmp_path / "one.html").read_text()


def test_what_is_no_run_is_refused_and_nothing_is_written(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(place / "safa"), str(tmp_path), "--out", str(page)]) == 2
    assert f"{tmp_path} holds neither a run (config.toml) nor a sweep (results.csv)" in capsys.readouterr().err
    assert main(["report", str(place / "safa"), str(place / "fedavg"), "--target", "f1=1", "--out", str(page)]) == 2
    assert "there is no metric 'f1' to reach" in capsys.readouterr().err
    assert not page.exists()
    (tmp_path / "config.toml").write_bytes((place / "safa" / "config.toml").read_bytes())
    with pytest.raises(SafaError, match="has no finished round yet"):
        compare_page([place / "safa", tmp_path])


def test_a_hostile_name_is_only_text(place: Path, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    run("safa", out=tmp_path / name)
    page = compare_page([tmp_path / name, place / "safa"])
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page
