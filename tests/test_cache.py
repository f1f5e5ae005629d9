"""Arrays that are made once and kept: read when whole, made again when damaged, done without where none can be kept."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from safa.cache import Arrays, cache_folder, cached_arrays
from safa.errors import SafaError
from safa.tasks import kdd99
from safa.tasks.files import FILES, Source

FIRST, SECOND = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 2], dtype=np.int64)


class Maker:
    """Makes the arrays, and counts how often."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> Arrays:
        self.made += 1
        return {"first": FIRST, "second": SECOND}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAFA_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def check(arrays: Arrays) -> None:
    assert list(arrays) == ["first", "second"]
    wanted: Arrays = {"first": FIRST, "second": SECOND}
    for name, expected in wanted.items():
        found = arrays[name]
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFA_CACHE", "/somewhere/own")
    assert cache_folder() == Path("/somewhere/own")
    monkeypatch.delenv("SAFA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/safa")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "safa"


def test_arrays_are_made_once(folder: Path) -> None:
    make = Maker()
    assert not folder.exists()
    for _ in range(2):
        check(cached_arrays("name", make))
    assert make.made == 1
    check(cached_arrays("other", make))
    assert make.made == 2
    assert sorted(path.name for path in folder.iterdir()) == ["name.npz", "other.npz"]


@pytest.mark.parametrize("place", [0, 40, 140, 200, 420, -1])
def test_a_damaged_file_is_made_again(folder: Path, place: int) -> None:
    make = Maker()
    cached_arrays("name", make)
    whole = (folder / "name.npz").read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 0xFF
    for content in (bytes(damaged), whole[:place], b""):
        (folder / "name.npz").write_bytes(content)
        check(cached_arrays("name", make))
    check(cached_arrays("name", lambda: pytest.fail("it is whole")))


def test_numbers_that_were_changed_are_found_out(folder: Path) -> None:
    make = Maker()
    cached_arrays("name", make)
    content = (folder / "name.npz").read_bytes()
    place = content.index(FIRST.tobytes())
    (folder / "name.npz").write_bytes(content[:place] + b"\x01" + content[place + 1 :])
    check(cached_arrays("name", make))
    assert make.made == 2


def test_nothing_is_kept_where_nothing_can_be_written(folder: Path) -> None:
    folder.write_text("not a folder")
    make = Maker()
    for _ in range(2):
        check(cached_arrays("name", make))
    assert make.made == 2
    assert folder.read_text() == "not a folder"


def test_an_error_of_the_maker_leaves_nothing_behind(folder: Path) -> None:
    def make() -> Arrays:
        raise SafaError("no such thing")

    with pytest.raises(SafaError, match="no such thing"):
        cached_arrays("name", make)
    assert not folder.exists()


def test_a_table_is_parsed_once_and_read_from_then_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[number % 7 + place * number for place in range(42)] for number in range(10)]
    lines = [",".join([*map(str, row[:1]), "tcp", "http", "SF", *map(str, row[4:41]), "normal."]) for row in rows]
    content = gzip.compress("\n".join(lines).encode())
    (tmp_path / kdd99._FILE).write_bytes(content)
    monkeypatch.setenv("SAFA_DATA", str(tmp_path))
    monkeypatch.setitem(FILES, kdd99._FILE, Source("", hashlib.sha256(content).hexdigest()))
    first = kdd99.load()
    (kept,) = folder.iterdir()
    changed = kept.stat().st_mtime_ns
    again = kdd99.load()
    assert kept.stat().st_mtime_ns == changed
    assert all(map(torch.equal, first.train + first.test, again.train + again.test))
    assert first.train[0].shape == (7, 38)
