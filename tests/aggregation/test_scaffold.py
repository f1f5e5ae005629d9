"""SCAFFOLD against Algorithm 1 of its paper, written down once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.optimisers import Adam
from safa.aggregation.scaffold import Scaffold
from safa.errors import MisuseError, SafaError
from safa.experiments.simulate import Experiment, resume, run_to_end
from safa.fleet import make_fleet
from safa.protocol.records import RoundRecord
from safa.runs import RunWriter, Settings
from safa.server.inbox import Inbox
from safa.simulation import run_rounds
from safa.tasks import task_of
from safa.testing import TakenStep, check_aggregator
from safa.training import Layout
from safa.training.setup import make_shards
from tests.aggregation.skewed import compare
from tests.training.problems import make

PROBLEM = make("network")
LR, EPOCHS, BATCH = 0.1, 2, 8


def literal_steps(server_step: float) -> Any:
    """Algorithm 1 from the server's side, with n_k / n in place of 1/N, while clients come and go."""

    def model(steps: Sequence[TakenStep]) -> NDArray[np.float64]:
        controls: dict[int, NDArray[np.float64]] = {}
        for step in steps:
            total = sum(step.present.values())
            zero = np.zeros_like(step.before)
            c = sum((n / total * controls.get(k, zero) for k, n in step.present.items()), zero)
            new = {
                int(k): controls.get(int(k), zero) - c + (x - y) / size
                for k, x, y, size in zip(step.client, step.start, step.rows, step.step_size, strict=True)
            }
            delta = sum((a * (y - x) for a, x, y in zip(step.weight, step.start, step.rows, strict=True)), zero)
            after = step.before + server_step * (delta / step.weight.sum() if len(step.client) else zero)
            controls |= new
        return np.asarray(after)

    return model


@pytest.mark.parametrize("server_step", [1.0, 0.4])
def test_it_keeps_the_contract_and_is_the_formula(server_step: float) -> None:
    check_aggregator(
        lambda: Scaffold(server_step=server_step),
        naive=literal_steps(server_step),
        refused=[lambda: Scaffold(server_step=0.0), lambda: Scaffold(server_step=float("nan"))],
        scripts=3,
    )


# -- whole runs ------------------------------------------------------------------------------------------------------


def settings_of(**given: Any) -> Settings:
    """Ten clients, of which three are drawn for a round; some of those crash."""
    plain = {"protocol": "fedavg", "aggregator": "scaffold", "clients": 10, "rounds": 9, "fraction": 0.3}
    local = {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "crash_rate": 0.2, "threads": 1, "seed": 3}
    values = {**plain, **local, "mean_size": 20.0, "size_spread": 0.4, "round_limit_s": 1e6, **given}
    return Settings.of(task_of(PROBLEM, "test"), **values)


class Paper:
    """Algorithm 1, option II: x and c at the server, c_i at the clients, one client after the other, step by step."""

    def __init__(self, settings: Settings) -> None:
        self.sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
        self.shards = make_shards(settings, PROBLEM, self.sizes)
        self.module = PROBLEM.start_model(settings.seed)
        self.layout, self.eta_g = Layout(self.module), settings.server_step
        self.x = self.layout.row(dict(self.module.named_parameters()))
        self.c = torch.zeros_like(self.x)
        self.c_i = [torch.zeros_like(self.x) for _ in self.shards]

    def gradient(self, y: Tensor, samples: Tensor) -> Tensor:
        self.layout.load(self.module, y)
        inputs, targets = PROBLEM.train
        loss = PROBLEM.loss(self.module(inputs[samples]), targets[samples])
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(self.module.parameters()))])

    def round(self, record: RoundRecord) -> None:
        delta_x, delta_c = torch.zeros_like(self.x), torch.zeros_like(self.x)
        for i, share in zip(record.client.tolist(), record.work.tolist(), strict=True):
            batches = EPOCHS * torch.from_numpy(self.shards[i]).split(BATCH)
            steps = max(1, round(share * len(batches)))
            y = self.x.clone()
            for samples in batches[:steps]:
                y = y - LR * (self.gradient(y, samples) - self.c_i[i] + self.c)
            c_plus = self.c_i[i] - self.c + (self.x - y) / (steps * LR)
            delta_x += self.sizes[i] / self.sizes[record.picked].sum() * (y - self.x)  # 1/|S| where n_i are equal
            delta_c += self.sizes[i] / self.sizes.sum() * (c_plus - self.c_i[i])  # 1/N
            self.c_i[i] = c_plus
        self.x = self.x + self.eta_g * delta_x
        self.c = self.c + delta_c


def row_of(experiment: Experiment) -> Tensor:
    assert experiment.server.learner is not None
    return experiment.server.learner.model


@pytest.mark.parametrize("trainer", ["batched", "serial"])
@pytest.mark.parametrize(
    "given",
    [{"size_spread": 0.0}, {}, {"server_step": 0.5}, {"protocol": "fedcs"}, {"memory_mb": 0.01}],
    ids=["equal sizes, as in the paper", "sizes differ", "server step", "fedcs", "in parts"],
)
def test_a_run_is_that_of_the_paper(given: dict[str, Any], trainer: str) -> None:
    settings = settings_of(trainer=trainer, **given)
    experiment, paper = Experiment(settings, PROBLEM), Paper(settings)
    took_part = set[int]()
    for record in experiment.rounds():
        paper.round(record)
        took_part |= set(record.picked.tolist())
        torch.testing.assert_close(row_of(experiment), paper.x, rtol=1e-9, atol=1e-9)
    assert 3 < len(took_part) <= 10
    assert float(paper.c.norm()) > 0.01, "the control variates are of no account"


def test_without_control_variates_it_would_be_another_model() -> None:
    """In the first round they are zero, and it is FedAvg; then it is not."""
    both = [Experiment(settings_of(aggregator=name), PROBLEM) for name in ("scaffold", "mean")]
    apart = []
    for _ in zip(*(experiment.rounds() for experiment in both), strict=True):
        one, other = map(row_of, both)
        apart.append(float((one - other).abs().max()))
    assert apart[0] < 1e-12
    assert apart[-1] > 1e-3


@pytest.mark.parametrize("trainer", ["batched", "serial"])
def test_a_run_that_was_stopped_is_resumed_to_the_same_bytes(trainer: str, tmp_path: Path) -> None:
    settings = settings_of(trainer=trainer, checkpoint_every=2)
    files = []
    for name, rounds in (("whole", 99), ("stopped", 5)):
        experiment = Experiment(settings, PROBLEM)
        writer = RunWriter.begin(tmp_path / name, experiment.settings)
        records = run_to_end(experiment, writer)
        for _, _record in zip(range(rounds), records, strict=False):
            pass
        records.close()  # type: ignore[attr-defined]
        if name == "stopped":
            resume(tmp_path / name, PROBLEM)
        files.append([(tmp_path / name / file).read_bytes() for file in ("rounds.jsonl", "model.safetensors")])
    assert files[0] == files[1]


@pytest.mark.parametrize("trainer", ["batched", "serial"])
def test_parts_of_the_work_are_counted_by_their_steps(trainer: str) -> None:
    settings = settings_of(trainer=trainer, crash_rate=0.0)
    experiment, paper = Experiment(settings, PROBLEM), Paper(settings)
    learner: Any = experiment.server.learner
    for record in run_rounds(settings):
        shares = np.linspace(0.1, 1.0, len(record.client)) if record.round % 2 else record.work
        partial = replace(record, work=shares)
        learner.apply(partial)
        paper.round(partial)
        torch.testing.assert_close(learner.model, paper.x, rtol=1e-9, atol=1e-9)


def test_a_learning_rate_of_zero_leaves_the_control_variates_alone() -> None:
    experiment = Experiment(settings_of(schedule="step:4:0"), PROBLEM)
    aggregator: Any = experiment.server.learner._aggregator  # type: ignore[union-attr]
    seen = [(row_of(experiment).clone(), aggregator.exact_sum()) for _ in experiment.rounds()]
    assert torch.isfinite(seen[-1][1]).all()
    assert all(torch.equal(*pair) for pair in zip(seen[3], seen[-1], strict=True))
    assert not torch.equal(seen[2][1], seen[3][1])


# -- where it is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"protocol": "safa"}, "the aggregator scaffold needs a protocol that averages updates; safa gives every"),
        ({"protocol": "fedbuff"}, "the aggregator scaffold needs a protocol that averages updates; fedbuff adds up"),
        ({"protocol": "local"}, "the aggregator scaffold needs a protocol that averages updates; local lets every"),
        ({"protocol": "fedasync"}, "averages updates of the latest version; fedasync makes versions while clients"),
        ({"momentum": 0.9}, "the aggregator scaffold needs clients that take plain SGD steps, without another"),
        ({"optimiser": "adam"}, "the aggregator scaffold needs clients that take plain SGD steps"),
        ({"proximal": 0.1}, "the aggregator scaffold needs clients that take plain SGD steps"),
        ({"clip": 1.0}, "the aggregator scaffold needs clients that take plain SGD steps"),
        ({"averaging": "population"}, "the aggregator scaffold averages over the participants"),
    ],
)
def test_it_is_refused_where_it_makes_no_sense(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SafaError, match=said) as told:
        Experiment(settings_of(**given), PROBLEM)
    assert "\n" not in str(told.value)


def test_weight_decay_is_a_part_of_the_gradient() -> None:
    models = []
    for decay in (0.0, 0.01):
        experiment = Experiment(settings_of(weight_decay=decay), PROBLEM)
        assert len(list(experiment.rounds())) == 9
        models.append(row_of(experiment))
    assert float(models[1].norm()) < float(models[0].norm())


def test_it_is_not_deployed_inside_an_optimiser_either() -> None:
    assert "cannot be deployed" in Adam(Scaffold()).not_deployed


def test_updates_of_older_versions_and_received_ones_are_refused() -> None:
    experiment = Experiment(settings_of(crash_rate=0.0), PROBLEM)
    learner: Any = experiment.server.learner
    rounds = experiment.rounds()
    next(rounds)
    record = next(rounds)
    late = replace(record, round=3, version=3, into=record.into + 1, loss=None, metrics={})
    with pytest.raises(SafaError, match="needs a protocol whose updates all start from the latest model"):
        learner.apply(late)
    inbox = Inbox(row_of(experiment), memory_mb=1.0)
    with pytest.raises(MisuseError, match="not known"):
        inbox.step_sizes(record.client, record.base, record.work)


# -- what it is good for ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_it_reaches_the_accuracy_of_fedavg_in_fewer_rounds_where_labels_are_skewed(seed: int) -> None:
    """As docs/aggregation.md says; there with more seeds, learning rates and rounds."""
    fedavg, scaffold, late, early = compare(lr=0.1, seed=seed, partition="shards:2", rounds=40)
    assert scaffold > fedavg + 0.02
    assert early <= 0.75 * late


@pytest.mark.slow
def test_it_fails_with_a_large_learning_rate_with_which_fedavg_still_learns() -> None:
    fedavg, scaffold, _, never = compare(lr=0.5, seed=0, partition="shards:2", rounds=40)
    assert fedavg > scaffold + 0.2
    assert never == 41
