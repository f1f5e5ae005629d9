"""The tasks: their data, models, losses and accuracies, who holds which samples, and problems that users bring."""

from __future__ import annotations

import gzip
import hashlib
import math
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from safa import Settings
from safa.errors import SafaError
from safa.tasks import (
    TASKS,
    Problem,
    Samples,
    boston,
    check_partition,
    files,
    find_task,
    from_dataset,
    kdd99,
    partition,
)
from safa.tasks.files import Source, data_file, resume_download
from safa.tasks.measures import accuracy, closeness, share_right_side


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small models are no faster with more threads, and far slower where other work waits for the same cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensor(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


# -- accuracies and losses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "label", "accuracy"),
    [
        (0.5, 0.5, 1.0),
        (0.25, 0.5, 0.5),
        (0.5, 0.25, 0.5),
        (0.0, 0.0, 1.0),
        (0.0, 0.5, 0.0),
        (0.5, 0.0, 0.0),
        (-0.1, 0.0, 0.0),
        (-0.5, 0.5, -1.0),
    ],
)
def test_accuracy_of_task_1(output: float, label: float, accuracy: float) -> None:
    assert float(closeness(tensor([output]), tensor(label))) == pytest.approx(accuracy)


def test_accuracy_of_task_1_is_a_mean_over_samples() -> None:
    assert float(closeness(tensor([0.25], [0.5], [-1.0]), tensor(0.5, 0.5, 0.0))) == pytest.approx(0.5)


def test_accuracy_of_task_2_is_the_share_of_matches() -> None:
    assert float(accuracy(tensor([0.1, 0.9], [0.8, 0.2], [0.6, 0.4], [0.0, 1.0]), tensor(1, 0, 1, 1))) == 0.75


def test_accuracy_of_task_3_counts_the_right_side_and_nothing_on_the_border() -> None:
    assert float(share_right_side(tensor([2.0], [-0.1], [0.5], [0.0]), tensor(1.0, -1.0, -1.0, 1.0))) == 0.5


def test_losses_compare_each_output_with_its_own_target() -> None:
    """An output [n, 1] against a target [n] must not spread to [n, n]."""
    output, target = tensor([1.0], [0.0], [-2.0]), tensor(0.0, 1.0, -1.0)
    assert float(boston.loss(output, target)) == pytest.approx((1 + 1 + 1) / 3)
    labels = tensor(1.0, 1.0, 1.0)
    assert float(kdd99.loss(output, labels)) == pytest.approx((0 + 1 + 9) / 3)
    with pytest.raises(RuntimeError):
        boston.loss(output, target[:2])


# -- the data sets ---------------------------------------------------------------------------------------------------


def test_boston() -> None:
    problem = TASKS["boston"].load()
    assert [list(part.shape) for part in (*problem.train, *problem.test)] == [[354, 12], [354], [152, 12], [152]]
    inputs, targets = torch.cat([problem.train[0], problem.test[0]]), torch.cat([problem.train[1], problem.test[1]])
    for columns in (inputs, targets.unsqueeze(1)):
        assert torch.equal(columns.amin(0), torch.zeros(columns.shape[1]))
        assert torch.equal(columns.amax(0), torch.ones(columns.shape[1]))
    assert float(targets[0]) == pytest.approx((24 - 5) / (50 - 5))
    assert float(inputs[0, 5]) == pytest.approx((6.575 - 3.561) / (8.78 - 3.561))
    assert problem.kernel == "linear_mse"
    assert_starts_from_zeros(problem, 12)
    assert inputs.dtype == targets.dtype == torch.float32


def assert_starts_from_zeros(problem: Problem, features: int) -> None:
    parameters = dict(problem.start_model(3).named_parameters())
    assert {name: list(value.shape) for name, value in parameters.items()} == {"weight": [1, features], "bias": [1]}
    assert not any(value.any() for value in parameters.values())


@pytest.mark.slow
def test_digits_are_learnt(one_thread: None) -> None:
    task = TASKS["digits"]
    assert isinstance(task.lr, float)
    problem = task.load()
    shapes = [list(part.shape) for part in (*problem.train, *problem.test)]
    assert shapes == [[1257, 1, 8, 8], [1257], [540, 1, 8, 8], [540]]
    assert (float(problem.train[0].min()), float(problem.train[0].max())) == (0.0, 1.0)
    assert torch.bincount(problem.train[1]).tolist() == [125, 129, 124, 130, 124, 126, 127, 125, 122, 125]
    model = problem.start_model(0)
    descend(problem, model, lr=task.lr, batch_size=task.batch_size, epochs=8)
    with torch.no_grad():
        assert problem.measure(model(problem.test[0]), problem.test[1])["accuracy"] > 0.9


def descend(problem: Problem, model: torch.nn.Module, *, lr: float, batch_size: int, epochs: int) -> None:
    """Plain gradient descent in one place."""
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for x, y in zip(*(part.split(batch_size) for part in problem.train), strict=True):
            optimiser.zero_grad()
            torch.autograd.backward(problem.loss(model(x), y))
            optimiser.step()


@pytest.mark.slow
def test_mnist(real_files: None) -> None:
    problem = TASKS["mnist"].load()
    assert [len(part) for part in (*problem.train, *problem.test)] == [60_000, 60_000, 10_000, 10_000]
    assert problem.train[0].shape[1:] == (1, 28, 28)
    assert problem.train[0].dtype == torch.float32
    assert (float(problem.train[0].min()), float(problem.train[0].max())) == (0.0, 255.0)
    assert problem.train[1][:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert torch.bincount(problem.test[1]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    model = problem.start_model(0)
    assert {key: list(value.shape) for key, value in model.named_parameters()} == {
        "conv1.weight": [20, 1, 5, 5],
        "conv1.bias": [20],
        "conv2.weight": [50, 20, 5, 5],
        "conv2.bias": [50],
        "fc1.weight": [500, 800],
        "fc1.bias": [500],
        "fc2.weight": [10, 500],
        "fc2.bias": [10],
    }
    with torch.no_grad():
        assert torch.allclose(model(problem.test[0][:5]).exp().sum(1), torch.ones(5))
    assert float(model.get_parameter("conv2.weight").detach().abs().max()) <= math.sqrt(6 / (25 * (20 + 50)))


@pytest.mark.slow
def test_kdd99(real_files: None) -> None:
    problem = TASKS["kdd99"].load()
    inputs = torch.cat([problem.train[0], problem.test[0]])
    assert list(inputs.shape) == [186_479, 35]
    assert len(problem.train[0]) == 130_535
    assert torch.equal(inputs.amin(0), torch.zeros(35))
    assert torch.equal(inputs.amax(0), torch.ones(35))
    assert problem.kernel == "linear_squared_hinge"
    assert_starts_from_zeros(problem, 35)
    assert set(problem.train[1].tolist()) == set(problem.test[1].tolist()) == {-1.0, 1.0}
    assert problem.train[1][:3].tolist() == [-1.0, -1.0, -1.0]
    assert float(inputs[0, 1]) == pytest.approx(181 / 29_200, abs=1e-3)  # src_bytes of the first row


@pytest.mark.slow
def test_loading_needs_no_library_but_numpy_and_torch(real_files: None) -> None:
    """On a machine that has nothing else, files in SAFA_DATA are enough."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['pooch', 'requests', 'rich', 'tqdm'])); "
        "from safa.tasks import TASKS; print(*(len(TASKS[name].load().train[0]) for name in TASKS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["354", "60000", "130535", "1257"]


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys, safa.tasks; safa.tasks.find_task('mnist'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- partitions ------------------------------------------------------------------------------------------------------

KINDS = ("contiguous", "iid", "dirichlet:0.1", "dirichlet:100", "shards:2", "quantity:0.1", "quantity:100")


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def dealt(kind: str, targets: Any, sizes: Any, rng: np.random.Generator, **more: Any) -> list[np.ndarray[Any, Any]]:
    samples = Samples(targets=np.asarray(targets), sizes=np.asarray(sizes, dtype=np.float64), **more)
    return [*partition(kind, samples, rng)]


@given(
    st.sampled_from(KINDS),
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12),
    st.integers(2, 60),
    st.sampled_from(["labels", "lopsided", "continuous"]),
    st.integers(0, 9),
)
def test_every_sample_is_dealt_once_and_nobody_is_empty(
    kind: str, sizes: list[float], per_client: int, targets: str, seed: int
) -> None:
    count = per_client * len(sizes)
    values = {
        "labels": np.arange(count) % 5,
        "lopsided": np.where(np.arange(count) < 2, -1.0, 1.0),
        "continuous": np.linspace(0, 1, count) ** 3,
    }[targets]
    parts = dealt(kind, values, sizes, draw(seed))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(count))
    assert len(parts) == len(sizes)
    assert min(len(part) for part in parts) >= 1
    if not kind.startswith(("shards", "quantity")):
        wanted = np.array(sizes) / sum(sizes) * count
        slack = 1 + np.count_nonzero(wanted < 2)  # whoever is too small for one sample gets it from the others
        assert np.all(np.abs([len(part) for part in parts] - wanted) <= slack)


def test_contiguous_slices_in_the_order_of_the_file() -> None:
    sizes = np.array([3.0, 1.0, 4.0, 2.5])
    parts = dealt("contiguous", np.zeros(101), sizes, draw())
    ends = np.rint(np.cumsum(sizes) / sizes.sum() * 101).astype(int)
    assert [(part[0], part[-1] + 1) for part in parts] == list(zip([0, *ends[:-1]], ends, strict=True))
    assert all(np.array_equal(part, np.arange(part[0], part[-1] + 1)) for part in parts)


def test_iid_is_a_random_order_in_the_same_slices() -> None:
    first, again, other = (dealt("iid", np.zeros(100), [1, 2, 1], draw(seed)) for seed in (1, 1, 2))
    assert [len(part) for part in first] == [25, 50, 25]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


def skew(kind: str, targets: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    """How far the clients' label frequencies are from those of all, as a mean total variation distance."""
    shares = [np.bincount(labels[part], minlength=10) / len(part) for part in dealt(kind, targets, np.ones(50), draw())]
    return float(np.mean(np.abs(np.array(shares) - np.bincount(labels) / len(labels)).sum(axis=1) / 2))


@pytest.mark.parametrize("targets", ["labels", "continuous"])
def test_dirichlet_skew_grows_as_alpha_falls(targets: str) -> None:
    labels = draw(1).permutation(np.arange(10_000) % 10)
    values = labels if targets == "labels" else labels + draw(2).uniform(0, 0.9, len(labels))
    skews = [skew(f"dirichlet:{alpha}", values, labels) for alpha in (0.01, 0.1, 1, 10, 1e308)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.6
    assert skews[-1] < 0.02


def test_dirichlet_of_rare_labels_follows_their_frequency() -> None:
    labels = np.repeat([0, 1], [9_000, 1_000])
    shares = [labels[part].mean() for part in dealt("dirichlet:1000", labels, np.ones(10), draw())]
    assert np.allclose(shares, 0.1, atol=0.03)


def test_shards_hold_few_labels_and_are_equal() -> None:
    labels = draw(1).permutation(np.arange(1000) % 10)
    parts = dealt("shards:2", labels, np.arange(1.0, 21.0), draw())
    assert {len(part) for part in parts} == {50}
    assert max(len(np.unique(labels[part])) for part in parts) == 2


def rare_classes(kind: str, speeds: Any) -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """The clients' samples, and for each client and class how many it holds; every class has 100 samples."""
    labels = draw(1).permutation(np.repeat(np.arange(10), 100))
    parts = dealt(kind, labels, np.ones(len(speeds)), draw(), speeds=np.asarray(speeds, dtype=np.float64))
    return parts, np.array([np.bincount(labels[part], minlength=10) for part in parts])


def test_rare_classes_are_on_the_slow_clients_alone() -> None:
    slow = draw(3).random(30) < 0.3
    parts, held = rare_classes("rare:2", np.where(slow, 0.1, 1.0))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
    assert not held[~slow, 8:].any()
    assert not held[slow, :8].any()
    for some in slow, ~slow:
        assert np.ptp(held[some].sum(axis=1)) <= 1
    assert np.count_nonzero(held[~slow], axis=1).mean() < 7  # of 8: they are dealt unevenly


def test_an_overlap_of_rare_classes_goes_to_the_others() -> None:
    speeds = np.where(np.arange(30) < 6, 0.1, 1.0)
    parts, held = rare_classes("rare:2:0.25", speeds)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
    assert held[:6, 8:].sum() == 150
    assert held[6:, 8:].sum() == 50
    assert not held[:6, :8].any()


def test_without_two_speeds_the_slowest_fifth_holds_the_rare_classes() -> None:
    speeds = draw(4).permutation(np.arange(1.0, 24.0))
    _, held = rare_classes("rare:1", speeds)
    assert np.array_equal(np.flatnonzero(held[:, 9]), np.flatnonzero(speeds <= 5))
    _, held = rare_classes("rare:1", np.ones(10))
    assert np.flatnonzero(held[:, 9]).tolist() == [0, 1]


def test_rare_classes_that_cannot_be_dealt() -> None:
    with pytest.raises(SafaError, match="rare:10 leaves no class to the other clients: there are 10"):
        rare_classes("rare:10", np.arange(5.0))
    with pytest.raises(SafaError, match="needs the speeds of the clients"):
        dealt("rare:1", [0, 1, 2], np.ones(2), draw())
    with pytest.raises(SafaError, match="has 1 samples for 2 clients"):
        dealt("rare:1:0.99", np.repeat([0, 1], 100), np.ones(4), draw(), speeds=np.array([1.0, 1.0, 9.0, 9.0]))
    with pytest.raises(SafaError, match="needs two clients"):
        dealt("rare:1", [0, 1, 2], np.ones(1), draw(), speeds=np.ones(1))


def test_samples_of_a_client_come_in_random_order() -> None:
    """A trainer that goes through them as they are must not see one label after the other."""
    labels = np.repeat(np.arange(10), 100)
    for kind in ("dirichlet:1", "shards:4"):
        assert not any(np.array_equal(part, np.sort(part)) for part in dealt(kind, labels, np.ones(5), draw()))


def test_targets_may_be_tensors_and_columns() -> None:
    labels = torch.arange(12) % 3
    one, other = (dealt("dirichlet:1", values, np.ones(3), draw()) for values in (labels, labels.unsqueeze(1)))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    with pytest.raises(SafaError, match=re.escape("shards:1 needs one label per sample, not targets of shape [2]")):
        dealt("shards:1", np.zeros((12, 2)), np.ones(3), draw())


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_samples_for_the_clients(kind: str) -> None:
    with pytest.raises(SafaError, match="3 training samples cannot be dealt to 4 clients"):
        dealt(kind, np.zeros(3), np.ones(4), draw())


def test_too_few_samples_for_the_shards() -> None:
    with pytest.raises(SafaError, match="7 training samples cannot be cut into 8 shards"):
        dealt("shards:2", np.zeros(7), np.ones(4), draw())


WRONG_NUMBERS = ("", "0", "-1", "nan", "inf", "much")
THERE_ARE = (
    "there are contiguous, iid, dirichlet:ALPHA, quantity:ALPHA, shards:N, rare:CLASSES[:OVERLAP], column:NAME, natural"
)
WRONG_KINDS = {
    "": f"there is no partition ''; {THERE_ARE}",
    "IID": f"there is no partition 'IID'; {THERE_ARE}",
    "iid:1": "the partition iid is written iid, not 'iid:1'",
    "dirichlet": "the partition dirichlet is written dirichlet:ALPHA, not 'dirichlet'",
    "shards:1:2": "the partition shards is written shards:N, not 'shards:1:2'",
    "rare": "the partition rare is written rare:CLASSES[:OVERLAP], not 'rare'",
    "rare:2:0:1": "the partition rare is written rare:CLASSES[:OVERLAP], not 'rare:2:0:1'",
    "column:": "NAME must be that of a column, or its number",
    **{f"dirichlet:{value}": f"ALPHA must be a number above 0, not {value!r}" for value in WRONG_NUMBERS},
    **{f"quantity:{value}": f"ALPHA must be a number above 0, not {value!r}" for value in WRONG_NUMBERS},
    **{f"rare:{value}": f"CLASSES must be a whole number of at least 1, not {value!r}" for value in ("", "0", "1.5")},
    **{
        f"rare:1:{value}": f"OVERLAP must be a number of at least 0 and below 1, not {value!r}"
        for value in ("", "1", "x")
    },
    **{f"shards:{value}": f"N must be a whole number of at least 1, not {value!r}" for value in ("", "0", "1.5")},
}


@pytest.mark.parametrize("kind", WRONG_KINDS)
def test_a_wrong_kind_is_refused_in_one_sentence(kind: str) -> None:
    with pytest.raises(SafaError, match=re.escape(WRONG_KINDS[kind])):
        check_partition(kind)


def test_right_kinds_are_let_through() -> None:
    for kind in KINDS:
        check_partition(kind)


# -- bring your own --------------------------------------------------------------------------------------------------

OWN = """
import torch
from safa.tasks import Problem

def make():
    x = torch.zeros(6, 2)
    return Problem(model=lambda: torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss,
                   metrics={"accuracy": lambda output, target: 0.0}, train=(x[:4], x[:4]), test=(x[4:], x[4:]))

problem = make()
number = 3
def needs(size): return problem
def wrong(): return "a problem"
def breaks(): return 1 / 0
def refuses(): return Problem(model=make, loss=make, train=(torch.zeros(3), torch.zeros(2)),
                              test=(torch.zeros(0), torch.zeros(0)))
"""


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_tasks_for_safa.py").write_text(OWN)
    (folder / "my_broken_for_safa.py").write_text("import nothing_of_that_name")
    (folder / "my_worse_for_safa.py").write_text("1 / 0")
    return folder


@pytest.fixture
def at_home(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with modules of one's own."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # what is inserted is undone with it
    monkeypatch.chdir(own_folder)


@pytest.mark.parametrize("attribute", ["problem", "make"])
def test_a_task_of_ones_own(attribute: str, at_home: None) -> None:
    reference = f"my_tasks_for_safa:{attribute}"
    task = find_task(reference)
    assert (task.name, task.samples, task.clients, task.rounds, task.epochs) == (reference, 6, 10, 20, 1)
    assert (task.batch_size, task.lr, task.round_limit_s, task.speed_floor) == (32, "auto", math.inf, 0.05)
    assert isinstance(task.load(), Problem)
    assert task.load() is find_task(reference).load()
    settings = Settings.of(reference, clients=3, mean_size=2)
    assert (settings.task, settings.rounds) == (reference, 20)


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("no_such_module:x", "there is no module no_such_module, neither in the current folder nor installed"),
        ("no_such.module:x", "there is no module no_such.module, neither"),
        ("my_tasks_for_safa:x", "the module my_tasks_for_safa has no attribute 'x'"),
        ("my_tasks_for_safa:number", "must be a Problem or a callable that takes nothing and makes one, not a int"),
        ("my_tasks_for_safa:needs", "must be a Problem or a callable that takes nothing and makes one, not a function"),
        ("my_tasks_for_safa:Problem", "must be a Problem or a callable that takes nothing and makes one, not a type"),
        ("my_tasks_for_safa:wrong", "my_tasks_for_safa:wrong must make a Problem, not a str"),
        ("builtins:dict", "builtins:dict must make a Problem, not a dict"),
        ("my_tasks_for_safa:breaks", "my_tasks_for_safa:breaks failed: ZeroDivisionError: division by zero"),
        ("my_tasks_for_safa:refuses", "the train data has 3 inputs and 2 targets"),
        ("my_broken_for_safa:x", "cannot import my_broken_for_safa: ModuleNotFoundError: No module named 'nothing_of"),
        ("my_worse_for_safa:x", "cannot import my_worse_for_safa: ZeroDivisionError: division by zero"),
        (":x", "a task of your own is written package.module:attribute, not ':x'"),
        ("json:", "a task of your own is written package.module:attribute, not 'json:'"),
        (".json:x", "a task of your own is written"),
        ("a:b:c", "a task of your own is written"),
        ("cifar", "no task 'cifar'; there are boston, mnist, kdd99, digits, or your own as package.module:name"),
    ],
)
def test_what_cannot_be_a_task_is_one_sentence(reference: str, complaint: str, at_home: None) -> None:
    with pytest.raises(SafaError, match=re.escape(complaint)) as caught:
        find_task(reference)
    assert "\n" not in str(caught.value)


class Squares(Dataset[tuple[Any, Any]]):
    """Items of a given kind."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Endless(IterableDataset[int]):
    """No length, no items by number."""

    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


def test_data_from_a_data_set() -> None:
    x, y = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 2, 3])
    inputs, targets = from_dataset(Subset(TensorDataset(x, y), [2, 0]))
    assert torch.equal(inputs, x[[2, 0]])
    assert targets.tolist() == [2, 0]
    inputs, targets = from_dataset(Squares(*[(np.full((2, 2), k, np.float32), float(k)) for k in range(3)]))
    assert (inputs.shape, inputs.dtype) == ((3, 2, 2), torch.float32)
    assert (targets.tolist(), targets.dtype) == ([0.0, 1.0, 2.0], torch.float32)


@pytest.mark.parametrize(
    "dataset", [Squares(1, 2), Squares((1, 2, 3)), Squares(("a", 1)), Squares((torch.zeros(1), 1), (torch.zeros(2), 1))]
)
def test_items_that_are_no_pairs_are_refused(dataset: Dataset[Any]) -> None:
    with pytest.raises(SafaError, match="the data set must have items by number that are pairs"):
        from_dataset(dataset)


@pytest.mark.parametrize("dataset", [Squares(), Endless()])
def test_a_data_set_without_a_length_is_refused(dataset: Dataset[Any]) -> None:
    with pytest.raises(SafaError, match="a data set must have a length above 0"):
        from_dataset(dataset)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import safa.tasks

    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        getattr(safa.tasks, "Nothing")  # noqa: B009


# -- data files ------------------------------------------------------------------------------------------------------

NAME = "thing.gz"
CONTENT = gzip.compress(np.random.default_rng(0).bytes(400_000), mtime=0)


class Server(ThreadingHTTPServer):
    """A real web server with one file, which can be told to misbehave."""

    daemon_threads = True
    knows_ranges = True
    cut_once = False
    content = CONTENT
    status: int | None = None
    encoding: str | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{NAME}"


class Handler(BaseHTTPRequestHandler):
    """Answers a request for the file or for the rest of it."""

    server: Server

    def do_GET(self) -> None:
        wanted = self.headers["Range"]
        self.server.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.knows_ranges else 0
        body = self.server.content[start:]
        status = self.server.status or (416 if not body else 206 if start else 200)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.server.encoding:
            self.send_header("Content-Encoding", self.server.encoding)
        self.end_headers()
        if self.server.cut_once:
            self.server.cut_once = False
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no folder of data."""
    monkeypatch.delenv("SAFA_DATA", raising=False)
    monkeypatch.setenv("SAFA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def register(monkeypatch: pytest.MonkeyPatch, url: str, content: bytes = CONTENT) -> None:
    monkeypatch.setitem(files.FILES, NAME, Source(url, hashlib.sha256(content).hexdigest()))


def test_a_file_in_the_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFA_DATA", str(tmp_path))
    register(monkeypatch, "http://example.invalid/thing.gz")
    (tmp_path / NAME).write_bytes(CONTENT)
    assert data_file(NAME) == tmp_path / NAME


def test_a_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFA_DATA", str(tmp_path))
    file = tmp_path / "kddcup.data_10_percent.gz"
    file.write_bytes(b"half of it")
    with pytest.raises(
        SafaError, match=re.escape(f"{file} is damaged (its sha256 is wrong); download it again from http")
    ):
        TASKS["kdd99"].load()
    file.unlink()
    file.mkdir()
    with pytest.raises(SafaError, match=f"cannot read {re.escape(str(file))}: Is a directory"):
        TASKS["kdd99"].load()


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFA_DATA", str(tmp_path / "none"))
    with pytest.raises(SafaError, match="SAFA_DATA must name a folder, not "):
        TASKS["mnist"].load()


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_no_file_and_no_network_says_what_to_do(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("SAFA_DATA", str(tmp_path))
    url = f"http://127.0.0.1:{closed_port()}/{NAME}"
    register(monkeypatch, url)
    todo = f"or download {url} yourself, put it into a folder and set SAFA_DATA to that folder"
    with pytest.raises(SafaError, match=re.escape(f"cannot get {NAME}: there is no connection")) as caught:
        data_file(NAME)
    assert str(caught.value).endswith(todo)


def test_without_pooch_the_sentence_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(SafaError, match=r"cannot get train-images-idx3-ubyte\.gz: pooch, .*, is not installed; "):
        TASKS["mnist"].load()


def test_a_download_is_kept_and_quiet_where_nobody_looks(
    cache: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    register(monkeypatch, server.url)
    for _ in range(2):
        assert data_file(NAME).read_bytes() == CONTENT
    assert capfd.readouterr() == ("", "")
    assert server.asked == [None]
    assert [file.name for file in cache.iterdir()] == [NAME]


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_download_that_was_cut_off_continues(
    knows_ranges: bool, cache: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, server.url)
    server.cut_once, server.knows_ranges = True, knows_ranges
    with pytest.raises(SafaError, match="there is no connection, or it was lost"):
        data_file(NAME)
    have = (cache / f"{NAME}.part").stat().st_size
    assert 0 < have <= len(CONTENT) // 2
    assert data_file(NAME).read_bytes() == CONTENT
    assert server.asked == [None, f"bytes={have}-"]
    assert [file.name for file in cache.iterdir()] == [NAME]


def test_a_part_that_is_whole_already_is_fetched_anew(tmp_path: Path, server: Server) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT)
    resume_download(server.url, tmp_path / "out", None)
    assert (tmp_path / "out").read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT)}-", None]


def test_a_part_of_another_file_is_found_out_and_forgotten(
    cache: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, server.url)
    cache.mkdir(parents=True)
    (cache / f"{NAME}.part").write_bytes(b"something else")
    with pytest.raises(SafaError, match="what was downloaded is damaged"):
        data_file(NAME)
    assert data_file(NAME).read_bytes() == CONTENT


def test_a_file_stays_packed_whatever_the_server_calls_it(tmp_path: Path, server: Server) -> None:
    server.encoding = "x-gzip"
    resume_download(server.url, tmp_path / "out", None)
    assert (tmp_path / "out").read_bytes() == CONTENT


def test_a_server_that_has_no_such_file(cache: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, server.url)
    server.status = 404
    with pytest.raises(SafaError, match=f"cannot get {NAME}: the server answered 404 Not Found; try again later, or"):
        data_file(NAME)
    assert not list(cache.iterdir())
