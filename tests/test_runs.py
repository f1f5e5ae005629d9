"""The folder of a run: its checkpoints, what may be replaced, and what is told of damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from safa.errors import SafaError
from safa.runs import Run, RunWriter, has_checkpoint, load_run
from safa.settings import Settings
from safa.storage import read_sealed, write_atomically, write_sealed

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
def test_a_full_disk_leaves_the_old_file_and_is_told_with_its_name(sealed: bool, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    (tmp_path / "file.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as told:
        write_sealed(file, {"a": torch.zeros(9)}, {}) if sealed else write_atomically(file, b"new")
    assert told.value.filename == str(file)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]
