"""The folder of a run: its checkpoints, what may be replaced, and what is told of damage."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from safa import simulate
from safa.cli.program import main
from safa.errors import SafaError
from safa.experiments import replay
from safa.experiments.sweep import run_sweep
from safa.runs import Run, RunWriter, has_checkpoint, load_run, new_folder
from safa.runs.lock import hold, is_written
from safa.runs.settings import Settings
from safa.runs.storage import read_sealed, write_atomically, write_sealed

SETTINGS = Settings.of("boston", clients=3, rounds=9)


def with_checkpoints(folder: Path, *rounds: int) -> Run:
    """A run with a checkpoint after each of these rounds, of which the last two are kept."""
    writer = RunWriter.begin(folder, SETTINGS)
    for number in rounds:
        writer.checkpoint(number, {"model": torch.full((2, 3), float(number))}, {"note": f"after {number}"})
    writer.close()
    return load_run(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path / "run", 1, 2, 3)
    assert names(tmp_path / "run") == ["state-000002.safetensors", "state-000003.safetensors"]
    found = run.load_checkpoint()
    assert (found.rounds, found.notes, found.problems) == (3, {"note": "after 3"}, ())
    assert found.state["model"].tolist() == [[3.0] * 3] * 2
    assert has_checkpoint(tmp_path / "run")
    assert not has_checkpoint(tmp_path)


@pytest.mark.parametrize("place", [4, 40, 300, -1])
def test_a_flipped_bit_is_found_wherever_it_is(place: int, tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path / "run", 1, 2)
    flip(tmp_path / "run" / "checkpoint" / "state-000002.safetensors", place)
    found = run.load_checkpoint()
    assert (found.rounds, found.notes) == (1, {"note": "after 1"})
    (problem,) = found.problems
    assert "state-000002.safetensors is damaged" in problem


def test_every_way_to_lose_a_checkpoint_has_its_sentence(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path / "run", 1, 2)
    old, new = (tmp_path / "run" / "checkpoint" / f"state-00000{n}.safetensors" for n in (1, 2))
    new.write_bytes(old.read_bytes())
    assert "it was made after round 1" in run.load_checkpoint().problems[0]
    new.write_bytes(new.read_bytes()[:-5])
    assert "not a whole safetensors file" in run.load_checkpoint().problems[0]
    new.write_bytes(b"")
    assert "not a whole safetensors file" in run.load_checkpoint().problems[0]
    new.unlink()
    new.mkdir()
    assert "Is a directory" in run.load_checkpoint().problems[0]
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 9", "rounds = 8"))
    found = load_run(tmp_path / "run").load_checkpoint()
    assert found.rounds == 0
    assert "made for other settings" in found.problems[1]
    assert with_checkpoints(tmp_path / "other", 5, 6).load_checkpoint(most=5).rounds == 5


def test_a_checkpoint_is_used_by_a_version_that_has_more_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is what the run's own file names, not what this version would write."""
    run = with_checkpoints(tmp_path / "run", 4)
    earlier = Settings.to_toml
    monkeypatch.setattr(Settings, "to_toml", lambda settings: earlier(settings) + "newer = 1\n")
    assert run.load_checkpoint().rounds == 4


def test_a_damaged_checkpoint_does_not_outlive_the_next_one(tmp_path: Path) -> None:
    """After a fall back to an older one, there are two sound ones again as soon as possible."""
    run = with_checkpoints(tmp_path / "run", 4, 8)
    flip(tmp_path / "run" / "checkpoint" / "state-000008.safetensors", -1)
    writer = RunWriter.resume(run, 4)
    writer.checkpoint(5, {"model": torch.zeros(1)})
    writer.close()
    assert names(tmp_path / "run") == ["state-000004.safetensors", "state-000005.safetensors"]


def test_a_finished_run_has_no_checkpoints_and_keeps_what_others_put_there(tmp_path: Path) -> None:
    for name in ("bare", "used"):
        writer = RunWriter.begin(tmp_path / name, SETTINGS)
        writer.checkpoint(1, {"model": torch.zeros(1)})
        if name == "used":
            (tmp_path / "used" / "checkpoint" / "notes.txt").write_text("mine")
        writer.close({"rounds": 1})
    assert not (tmp_path / "bare" / "checkpoint").exists()
    assert names(tmp_path / "used") == ["notes.txt"]


def test_a_sealed_file_gives_back_every_type_and_shape(tmp_path: Path) -> None:
    tensors = {
        "none": torch.empty(0, 4),
        "one": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "strided": torch.arange(5.0)[None, ::5].clone(),
    }
    write_sealed(tmp_path / "file", tensors, {"a": "ä\n"})
    notes, found = read_sealed(tmp_path / "file")
    assert notes == {"a": "ä\n"}
    assert all(torch.equal(tensors[name], found[name]) and tensors[name].dtype == found[name].dtype for name in tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(SafaError, match=r"cannot read .*: No such file or directory"):
        read_sealed(tmp_path / "other")


@pytest.mark.parametrize("sealed", [True, False])
def test_a_full_disk_leaves_the_old_file_and_is_reported_with_its_name(sealed: bool, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    (tmp_path / "file.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as told:
        write_sealed(file, {"a": torch.zeros(9)}, {}) if sealed else write_atomically(file, b"new")
    assert told.value.filename == str(file)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


# -- replacing a folder ------------------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes]:
    """All files of a folder with their content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_force_replaces_what_this_program_wrote_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    writer = RunWriter.begin(folder, SETTINGS)
    writer.checkpoint(1, {"model": torch.zeros(1)})
    writer.close({"rounds": 1})
    writer = RunWriter.begin(folder, SETTINGS, force=True)
    writer.checkpoint(1, {"model": torch.zeros(1)})
    writer.close()
    mine = ("thesis.tex", "checkpoint/notes.txt", "clients/ann/state.safetensors", "flower/poem.txt", "data/deep/x")
    for name in mine:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
    (folder / "report.html").write_text("old")
    (tmp_path / "elsewhere").write_text("precious")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    RunWriter.begin(folder, SETTINGS, force=True).close()
    assert tree(folder).keys() == {*mine, "link", "config.toml", "rounds.jsonl"}
    assert {tree(folder)[name] for name in (*mine, "link")} == {b"precious"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", 'title = "a site of mine"\n'),
        ("config.toml", "not toml"),
        ("config.toml", Settings.of("boston").to_toml()),
        ("config.toml", 'format = "safa run 99"\n'),
        ("results.csv", "task,protocol,score\n"),
        ("results.csv", ""),
    ],
)
def test_a_folder_that_somebody_else_wrote_is_not_replaced(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "thesis.tex").write_text("precious")
    before = tree(tmp_path)
    with pytest.raises(SafaError, match="holds other files; choose an empty or new folder"):
        RunWriter.begin(tmp_path, SETTINGS, force=True)
    assert tree(tmp_path) == before


def test_what_is_not_the_file_it_should_be_keeps_everything(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "state-000001.safetensors").write_text("precious")
    with_checkpoints(tmp_path / "linked", 1)
    for path in (tmp_path / "linked" / "checkpoint").iterdir():
        path.unlink()
    (tmp_path / "linked" / "checkpoint").rmdir()
    (tmp_path / "linked" / "checkpoint").symlink_to(tmp_path / "elsewhere")
    with_checkpoints(tmp_path / "folders", 1)
    (tmp_path / "folders" / "report.html").mkdir()
    before = tree(tmp_path)
    for name in ("linked", "folders"):
        with pytest.raises(SafaError, match="is not what this program wrote under that name"):
            RunWriter.begin(tmp_path / name, SETTINGS, force=True)
    assert tree(tmp_path) == before


def test_a_deployment_is_replaced_with_all_that_belongs_to_it_but_not_while_its_server_runs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with_checkpoints(folder, 1)
    ours = ("flower/link.json", "flower/home/config.toml", "clients/c-0/state.safetensors", "deploy.toml",
            "deployment.json", "roster.json", "nodes.json", "unblock.json", "expel.json", "server.log",
            "status.json")  # fmt: skip
    for name in (*ours, "clients/c-0/diary.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    with hold(folder), pytest.raises(SafaError, match="a server works on the run in"):
        RunWriter.begin(folder, SETTINGS, force=True)
    assert tree(folder).keys() >= {*ours}
    RunWriter.begin(folder, SETTINGS, force=True).close()
    assert tree(folder).keys() == {"config.toml", "rounds.jsonl", "clients/c-0/diary.txt"}


def test_others_see_whether_a_run_is_being_written(tmp_path: Path) -> None:
    rounds = tmp_path / "run" / "rounds.jsonl"
    assert not is_written(rounds)
    writer = RunWriter.begin(tmp_path / "run", SETTINGS)
    assert is_written(rounds)
    writer.close()
    assert not is_written(rounds)
    with rounds.open("rb") as looking:  # another process that looks at the same time
        fcntl.flock(looking.fileno(), fcntl.LOCK_SH)
        assert not is_written(rounds)


def test_a_sweep_is_replaced_with_its_runs_and_nothing_else(tmp_path: Path) -> None:
    assert len(list(run_sweep([SETTINGS], tmp_path))) == 1
    (tmp_path / "runs" / "0002.part-77").mkdir()
    (tmp_path / "runs" / "0002.part-77" / "config.toml.part").touch()
    mine = ("notes.txt", "runs/notes.txt", "runs/0001/notes.txt")
    for name in mine:
        (tmp_path / name).write_text("mine")
    with pytest.raises(SafaError, match="already holds a run"):
        new_folder(tmp_path, force=False)
    with hold(tmp_path), pytest.raises(SafaError, match="a sweep works on the run in"):
        new_folder(tmp_path, force=True)
    new_folder(tmp_path, force=True)
    assert tree(tmp_path) == dict.fromkeys(mine, b"mine")


def test_what_is_not_the_run_of_a_sweep_keeps_everything(tmp_path: Path) -> None:
    assert len(list(run_sweep([SETTINGS], tmp_path / "sweep"))) == 1
    (tmp_path / "sweep" / "runs" / "0001").rename(tmp_path / "elsewhere")
    (tmp_path / "sweep" / "runs" / "0001").symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    with pytest.raises(SafaError, match="is not what this program wrote under that name"):
        new_folder(tmp_path / "sweep", force=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["config.toml.part", "sweep.json.part"])
def test_a_folder_in_which_a_program_was_killed_at_once_is_empty(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("half of it")
    RunWriter.begin(tmp_path, SETTINGS).close()
    assert load_run(tmp_path).settings == SETTINGS


def test_settings_that_are_wrong_remove_nothing(tmp_path: Path) -> None:
    simulate("boston", rounds=1, out=tmp_path / "run")
    before = tree(tmp_path)
    for wrong in ({"fraction": 7}, {"speeds": "nowhere.txt"}, {"device": "warp"}):
        with pytest.raises(SafaError):
            simulate("boston", out=tmp_path / "run", force=True, **wrong)
    assert tree(tmp_path) == before


def test_a_config_says_who_wrote_it_and_is_read_with_and_without(tmp_path: Path) -> None:
    RunWriter.begin(tmp_path / "run", SETTINGS).close()
    config = tmp_path / "run" / "config.toml"
    first, rest = config.read_text().split("\n", 1)
    assert first == 'format = "safa run 2"'
    assert load_run(tmp_path / "run").settings == SETTINGS
    config.write_text(rest)
    assert load_run(tmp_path / "run").settings == SETTINGS
    config.write_text('format = "safa run 1"\n' + rest)
    with pytest.raises(SafaError, match="of a format that this version cannot read: 'safa run 1'"):
        load_run(tmp_path / "run")


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    simulate("boston", rounds=3, clients=3, out=folder)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("summary.json", "{", "summary.json is damaged: it is not JSON"),
        ("summary.json", "[1]", "summary.json is damaged: it does not hold the metrics of a run"),
        ("summary.json", '{"futility": []}', "summary.json is damaged: it does not hold the metrics"),
        ("summary.json", '{"bytes_up": -1}', "summary.json is damaged: it does not hold the metrics"),
        ("summary.json", '{"futility": NaN}', "summary.json is damaged: it does not hold the metrics"),
        ("summary.json", f'{{"futility": {"9" * 400}}}', "summary.json is damaged: it does not hold the metrics"),
        ("summary.json", "[" * 100_000, "summary.json is damaged: it is not JSON"),
        ("config.toml", "a = " + "[" * 100_000, "config.toml is not a config file"),
        ("config.toml", "", "config.toml does not hold the settings of a run"),
        ("roster.json", "{}", "roster.json is damaged: it is not a list of clients"),
        ("roster.json", '[{"name": 3, "size": 2, "details": {}}]', "roster.json is damaged"),
        ("rounds.jsonl", "\udcff\n", "rounds.jsonl, line 1: it is not UTF-8 text"),
        ("model.safetensors", "", "model.safetensors is damaged: it is not a whole safetensors file"),
        ("model.safetensors", "\x09" + "\0" * 7 + "{}", "model.safetensors is damaged"),
        ("model.safetensors", None, "cannot read"),
        ("summary.json", None, "cannot read"),
        ("rounds.jsonl", None, "cannot read"),
        ("roster.json", None, "cannot read"),
    ],
)
def test_every_damaged_file_has_its_sentence(
    name: str, content: str | None, complaint: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / name).unlink(missing_ok=True)
    if content is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_text(content, errors="surrogateescape")
    before = tree(folder)
    assert main(["replay", str(folder)]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert tree(folder) == before


def test_a_model_of_another_shape_is_not_compared(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").write_bytes(save({"weight": torch.zeros(2), "bias": torch.zeros(1)}))
    with pytest.raises(SafaError, match="has other tensors than that of the problem"):
        replay(load_run(tmp_path / "run"))
    assert main(["replay", str(tmp_path / "run")]) == 2
