"""Data in LEAF's format: what is read, what is refused, and the problems made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safa import Settings, simulate
from safa.errors import SafaError
from safa.tasks import task_of
from safa.tasks.leaf import ALPHABET, femnist, read_leaf, shakespeare
from tests import leaf

ONE = {"users": ["a", "b"], "num_samples": [1, 2], "user_data": {"a": {"x": [1], "y": [0]}, "b": {"x": [2, 3], "y": [0, 1]}}}  # fmt: skip # noqa: E501


def test_users_come_in_the_order_of_files_and_lists(tmp_path: Path) -> None:
    leaf.write(tmp_path, "train", {"b": ([1], [2]), "a": ([3, 4], [5, 6]), "c": ([], [])}, files=2)
    expected = {"b": ([1], [2]), "a": ([3, 4], [5, 6]), "c": ([], [])}
    assert list(read_leaf(tmp_path / "train").items()) == list(expected.items())
    files = sorted((tmp_path / "train").iterdir())
    assert list(read_leaf(files[::-1])) == ["c", "b", "a"]
    assert read_leaf(files[1]) == {"c": ([], [])}


def test_images_of_50_writers(tmp_path: Path) -> None:
    problem = femnist(leaf.write_images(tmp_path), width=2)
    train, test = (read_leaf(tmp_path / part) for part in ("train", "test"))
    assert problem.shards is not None
    assert [len(shard) for shard in problem.shards] == [len(y) for _, y in train.values()]
    assert problem.train[0].shape == (sum(len(y) for _, y in train.values()), 1, 28, 28)
    assert torch.allclose(problem.train[0][problem.shards[7][0]].flatten(), torch.tensor(train["user_07"][0][0]))
    assert problem.test[1].tolist() == [label for _, y in test.values() for label in y]
    assert problem.start_model(0)(problem.test[0]).shape == (len(problem.test[0]), 62)
    assert list(problem.metrics) == ["accuracy"]


def test_texts_of_50_speakers(tmp_path: Path) -> None:
    problem = shakespeare(leaf.write_texts(tmp_path), embedding=2, hidden=3, layers=1)
    assert problem.shards is not None
    first = read_leaf(tmp_path / "train")["user_01"]
    inputs, target = (tensor[problem.shards[1][0]] for tensor in problem.train)
    assert "".join(ALPHABET[number - 1] for number in inputs) == first[0][0]
    assert ALPHABET[int(target) - 1] == first[1][0]
    assert problem.start_model(0)(problem.test[0]).shape == (len(problem.test[0]), len(ALPHABET) + 1)


def test_a_character_that_is_not_in_the_alphabet_is_number_0(tmp_path: Path) -> None:
    for part in ("train", "test"):
        leaf.write(tmp_path, part, {"a": (["aé"], ["\t"])}, files=1)
    inputs, targets = shakespeare(tmp_path, hidden=2).train
    assert (inputs.tolist(), targets.tolist()) == ([[ALPHABET.index("a") + 1, 0]], [0])


def test_test_users_need_not_be_clients_and_users_without_samples_are_none(tmp_path: Path) -> None:
    leaf.write(tmp_path, "train", {"a": (["ab"], ["c"]), "b": ([], []), "c": (["bc"], ["d"])})
    leaf.write(tmp_path, "test", {"z": (["ab"], ["c"])})
    problem = shakespeare(tmp_path, hidden=2)
    assert problem.shards is not None
    assert [shard.tolist() for shard in problem.shards] == [[0], [1]]
    assert len(problem.test[0]) == 1


@pytest.mark.slow
def test_writers_are_the_clients_of_a_run(tmp_path: Path) -> None:
    problem = femnist(leaf.write_images(tmp_path), width=2)
    settings = Settings.of(task_of(problem, "own"))
    assert (settings.clients, settings.partition) == (50, "natural")
    run = simulate(problem, rounds=1, fraction=0.2, protocol="fedavg", crash_rate=0.0, batch_size=4, lr=0.1)
    (record,) = run.records()
    assert record.metrics["accuracy"] >= 0


def changed(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in (ONE | fields).items() if value is not None}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "FILE is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "FILE is not of LEAF's format: it needs a list 'users'"),
        (changed(users=None), "FILE is not of LEAF's format: it needs a list 'users'"),
        (changed(num_samples=None), "FILE is not of LEAF's format: it needs a list 'num_samples'"),
        (changed(user_data=[]), "FILE is not of LEAF's format: it needs a dict 'user_data'"),
        (
            changed(users=["a"], num_samples=[1]),
            "FILE has 1 users, 1 num_samples and user_data of 2, which do not belong together",
        ),
        (
            changed(num_samples=[1]),
            "FILE has 2 users, 1 num_samples and user_data of 2, which do not belong together",
        ),
        (changed(num_samples=[1, 3]), "the user 'b' in FILE has 2 x and 2 y, but num_samples is 3"),
        (
            changed(users=["a", "a"], num_samples=[1, 1], user_data={"a": {"x": [1], "y": [1]}}),
            "the user 'a' is in FILE and again in FILE",
        ),
        (changed(user_data={"a": {"x": [1]}, "b": []}), "the user 'a' in FILE must have two lists, x and y"),
    ],
)
def test_what_is_not_of_the_format_is_one_sentence(tmp_path: Path, content: Any, complaint: str) -> None:
    file = tmp_path / "all.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(SafaError) as refused:
        read_leaf(tmp_path)
    assert str(refused.value) == complaint.replace("FILE", str(file))


def test_a_user_in_two_files_and_files_that_are_not_there(tmp_path: Path) -> None:
    for name in ("1.json", "2.json"):
        (tmp_path / name).write_text(json.dumps(ONE))
    with pytest.raises(SafaError, match=r"the user 'a' is in .*1\.json and again in .*2\.json"):
        read_leaf(tmp_path)
    with pytest.raises(SafaError, match=r"cannot read .*3\.json: No such file or directory"):
        read_leaf([tmp_path / "3.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SafaError, match=r"there is no \.json file in .*empty"):
        read_leaf(tmp_path / "empty")
    leaf.write(tmp_path, "train", {"a": (["ab"], ["c"])}, files=1)
    leaf.write(tmp_path, "test", {"a": ([], [])}, files=1)
    with pytest.raises(SafaError, match=r"there is no sample in .*test"):
        shakespeare(tmp_path)


@pytest.mark.parametrize(
    ("make", "x", "y", "complaint"),
    [
        (femnist, [[0.0] * 783], [1], "every x of the user 'a' must be 784 numbers, and every y one"),
        (femnist, [["a"]], [1], "every x of the user 'a' must be 784 numbers, and every y one"),
        (femnist, [[0.0] * 784], [62], "every y of the user 'a' must be a whole number from 0 to 61"),
        (femnist, [[0.0] * 784], [0.5], "every y of the user 'a' must be a whole number from 0 to 61"),
        (shakespeare, ["ab"], ["cd"], "every x of the user 'a' must be a text, and every y one character"),
        (shakespeare, [3], ["c"], "every x of the user 'a' must be a text, and every y one character"),
        (shakespeare, ["ab", "a"], ["c", "c"], "the texts x of the user 'a' must have the same length above 0"),
    ],
)
def test_samples_of_another_kind_are_refused(tmp_path: Path, make: Any, x: Any, y: Any, complaint: str) -> None:
    for part in ("train", "test"):
        leaf.write(tmp_path, part, {"a": (x, y)}, files=1)
    with pytest.raises(SafaError) as refused:
        make(tmp_path)
    assert str(refused.value) == complaint


def test_texts_of_different_length_name_the_user(tmp_path: Path) -> None:
    for part in ("train", "test"):
        leaf.write(tmp_path, part, {"a": (["ab"], ["c"]), "b": (["abc"], ["c"])}, files=1)
    with pytest.raises(SafaError, match="the inputs of the user 'b' are"):
        shakespeare(tmp_path)


def test_the_alphabet_has_each_character_once() -> None:
    assert len(set(ALPHABET)) == len(ALPHABET) == 96
    assert np.all([character.isprintable() for character in ALPHABET[1:]])
