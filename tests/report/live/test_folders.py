"""What is found under a folder, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from safa.experiments.sweep import run_sweep
from safa.report.live.folders import Folders, Kind, kind_of
from safa.runs import write_config
from safa.runs.settings import Settings

SETTINGS = Settings.of("digits", rounds=2, train=False)


def run_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    write_config(folder, SETTINGS)
    return folder


def found(top: Path) -> dict[str, Kind]:
    folders = Folders(top)
    return {folders.name_of(path): kind for path, kind in folders.below(top.resolve())}


def test_every_kind_is_found_however_deep_and_what_is_in_it_belongs_to_it(tmp_path: Path) -> None:
    run_in(tmp_path / "a" / "b" / "run")
    (run_in(tmp_path / "deployed") / "deploy.toml").touch()
    list(run_sweep([SETTINGS], tmp_path / "sweep"))
    run_in(tmp_path / "arena" / "world" / "rates")
    (tmp_path / "arena" / "plan.toml").write_text('format = "safa arena 1"\n')
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "results.jsonl").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("theirs = true\n")
    run_in(tmp_path / "other" / "ours")
    run_in(tmp_path / ".hidden" / "run")
    assert found(tmp_path) == {
        "a/b/run": Kind.RUN,
        "arena": Kind.ARENA,
        "deployed": Kind.DEPLOYMENT,
        "other/ours": Kind.RUN,
        "paper": Kind.REPRODUCTION,
        "sweep": Kind.SWEEP,
    }
    assert kind_of(tmp_path / "sweep" / "runs" / "0001") is Kind.RUN


def test_what_is_made_later_is_found_too(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    assert list(folders.below(folders.top)) == []
    run_in(tmp_path / "new" / "run")
    assert [path.name for path, _ in folders.below(folders.top)] == ["run"]


def test_no_link_is_followed(tmp_path: Path) -> None:
    outside, top = run_in(tmp_path / "outside"), tmp_path / "top"
    run_in(top / "run")
    (top / "linked").symlink_to(outside)
    (top / "run" / "rounds.jsonl").symlink_to("/etc/passwd")
    assert found(top) == {}
    assert Folders(top).find("linked") is None
    assert kind_of(top / "run") is None


@pytest.mark.parametrize(
    "path",
    ["..", "../outside", "run/../../outside", "/etc", "run//x", ".", "run/.", "\0", "run\0", ".hidden", "nowhere"],
)
def test_no_path_leads_out(tmp_path: Path, path: str) -> None:
    run_in(tmp_path / "outside")
    run_in(tmp_path / "top" / "run")
    assert Folders(tmp_path / "top").find(path) is None
    assert Folders(tmp_path / "top").find("run") == (tmp_path / "top" / "run").resolve()
