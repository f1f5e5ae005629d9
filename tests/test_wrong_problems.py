"""Problems, lists and callbacks that cannot be used: one sentence each, and things that look wrong and are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import safa
from safa.analysis.compare import by_setting
from safa.cli.sweep_tables import print_settings
from safa.errors import SafaError
from safa.experiments.sweep import _listed

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(dim=1)
SHORT: Any = {"clients": 5, "rounds": 2, "lr": 0.1}


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))


def problem(**changed: Any) -> safa.Problem:
    given: dict[str, Any] = {
        "model": net,
        "loss": torch.nn.functional.mse_loss,
        "train": (X[:50], Y[:50]),
        "test": (X[50:], Y[50:]),
    }
    return safa.Problem(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"model": net()}, "model must be a function that makes a fresh model, not a Sequential"),
        ({"model": None}, "model must be a function that makes a fresh model, not None"),
        ({"train": None}, r"the train data must be a pair \(inputs, targets\) of tensors"),
        ({"test": (X,)}, r"the test data must be a pair \(inputs, targets\) of tensors"),
        ({"shards": 3}, "there must be a list of shards, an array of indices for each client, not 3"),
        ({"metrics": {3: net}}, "a metric needs a name of letters, digits and _"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SafaError, match=complaint):
        problem(**changed)


def test_a_function_that_makes_no_module_is_refused() -> None:
    with pytest.raises(SafaError, match=r"the function model must return a torch.nn.Module, not None"):
        safa.simulate(problem(model=lambda: None), **SHORT)


def test_metrics_that_would_have_one_name_are_refused() -> None:
    """One of a number per class is recorded as NAME_0, NAME_1, ..., and must not be overwritten in silence."""
    metrics = {"a": lambda output, target: torch.ones(2), "a_0": lambda output, target: 0.5}
    with pytest.raises(
        SafaError, match="the metric a has a number for each class, and one of these is called a_0, too"
    ):
        safa.simulate(problem(metrics=metrics), **SHORT)


def test_arrays_are_data() -> None:
    arrays = problem(train=(X[:50].numpy(), Y[:50].numpy()))
    runs = [safa.simulate(one, **SHORT) for one in (arrays, problem())]
    assert [record.loss for record in runs[0].records()] == [record.loss for record in runs[1].records()]


class Gone(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Any:
        raise KeyError("gone")


@pytest.mark.parametrize(
    ("clients", "complaint"),
    [
        ([(X, Y), Gone()], "client 1 must have items by number .*: KeyError: 'gone'"),
        ({"a": (X, Y)}, "the data of the clients must be a list, not a dict"),
    ],
)
def test_data_of_clients_that_cannot_be_read_are_refused_by_name(clients: Any, complaint: str) -> None:
    with pytest.raises(SafaError, match=complaint):
        safa.Problem.of_clients(clients, test=(X, Y), model=net, loss=torch.nn.functional.mse_loss)


def test_a_callback_that_is_not_in_a_list_is_refused() -> None:
    alone: Any = lambda record, server: None  # noqa: E731
    with pytest.raises(SafaError, match="callbacks must be a list"):
        safa.simulate(problem(), callbacks=alone, **SHORT)


def test_the_warning_does_not_recommend_what_was_done() -> None:
    nothing = torch.full_like(X[:50], float("nan"))
    with pytest.warns(UserWarning, match="did not fall: .*; learning rate 1e-05, found by a range test in which none"):
        safa.simulate(problem(train=(nothing, Y[:50])), clients=5, rounds=3, lr="auto")


# -- sweeps ----------------------------------------------------------------------------------------------------------


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(SafaError, match="protocol lists no value"):
        safa.sweep("boston", protocol=[], train=False)


@pytest.mark.parametrize(
    ("name", "value", "values"),
    [
        ("speeds", [1.0, 2.0], 1),
        ("speeds", [[1.0, 2.0], [1.0, 1.0]], 2),
        ("speeds", ["one.txt", np.ones(2), pd.DataFrame({"speeds": [1.0, 2.0]})], 3),
        ("links", [(1.0, 2.0), (3.0, 4.0)], 1),
        ("links", [[(1.0, 2.0), (3.0, 4.0)], "links.csv"], 2),
        ("speeds", np.ones(3), 1),
        ("seed", range(3), 3),
    ],
)
def test_numbers_of_clients_are_one_value_and_lists_of_them_several(name: str, value: Any, values: int) -> None:
    assert len(_listed(name, value)) == values


def test_a_sweep_over_arrays() -> None:
    found = safa.sweep("boston", clients=5, rounds=2, train=False, speeds=[[1.0] * 5, [0.1] * 5])
    slow = [row["virtual_time_s"] for row in found.rows]
    assert slow[0] < slow[1]


def test_a_sweep_without_training_has_no_best_setting() -> None:
    found = safa.sweep("boston", clients=5, rounds=2, train=False, protocol=["safa", "fedavg"])
    for target in (None, "accuracy=0.5"):
        with pytest.raises(
            SafaError, match=r"no model was evaluated in the runs of .*, so that there is no best setting"
        ):
            found.best(target)


def test_the_page_of_a_sweep_that_was_just_made(tmp_path: Path) -> None:
    found = safa.sweep("boston", clients=5, rounds=2, train=False, protocol=["safa", "fedavg"])
    assert "fedavg" in safa.write_report(found, tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("lr", "words"), [([0.001, "auto"], "Varied: lr (0.001, auto); seed (0, 1)."), ("auto", "Varied: seed (0, 1).")]
)
def test_the_page_of_a_sweep_has_the_learning_rates_that_were_asked_for(lr: Any, words: str, tmp_path: Path) -> None:
    """Rates that are found may differ from seed to seed, and are one setting nevertheless."""
    safa.sweep(problem(), clients=5, rounds=2, lr=lr, seed=range(2), out=tmp_path / "d")
    table = pd.read_csv(tmp_path / "d" / "results.csv")
    table.loc[(table.seed == 1) & (table.lr > 0.001), "lr"] *= 3  # as if another one had been found
    table.to_csv(tmp_path / "d" / "results.csv", index=False)
    assert words in safa.write_report(tmp_path / "d").read_text()


def test_every_task_of_a_sweep_has_its_main_metric_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"task": "one", "seed": 0, "best_mae": 1.25, "best_loss": 2.0},
        {"task": "two", "seed": 0, "best_accuracy": 0.625, "best_loss": 3.0},
    ]
    print_settings(by_setting([{"task": row["task"], "seed": 0} for row in rows], rows))
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("mae", "1.25", "accuracy", "0.625"))
