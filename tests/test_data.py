"""Data as clients have them: shards, pairs and data sets, partitions that decide sizes, and the fleets that follow."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from safa import Settings, resume, simulate
from safa.deploy.exchange.device import Device
from safa.deploy.exchange.messages import JoinReply, JoinRequest
from safa.errors import SafaError
from safa.experiments.replay import replay
from safa.experiments.simulate import Experiment, fleet_of, run_to_end
from safa.experiments.sweep import combinations
from safa.fleet import make_fleet
from safa.runs import RunWriter
from safa.simulation import run_rounds
from safa.tasks import UNNAMED, Problem, Samples, datasets, load_problem, partition, task_of
from safa.training.setup import make_shards, own_sizes

SIZES = (3, 9, 4, 8)
SEVEN = {"inputs": np.arange(14.0).reshape(7, 2) // 6, "columns": {"place": ["b", "a", "b", "c", "a", "b", "b"]}}


def pairs(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each client so many samples of its own."""
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 3, generator=made), torch.full((size,), number)) for number, size in enumerate(sizes)]


def problem_of(clients: Any = None, **more: Any) -> Problem:
    given: dict[str, Any] = {
        "model": lambda: torch.nn.Linear(3, 4),
        "loss": torch.nn.functional.cross_entropy,
        "test": (torch.ones(2, 3), torch.tensor([0, 1])),
        **more,
    }
    return Problem(**given) if clients is None else Problem.of_clients(clients, **given)


class Doubled(Dataset[Any]):
    """A data set with a transform, which counts how often it is applied."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs, self.reads = inputs, 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return 2 * self.inputs[index], index % 2


# -- problems ----------------------------------------------------------------------------------------------------------


def test_clients_with_tensors_of_their_own() -> None:
    clients = pairs(*SIZES)
    problem = problem_of(clients)
    assert problem.shards is not None
    assert problem.train[0].shape == (24, 3)
    for (inputs, targets), shard in zip(clients, problem.shards, strict=True):
        assert torch.equal(problem.train[0][shard], inputs)
        assert torch.equal(problem.train[1][shard], targets)


def test_clients_with_data_sets_whose_items_are_read_once() -> None:
    sets = [Doubled(inputs) for inputs, _ in pairs(2, 5)]
    problem = problem_of(sets, test=Doubled(torch.ones(3, 3)))
    assert problem.shards is not None
    assert [shard.tolist() for shard in problem.shards] == [[0, 1], [2, 3, 4, 5, 6]]
    assert torch.equal(problem.train[0], torch.cat([2 * each.inputs for each in sets]))
    assert problem.train[1].tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert [each.reads for each in sets] == [2, 5]
    assert torch.equal(problem.test[0], torch.full((3, 3), 2.0))


def test_pairs_and_data_sets_may_be_mixed() -> None:
    first, second = pairs(2, 3)
    problem = problem_of([first, TensorDataset(*second)])
    assert torch.equal(problem.train[0], torch.cat([first[0], second[0]]))


def test_a_bar_shows_how_far_reading_is_where_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tqdm  # type: ignore[import-untyped]

    bar = tqdm.tqdm
    monkeypatch.setattr(tqdm, "tqdm", lambda **given: bar(**given | {"disable": False}))  # as on a terminal
    problem_of([Doubled(inputs) for inputs, _ in pairs(3, 9)])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(datasets, "_PATIENCE_S", 0.0)
    problem_of([Doubled(inputs) for inputs, _ in pairs(3, 9)])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "samples:" in captured.err
    assert "/12" in captured.err


@pytest.mark.parametrize(
    ("clients", "complaint"),
    [
        ([], "there must be the data of one client at least"),
        ([(torch.ones(2, 3), torch.ones(3))], "client 0 has 2 inputs and 3 targets"),
        ([(torch.ones(0, 3), torch.ones(0))], "client 0 has 0 inputs and 0 targets"),
        ([(torch.ones(2, 3),)], "client 0 must be a pair (inputs, targets) of tensors, or a data set: not enough"),
        ([Doubled(torch.ones(0, 3))], "a data set must have a length above 0"),
        (
            [*pairs(2), (torch.ones(2, 4), torch.ones(2, dtype=torch.int64))],
            "the inputs of client 1 are [4] of torch.float32, but those of client 0 are [3] of torch.float32",
        ),
        ([*pairs(2), (torch.ones(2, 3), torch.ones(2))], "the targets of client 1 are [] of torch.float32, but those"),
    ],
)
def test_clients_whose_data_cannot_be_used(clients: Any, complaint: str) -> None:
    with pytest.raises(SafaError, match=re.escape(complaint)):
        problem_of(clients)


@pytest.mark.parametrize(
    ("shards", "complaint"),
    [
        ([], "there must be a shard at least"),
        ([[0], []], "shard 1 must be a list of one sample at least, not of shape [0]"),
        ([[[0]]], "shard 0 must be a list of one sample at least, not of shape [1, 1]"),
        ([[0], [1.5]], "shard 1 must hold whole numbers, the indices of samples, not float64"),
        ([[0], [True]], "shard 1 must hold whole numbers, the indices of samples, not bool"),
        ([[0, 6]], "shard 0 names sample 6, but the samples are 0 to 5"),
        ([[0, -1]], "shard 0 names sample -1, but the samples are 0 to 5"),
        ([[0, 1], [2, 1]], "sample 1 is in a shard more than once; a sample has one owner"),
        ([[2, 2]], "sample 2 is in a shard more than once; a sample has one owner"),
    ],
)
def test_shards_that_are_refused(shards: Any, complaint: str) -> None:
    with pytest.raises(SafaError) as refused:
        problem_of(train=pairs(6)[0], shards=shards)
    assert str(refused.value) == complaint


def test_a_column_needs_a_value_for_every_sample() -> None:
    with pytest.raises(SafaError, match="the column 'place' needs a value for each of 6 training samples"):
        problem_of(train=pairs(6)[0], columns={"place": [1, 2]})


# -- partitions that decide sizes --------------------------------------------------------------------------------------


def dealt(kind: str, clients: int, seed: int = 0, **more: Any) -> list[list[int]]:
    given: dict[str, Any] = SEVEN | {"targets": np.zeros(7)} | more
    samples = Samples(sizes=np.ones(clients), **given)
    return [part.tolist() for part in partition(kind, samples, np.random.default_rng(seed))]


def test_natural_is_the_shards_or_some_of_them_in_order() -> None:
    shards = [np.array([6]), np.array([3, 1]), np.array([2]), np.array([5, 4])]
    assert dealt("natural", 4, shards=shards) == [[6], [3, 1], [2], [5, 4]]
    chosen = [dealt("natural", 2, seed, shards=shards) for seed in range(20)]
    order = [shard.tolist() for shard in shards]
    assert all(order.index(first) < order.index(second) for first, second in chosen)
    assert len({repr(each) for each in chosen}) > 3
    assert chosen[3] == dealt("natural", 2, 3, shards=shards)
    with pytest.raises(SafaError, match="the data are those of 4 clients, and not of 5"):
        dealt("natural", 5, shards=shards)
    with pytest.raises(SafaError, match="partition = natural needs data that come in shards, a part for each client"):
        dealt("natural", 2)


def test_a_client_for_every_value_of_a_column() -> None:
    assert dealt("column:place", 3) == [[1, 4], [0, 2, 5, 6], [3]]
    assert dealt("column:1", 3) == [[0, 1, 2], [3, 4, 5], [6]]  # a numbered column of the inputs


def test_fewer_clients_than_values_hold_about_as_many_samples_each() -> None:
    values = np.repeat(np.arange(40), np.arange(1, 41))
    parts = dealt("column:value", 4, targets=values, columns={"value": values})
    assert sorted(itertools.chain(*parts)) == list(range(820))
    held = [set(values[part]) for part in parts]
    assert sum(map(len, held)) == 40  # a value is not parted
    assert max(map(len, parts)) - min(map(len, parts)) <= 40
    other = dealt("column:value", 4, 1, targets=values, columns={"value": values})
    assert parts != other


@pytest.mark.parametrize(
    ("kind", "more", "complaint"),
    [
        ("column:place", {}, "the column 'place' has 3 values, too few for 4 clients"),
        ("column:3", {}, "there is no column '3' of the training data; there are place, and 0 to 1"),
        (
            "column:who",
            {"inputs": np.ones((7, 2, 2)), "columns": {}},
            "no column 'who' of the training data; there are",
        ),
        ("column:a", {"columns": {"a": np.ones((7, 2))}}, "the column 'a' needs one value per sample, not the shape"),
    ],
)
def test_columns_that_are_refused(kind: str, more: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SafaError, match=re.escape(complaint)):
        dealt(kind, 4, **more)


def test_quantities_differ_the_more_the_smaller_alpha_is() -> None:
    spreads = []
    for alpha in ("1e-300", "0.01", "0.1", "1", "10", "1e300"):
        parts = dealt(f"quantity:{alpha}", 20, targets=np.zeros(5000), inputs=None, columns={})
        assert sorted(itertools.chain(*parts)) == list(range(5000))
        assert min(map(len, parts)) >= 1
        spreads.append(float(np.std([len(part) for part in parts])))
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] <= 1


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_fleet_follows_the_shards() -> None:
    problem = problem_of(pairs(*SIZES))
    settings = Settings.of(task_of(problem, "own"))
    assert (settings.clients, settings.partition, settings.mean_size) == (4, "natural", 6.0)
    assert fleet_of(settings, problem).sizes.tolist() == list(SIZES)
    fewer = replace(settings, clients=2)
    sizes = own_sizes(fewer, problem)
    assert sizes is not None
    assert [len(shard) for shard in make_shards(fewer, problem, np.ones(2))] == sizes.tolist()
    assert set(sizes) <= set(SIZES)
    assert len(fleet_of(replace(settings, partition="iid"), problem).sizes) == 4


def test_a_fleet_of_unknown_sizes_is_refused() -> None:
    settings = Settings.of("boston", partition="quantity:1")
    for make in (make_fleet, run_rounds):
        with pytest.raises(SafaError, match="with partition = quantity:1 a fleet can only be made for data that are"):
            make(settings)


@pytest.mark.parametrize("train", [True, False])
def test_rounds_are_those_of_the_sizes_whether_trained_or_not(train: bool) -> None:
    settings = Settings.of("boston", partition="quantity:0.5", rounds=2, train=train, threads=1)
    experiment = Experiment(settings)
    sizes = own_sizes(settings, load_problem("boston"))
    assert sizes is not None
    assert experiment.server.protocol.sizes.tolist() == sizes.tolist()
    assert len(list(experiment.rounds())) == 2


def test_a_fleet_follows_the_rare_classes_of_its_slow_clients() -> None:
    settings = Settings.of("digits", clients=30, partition="rare:2", fleet="two-speed", rounds=2, trainer="batched")
    problem = load_problem("digits")
    experiment = Experiment(settings)
    fleet = fleet_of(settings)
    shards = make_shards(settings, problem, np.ones(30), fleet.speeds)
    assert experiment.server.protocol.sizes.tolist() == fleet.sizes.tolist() == [len(shard) for shard in shards]
    slow = fleet.speeds == fleet.speeds.min()
    labels = [problem.train[1].numpy()[shard] for shard in shards]
    assert [bool((own >= 8).all()) for own in labels] == [bool((own >= 8).any()) for own in labels] == slow.tolist()
    assert len(list(experiment.rounds())) == 2


@pytest.mark.parametrize(
    "given", [{"sizes": "sizes.txt"}, {"mean_size": 9.0}, {"size_distribution": "equal"}, {"size_spread": 0.1}]
)
def test_sizes_are_refused_where_the_partition_decides_them(given: dict[str, Any]) -> None:
    (name,) = given
    sentence = f"{name} has no effect with partition = quantity:1, which decides what every client holds"
    with pytest.raises(SafaError, match=sentence):
        Settings.of("boston", partition="quantity:1", **given)


def test_a_sweep_refuses_before_its_first_run() -> None:
    with pytest.raises(SafaError, match="partition = natural needs data that come in shards"):
        combinations(["boston"], {"partition": ["iid", "natural"]})
    with pytest.raises(SafaError, match="too few for 300 clients"):
        combinations(["boston"], {"partition": ["column:3"], "clients": [2, 300], "train": [False]})


def test_natural_needs_shards() -> None:
    with pytest.raises(SafaError, match="partition = natural needs data that come in shards"):
        simulate("boston", partition="natural", rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["safa", "fedavg"])
def test_a_run_on_shards_is_resumed_and_replayed(tmp_path: Path, protocol: str) -> None:
    problem = problem_of([(x, y % 4) for x, y in pairs(*SIZES, 7, 7)])
    given: dict[str, Any] = {"protocol": protocol, "clients": 5, "rounds": 4, "checkpoint_every": 2, "threads": 1}
    run = simulate(problem, out=tmp_path / "run", **given)
    assert all(torch.equal(tensor, run.model()[name]) for name, tensor in replay(run, problem).items())
    (tmp_path / "run" / "summary.json").unlink()
    again = resume(tmp_path / "run", problem)
    assert all(torch.equal(tensor, run.model()[name]) for name, tensor in again.model().items())


def test_a_run_is_not_resumed_on_other_shards(tmp_path: Path) -> None:
    problem = problem_of(pairs(4, 8))
    experiment = Experiment(Settings.of(task_of(problem, UNNAMED), rounds=4, checkpoint_every=2, threads=1), problem)
    writer = RunWriter.begin(tmp_path / "run", experiment.settings)
    records = run_to_end(experiment, writer)
    assert [next(records).round for _ in range(3)] == [1, 2, 3]
    records.close()  # type: ignore[attr-defined]
    with pytest.raises(SafaError) as refused:
        resume(tmp_path / "run", problem_of(pairs(8, 4)))
    assert str(refused.value) == ("this is not the problem that the run was begun with: its clients hold other samples")
    assert len(list(resume(tmp_path / "run", problem).records())) == 4


def test_a_device_holds_the_shard_of_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_devices_for_safa.py").write_text(
        "from tests.test_data import SIZES, pairs, problem_of\nproblem = problem_of(pairs(*SIZES))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = "my_devices_for_safa:problem"
    request = JoinRequest(deployment="d", config=Settings.of(task, threads=1).to_toml())
    for part, size in enumerate(SIZES):
        reply = Device("ann", tmp_path, task=task, partition=part).join(request)
        assert reply == JoinReply(name="ann", size=float(size), details={"partition": part})
