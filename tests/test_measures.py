"""The metrics that there are to choose from against literal versions, and runs of problems with any metrics or none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import safa
from safa.analysis import measure
from safa.cli.program import main
from safa.errors import SafaError
from safa.experiments.sweep import combinations, run_sweep
from safa.fleet import make_fleet
from safa.report import read_table, run_page, sweep_page
from safa.runs import Settings
from safa.tasks import Metric, Problem, task_of
from safa.tasks.measures import accuracy, auc, f1, perplexity, recall_per_class
from safa.training.setup import make_shards
from tests.report.test_pages import specs_of, text_of

SETS = st.integers(0, 2**32 - 1).map(lambda seed: a_set(np.random.default_rng(seed)))


def a_set(rng: np.random.Generator, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Outputs with many ties, and targets that may lack a class."""
    samples, fewer = int(rng.integers(1, 30)), int(rng.integers(1, classes + 1))
    output = torch.from_numpy(rng.integers(-3, 4, (samples, classes)) / 2.0)
    return output, torch.from_numpy(rng.integers(0, fewer, samples))


def same(one: float | Tensor, other: float) -> bool:
    return math.isclose(float(one), other, rel_tol=1e-6) or (math.isnan(float(one)) and math.isnan(other))


def literal_auc(scores: list[float], positive: list[bool]) -> float:
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, is_one in zip(scores, positive, strict=True)
        for b, is_other in zip(scores, positive, strict=True)
        if is_one and not is_other
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


def literal_recalls(found: list[int], had: list[int], classes: int) -> list[float]:
    return [
        sum(a == b == k for a, b in zip(found, had, strict=True)) / had.count(k) if k in had else math.nan
        for k in range(classes)
    ]


def literal_f1(found: list[int], had: list[int]) -> float:
    scores = []
    for k in {*found, *had}:
        right = sum(a == b == k for a, b in zip(found, had, strict=True))
        precision, recall = right / max(1, found.count(k)), right / max(1, had.count(k))
        scores.append(2 * precision * recall / (precision + recall) if right else 0.0)
    return sum(scores) / len(scores)


@given(SETS)
def test_the_area_under_the_curve_counts_pairs_and_ties_half(samples: tuple[Tensor, Tensor]) -> None:
    output, target = samples[0][:, 0], samples[1] % 2
    expected = literal_auc(output.tolist(), (target == 1).tolist())
    assert same(auc(output, target), expected)
    assert same(auc(output.unsqueeze(1), 2 * target - 1), expected), "labels may be -1 and +1"
    assert same(auc(torch.stack([torch.zeros_like(output), output], dim=1), target), expected)


@given(SETS)
def test_class_metrics_are_their_literal_versions(samples: tuple[Tensor, Tensor]) -> None:
    output, target = samples
    found, had = output.argmax(dim=1).tolist(), target.tolist()
    assert same(accuracy(output, target), sum(a == b for a, b in zip(found, had, strict=True)) / len(had))
    assert same(f1(output, target), literal_f1(found, had))
    recalls = zip(recall_per_class(output, target).tolist(), literal_recalls(found, had, 4), strict=True)
    assert all(same(one, other) for one, other in recalls)


@given(SETS)
def test_perplexity_is_the_same_from_logits_and_from_logarithms_of_probabilities(
    samples: tuple[Tensor, Tensor],
) -> None:
    output, target = samples
    rows = zip(output.tolist(), target.tolist(), strict=True)
    surprise = [math.log(sum(math.exp(value) for value in row)) - row[k] for row, k in rows]
    expected = math.exp(sum(surprise) / len(surprise))
    assert same(perplexity.measure(output, target), expected)
    assert same(perplexity.measure(output.log_softmax(dim=1), target), expected)
    assert not perplexity.higher_is_better


def test_sequences_have_their_classes_where_torch_has_them() -> None:
    output, target = a_set(np.random.default_rng(3))
    as_sequences = output.T.unsqueeze(0), target.unsqueeze(0)  # one sample with a class for each of its places
    for metric in (accuracy, f1, perplexity.measure):
        assert same(metric(*as_sequences), float(metric(output, target)))


def test_what_is_no_number_is_no_number() -> None:
    assert math.isnan(auc(torch.tensor([1.0, math.nan]), torch.tensor([0, 1])))
    assert float(auc(torch.tensor([-math.inf, math.inf]), torch.tensor([0, 1]))) == 1.0
    assert math.isinf(perplexity.measure(torch.tensor([[0.0, 1e4]]), torch.tensor([0])))


# -- problems with any metrics -----------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"clients": 4, "rounds": 4, "lr": 0.1, "protocol": "fedavg", "fraction": 1.0, "threads": 1}


def problem(**metrics: Any) -> Problem:
    """Three classes, the last of which no test sample has."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(80, 3, generator=generator)
    targets = inputs.argmax(dim=1)
    targets[60:] = inputs[60:, :2].argmax(dim=1)
    return Problem(
        model=lambda: nn.Linear(3, 3),
        loss=functional.cross_entropy,
        metrics=metrics,
        train=(inputs[:60], targets[:60]),
        test=(inputs[60:], targets[60:]),
    )


def test_metrics_by_name_and_direction() -> None:
    made = problem(f1=f1, perplexity=perplexity, recall=recall_per_class)
    assert made.directions == {"f1": "higher", "perplexity": "lower", "recall": "higher"}
    run = safa.simulate(made, **SMALL)
    assert run.summary is not None
    records = [record for record in run.records() if record.loss is not None]
    assert list(records[0].metrics) == ["f1", "perplexity", "recall", "recall_0", "recall_1", "recall_2"]
    assert run.summary["best_perplexity"] == min(record.metrics["perplexity"] for record in records)
    assert run.summary["best_f1"] == max(record.metrics["f1"] for record in records)
    assert run.summary["last_recall"] == records[-1].metrics["recall"]
    last = records[-1].metrics
    assert math.isnan(last["recall_2"]), "no sample has this class"
    assert last["recall"] == pytest.approx((last["recall_0"] + last["recall_1"]) / 2)


def test_metrics_that_are_no_numbers_break_neither_run_nor_file_nor_page(tmp_path: Path) -> None:
    made = problem(nothing=lambda output, target: math.nan, endless=lambda output, target: math.inf, f1=f1)
    run = safa.simulate(made, **SMALL, out=tmp_path / "run")
    again = safa.load_run(tmp_path / "run")
    assert [record.to_json() for record in again.records()] == [record.to_json() for record in run.records()]
    assert again.summary is not None
    assert (again.summary["best_nothing"], again.summary["last_endless"]) == ("nan", "inf")
    page = run_page(again)
    assert "The nothing of the global model was never a finite number." in text_of(page)
    assert "F1 over rounds" in text_of(page)
    json.dumps(specs_of(page), allow_nan=False)


def test_the_best_is_not_lost_to_a_nan() -> None:
    scores = iter([0.0, math.nan, 3.0, 2.0])  # the first is that of the check before the first round
    made = problem(error=Metric(lambda output, target: next(scores, math.nan), higher_is_better=False))
    run = safa.simulate(made, **SMALL | {"rounds": 5})
    assert run.summary is not None
    assert run.summary["best_error"] == 2.0
    assert math.isnan(run.summary["last_error"])


@pytest.mark.parametrize(
    ("metric", "complaint"),
    [
        (lambda output, target: 1 / 0, "the metric mine failed: ZeroDivisionError: division by zero"),
        (lambda output, target: "high", "the metric mine must be a number, or a tensor of one for each class, not 'hi"),
        (lambda output, target: None, "the metric mine must be a number, or a tensor of one for each class, not None"),
        (lambda output, target: torch.empty(0), "the metric mine must be a number, or a tensor of one for each"),
        (3, "the metric mine failed: TypeError: 'int' object is not callable"),
    ],
)
def test_a_metric_that_fails_is_refused_before_the_first_round(metric: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SafaError, match=complaint):
        safa.simulate(problem(mine=metric), **SMALL, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_metric_that_fails_on_the_data_of_a_client_is_refused_before_the_first_round(tmp_path: Path) -> None:
    def needs_a_class(output: Tensor, target: Tensor) -> float:
        return 1.0 / float((target == 2).sum() == 0)  # which samples for training have, and those for testing have not

    given = SMALL | {"out": tmp_path / "run"}
    with pytest.raises(SafaError, match="the metric mine failed: ZeroDivisionError"):
        safa.simulate(problem(mine=needs_a_class), **given, eval_clients=True)
    assert not (tmp_path / "run").exists()
    assert safa.simulate(problem(mine=needs_a_class), **given).summary


def test_a_metric_that_needs_the_whole_test_set_is_let_through() -> None:
    weights = torch.ones(20)
    run = safa.simulate(problem(mine=lambda output, target: (weights * (output[:, 0] > 0)).sum()), **SMALL)
    assert run.summary is not None
    assert run.summary["last_mine"] >= 0


@pytest.mark.parametrize("name", ["loss", "held", "2nd", "a b", ""])
def test_a_metric_needs_a_name_of_its_own(name: str) -> None:
    with pytest.raises(SafaError, match="a metric needs a name of letters, digits and _"):
        replace(problem(), metrics={name: f1})
    with pytest.raises(SafaError, match="metrics are functions by name, not"):
        replace(problem(), metrics=f1)  # type: ignore[arg-type]


# -- none at all -------------------------------------------------------------------------------------------------------

MODULE = """
import torch
from safa.tasks import Problem
x = torch.arange(60.0).reshape(30, 2) / 60
bare = Problem(model=lambda: torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss, train=(x[:20], x[:20, :1]),
               test=(x[20:], x[20:, :1]))
"""


def test_a_problem_without_metrics_goes_by_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare_for_safa.py").write_text(MODULE)
    given = "--clients 3 --rounds 3 --mean-size 6 --lr 0.1 --eval-clients yes"
    assert main(f"run bare_for_safa:bare {given} --out run".split()) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "best_loss" in said
    assert "client_loss_worst_decile" in said
    assert "On the test set the loss of the last model is" in said
    assert "accuracy" not in said
    page = run_page(safa.load_run("run"))
    assert "Loss over rounds" in text_of(page)
    assert "accuracy" not in text_of(page)
    main(f"sweep bare_for_safa:bare --protocol safa,fedavg {given} --out sweep --workers 1".split())
    assert "loss" in capsys.readouterr().out
    page = text_of(sweep_page(read_table(tmp_path / "sweep" / "results.csv")))
    assert "Best loss of the last model" in page
    assert "Last loss" in page


# -- on the data of every client ---------------------------------------------------------------------------------------


def served(metric: Metric | Callable[[Tensor, Tensor], Tensor | float] | None) -> dict[str, Any]:
    made = problem() if metric is None else problem(mine=metric)
    run = safa.simulate(made, **SMALL, eval_clients=True)
    assert run.summary is not None
    return run.summary


def test_the_worst_served_are_those_with_the_worst_of_the_main_metric() -> None:
    higher, lower, loss = served(accuracy), served(perplexity), served(None)
    assert higher["client_mine_worst_decile"] < higher["client_mine_mean"]
    assert lower["client_mine_worst_decile"] > lower["client_mine_mean"]
    assert loss["client_loss_worst_decile"] > loss["client_loss_mean"]


def test_clients_whose_data_do_not_define_the_metric_are_left_out() -> None:
    settings = Settings.of(task_of(problem(), "your own"), **SMALL)
    shards = make_shards(settings, problem(), np.asarray(make_fleet(settings).sizes, dtype=np.float64))
    sizes = np.array([len(shard) for shard in shards])
    defined = sizes[sizes > sizes.min()]
    assert 0 < len(defined) < len(sizes)
    few = served(lambda output, target: len(target) if len(target) > sizes.min() else math.nan)
    assert few["client_mine_mean"] == pytest.approx(defined.mean())
    assert few["client_mine_worst_decile"] == defined.min()
    nobody = served(lambda output, target: math.nan)
    assert math.isnan(nobody["client_mine_mean"])


# -- pages -------------------------------------------------------------------------------------------------------------


def test_a_page_draws_four_metrics_and_the_loss_and_names_the_rest() -> None:
    made = problem(f1=f1, ppl=perplexity, recall=recall_per_class, share=accuracy, fifth=accuracy)
    page = run_page(safa.simulate(made, **SMALL))
    said = text_of(page)
    titles = [name for name in ("F1", "Ppl", "Recall", "Share", "Fifth", "Loss") if f"{name} over rounds" in said]
    assert titles == ["F1", "Ppl", "Recall", "Share", "Loss"]
    assert said.index("F1 over rounds") < said.index("Ppl over rounds") < said.index("Loss over rounds")
    assert "Recall_0 over rounds" not in said
    assert all(name in said for name in ("recall_0", "recall_1", "recall_2", "fifth"))


def test_a_metric_may_have_the_name_of_a_column() -> None:
    page = run_page(safa.simulate(problem(version=f1, low=accuracy, score=f1), **SMALL))
    assert "Version over rounds" in text_of(page)


def test_the_best_of_a_sweep_is_the_lowest_where_lower_is_better(tmp_path: Path) -> None:
    runs = combinations(["boston"], {"train": [False], "rounds": [3], "protocol": ["safa", "fedavg"]})
    list(run_sweep(runs, tmp_path / "sweep"))
    rows = [
        {("metric.ppl" if name == "metric.accuracy" else name): value for name, value in row.items()}
        | {"metric.ppl": "lower", "last_ppl": ppl, "best_ppl": ppl, "client_ppl_mean": 2 * ppl}
        for row, ppl in zip(read_table(tmp_path / "sweep" / "results.csv"), (3.0, 2.0), strict=True)
    ]
    page = sweep_page(rows)
    assert "Best ppl of the last model FedAvg ahead, but cannot be told from the next Ppl last_ppl 2 " in text_of(page)
    assert "Last ppl" in text_of(page)
    assert "client ppl mean" in text_of(page)
    rows[1]["last_ppl"] = math.inf
    page = sweep_page(rows)
    assert "Best ppl of the last model SAFA ahead, but cannot be told from the next Ppl last_ppl 3 " in text_of(page)
    json.dumps(specs_of(page), allow_nan=False)
    for row in rows:
        row["last_ppl"] = math.nan
    assert "No setting has a finite score" in text_of(sweep_page(rows))


def test_measuring_records_needs_no_directions() -> None:
    run = safa.simulate(problem(f1=f1), **SMALL)
    values = measure(run.records(), run.settings.metrics)
    assert run.summary == values
    assert "best_f1" not in measure(run.records())
