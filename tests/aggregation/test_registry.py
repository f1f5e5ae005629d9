"""Aggregators by name: what there is, what they are given, and what makes no sense is refused in a sentence."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from torch import Tensor

from safa.aggregation import Aggregator, Step, registry
from safa.aggregation.buffer import Buffer
from safa.aggregation.mean import Mean
from safa.aggregation.mixing import Mixing
from safa.aggregation.own_models import OwnModels
from safa.aggregation.secant import Secant
from safa.errors import SafaError
from safa.protocol.records import Rule

HERE = "tests.aggregation.test_registry"


class Own(Mean):
    """A mean that takes settings.

    And more about them.
    """

    name = "mine"
    compares = True
    run_settings = ("seed",)

    def __init__(self, *, share: float, seed: int = 3, lr: float = 0.5) -> None:
        self.share, self.seed, self.lr = share, seed, lr


class Around(Aggregator):
    """Around another."""

    rules = Mean.rules

    def __init__(self, inner: Aggregator, *, beta: float = 0.9) -> None:
        self.inner, self.beta = inner, beta

    def step(self, step: Step) -> Tensor:
        return self.inner.step(step)


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package with an aggregator, and one under a name that is taken."""
    points = EntryPoints(
        [
            EntryPoint("mine", f"{HERE}:Own", "safa.aggregators"),
            EntryPoint("mean", f"{HERE}:Own", "safa.aggregators"),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))


def test_names_are_known_without_a_tensor_library() -> None:
    code = "import sys, safa.aggregation.registry as r; r.available(), r.optimisers(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_name_is_that_of_its_class() -> None:
    for name, (where, summary) in (registry._AGGREGATORS | registry._OPTIMISERS).items():
        assert summary
        if importlib.util.find_spec(where.partition(":")[0]):
            assert registry._load(where).name == name


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        SafaError, match=r"there is no aggregator 'meen' \(did you mean mean\?\); there are mean, population, cache, "
    ):
        registry.find("meen")
    with pytest.raises(SafaError, match=r"there is no server optimiser 'sgd'; there are momentum, adagrad, adam, yogi"):
        registry.find_optimiser("sgd")


def test_an_aggregator_of_this_package_is_built_by_its_name() -> None:
    assert isinstance(registry.build("mean", {"seed": 1}), Mean)
    with pytest.raises(SafaError, match=r"mean has no setting 'trim'; it has none"):
        registry.build("mean", {}, {"trim": 1})
    for nonsense in ("x", True, [0.5]):
        with pytest.raises(SafaError, match=r"gamma must be a number, not "):
            registry.build("secant", {}, {"gamma": nonsense})
    with pytest.raises(SafaError, match=r"one_gamma must be true or false, not 1"):
        registry.build("secant", {}, {"one_gamma": 1})
    assert isinstance(registry.build("secant", {}, {"one_gamma": True, "theta": 1}), Secant)


@pytest.mark.usefixtures("_elsewhere")
def test_another_package_adds_its_own() -> None:
    assert registry.available()["mine"] == "A mean that takes settings."
    assert registry.find("mean") is Mean  # the package's own comes first
    found = registry.build("mine", {"seed": 7, "lr": 0.1}, {"share": 0.2})
    assert isinstance(found, registry.find("mine"))
    assert (found.share, found.seed, found.lr) == (0.2, 7, 0.5)  # type: ignore[attr-defined]  # lr is its own
    with pytest.raises(
        SafaError,
        match=r"mine needs its setting 'share', which has no default; give it with --set aggregator.share=VALUE",
    ):
        registry.build("mine", {"seed": 7})


def test_an_entry_point_that_names_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("odd", "pathlib:Path", "safa.aggregators")])
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))
    with pytest.raises(SafaError, match=r"'odd' of safa.aggregators does not name an Aggregator: pathlib:Path"):
        registry.find("odd")


def test_what_is_in_the_tables_is_listed_and_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._AGGREGATORS, "other", (f"{HERE}:Own", "something else"))
    monkeypatch.setitem(registry._OPTIMISERS, "around", (f"{HERE}:Around", "nothing at all"))
    assert registry.available()["other"] == "something else"
    assert registry.optimisers()["around"] == "nothing at all"
    inner = registry.build("other", {}, {"share": 0.5})
    found = registry.build_optimiser("around", inner, {}, {"beta": 0.5})
    assert found.inner is inner  # type: ignore[attr-defined]
    assert found.beta == 0.5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cls", "rule", "protocol", "message"),
    [
        (Mixing, Rule.DELTA, "fedbuff", "mixing needs a protocol that averages updates; fedbuff adds up deltas"),
        (
            Buffer,
            Rule.CACHE,
            "safa",
            "buffer needs a protocol that averages updates or adds up deltas; "
            "safa gives every client a share of a cache",
        ),
        (
            OwnModels,
            Rule.AVERAGE,
            "fedavg",
            "own needs a protocol that lets every client train its own model; fedavg averages updates",
        ),
        (
            Own,
            Rule.AVERAGE,
            "fedasync",
            "mine compares the updates of a version with each other; fedasync makes every version of a single update",
        ),
    ],
)
def test_a_combination_without_sense_is_refused(cls: type[Aggregator], rule: Rule, protocol: str, message: str) -> None:
    with pytest.raises(SafaError) as refused:
        registry.check(cls, rule, protocol=protocol, several=protocol != "fedasync")
    assert str(refused.value) == f"the aggregator {message}"


def test_a_combination_that_makes_sense_is_not_refused() -> None:
    registry.check(Mean, Rule.AVERAGE, protocol="fedasync", several=False)
    registry.check(Own, Rule.CACHE, protocol="safa", several=True)


def test_the_registry_names_every_module_of_the_room() -> None:
    """A file with an aggregator that nobody can find by name would be dead."""
    named = {where.partition(":")[0].rpartition(".")[2] for where, _ in registry._AGGREGATORS.values()}
    named |= {where.partition(":")[0].rpartition(".")[2] for where, _ in registry._OPTIMISERS.values()}
    files = {file.stem for file in Path(registry.__file__).parent.glob("*.py")}
    assert files - named <= {"__init__", "aggregator", "registry", "row_per_client", "rows", "sums", "wrapper"}
