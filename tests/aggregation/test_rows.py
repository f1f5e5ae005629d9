"""Rows by number equal a dictionary of rows, in memory and beyond it; versions are held in the same way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from safa.aggregation import rows as rows_module
from safa.aggregation.rows import RowTable, Versions, give_back_memory, rows_that_fit
from safa.errors import SafaError
from tests.aggregation.steps import ids

SIZE = 3
ROW_MB = SIZE * 4 / 2**20
MEMORY = st.sampled_from([0.0, ROW_MB, 2.5 * ROW_MB, 5 * ROW_MB, 100.0])

moves = st.tuples(st.sampled_from(["put", "drop", "changed", "restore"]), st.sets(st.integers(0, 40), max_size=9))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows take several blocks."""
    monkeypatch.setattr(rows_module, "_BLOCK_BYTES", 2 * SIZE * 4)


def constant(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1).repeat(1, SIZE)


def filled(memory_mb: float, count: int) -> RowTable:
    table = RowTable(torch.zeros(SIZE), memory_mb=memory_mb)
    table.put(np.arange(count), constant(*range(count)))
    return table


def bytes_in_memory(table: RowTable) -> int:
    held = [block for number, block in table._blocks.items() if number * table._per_block < table.room]
    return sum(block.numel() * block.element_size() for block in held)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(moves, max_size=25), MEMORY)
def test_a_table_equals_a_dictionary(script: list[tuple[str, set[int]]], memory_mb: float) -> None:
    table, oracle, changed = RowTable(torch.zeros(SIZE), memory_mb=memory_mb), dict[int, float](), set[int]()
    for time, (what, numbers) in enumerate(script):
        if what in ("put", "restore"):
            if what == "restore":
                oracle.clear()
                changed.clear()
            oracle |= {number: 100.0 * time + number for number in numbers}
            rows = constant(*(oracle[number] for number in numbers)).reshape(-1, SIZE)
            getattr(table, what)(ids(numbers), rows)
            changed |= numbers if what == "put" else set()
        elif what == "drop":
            table.drop(numbers)
            changed -= numbers
            oracle = {number: value for number, value in oracle.items() if number not in numbers}
        else:
            assert table.take_changed().tolist() == sorted(changed)
            changed.clear()
        assert table.numbers.tolist() == sorted(oracle)
        backwards = ids(sorted(oracle, reverse=True))
        assert table.get(backwards)[:, 0].tolist() == [oracle[int(number)] for number in backwards]
        assert bytes_in_memory(table) <= memory_mb * 2**20


@pytest.mark.parametrize("number", [1, 3, 50])
def test_a_row_that_is_not_there_is_a_key_error(number: int) -> None:
    table = filled(1.0, 3)
    table.drop([1])
    with pytest.raises(KeyError, match=f"there is no row of {number}"):
        table.get(ids([0, number]))


def test_what_was_got_does_not_change_with_the_table() -> None:
    table = filled(1.0, 3)
    before = table.get(ids([2]))
    table.put(ids([2]), constant(9))
    assert before.tolist() == constant(2).tolist()


def test_a_new_row_moves_no_other() -> None:
    table = filled(1.0, 4)
    blocks = dict(table._blocks)
    table.put(ids([1000]), constant(7))
    assert all(table._blocks[number] is block for number, block in blocks.items())
    assert len(table._blocks) == len(blocks) + 1


def test_places_of_dropped_rows_are_used_again() -> None:
    table = filled(4 * ROW_MB, 8)
    blocks = len(table._blocks)
    for time in range(20):
        table.drop(range(8 * time, 8 * time + 8))
        table.put(np.arange(8 * time + 8, 8 * time + 16), constant(*range(8)))
    assert len(table._blocks) == blocks


def test_versions_that_do_not_fit_the_memory_are_held_in_files() -> None:
    versions = Versions(torch.zeros(SIZE), memory_mb=4 * 2 * ROW_MB)  # room for two
    for version in range(1, 40):
        versions.add(version, constant(version)[0])
        assert len(versions._models) <= 2
        assert versions.model[0] == versions[version][0] == version
    assert sorted(versions._models) == [38, 39]  # the oldest are those in files
    assert versions.rows(ids([39, 3, 0, 3]))[:, 0].tolist() == [39.0, 3.0, 0.0, 3.0]
    early = versions[5]
    versions.forget_all_but({3, 30})
    versions.add(40, constant(40)[0])
    versions.add(40, constant(41)[0])  # in place of the one before
    for version in range(50, 60):
        versions.add(version, constant(version)[0])
    assert versions.numbers.tolist() == [3, 30, 39, 40, *range(50, 60)]
    assert versions.rows(ids([3, 40, 59]))[:, 0].tolist() == [3, 41, 59]
    assert early.tolist() == [5.0] * SIZE  # whoever still holds a model that was forgotten holds the same
    with pytest.raises(KeyError):
        versions[5]


def test_versions_are_restored_from_their_table() -> None:
    versions = Versions(torch.zeros(SIZE), memory_mb=4 * 2 * ROW_MB)
    for version in range(1, 9):
        versions.add(version, constant(version)[0])
    versions.forget_all_but({2, 5, 7})
    numbers = versions.take_changed()
    assert numbers.tolist() == [2, 5, 7, 8]
    other = Versions(torch.ones(SIZE), memory_mb=4 * 2 * ROW_MB)
    other.restore(numbers, versions.get(numbers))
    assert other.latest == 8
    assert other.numbers.tolist() == [2, 5, 7, 8]
    assert torch.equal(other.rows(numbers), versions.rows(numbers))
    assert not len(other.take_changed())
    other.add(9, constant(9)[0])
    assert other.take_changed().tolist() == [9]


def test_a_file_that_finds_no_room_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_BLOCK_BYTES", 2**52)
    table = RowTable(torch.zeros(2**10), memory_mb=0.0)
    with pytest.raises(SafaError, match=r"models of \d+ MB do not fit memory_mb and cannot be held in a file in "):
        table.put(ids([0]), torch.zeros(1, 2**10))
    assert not len(table.numbers)


def test_how_many_rows_fit() -> None:
    assert rows_that_fit(torch.zeros(2**18), 10.0) == 10
    assert rows_that_fit(torch.zeros(2**18), 10.0, times=3) == 3
    assert rows_that_fit(torch.zeros(2**18), 0.1) == 1
    give_back_memory()
