"""Every aggregator and server optimiser trains digits, over FedAvg's selection and over SAFA's; robust ones resist."""

from __future__ import annotations

from typing import Any

import pytest

from safa import SafaError, Settings
from safa.experiments.simulate import Experiment
from tests.aggregation.hostile import with_hostile

CHOICES: list[dict[str, Any]] = [
    *({"server_optimiser": name} for name in ("momentum", "adagrad", "adam", "yogi")),
    *({"aggregator": name} for name in ("median", "trimmed_mean", "krum", "geometric_median")),
    *({"aggregator": name, "server_step": 0.3} for name in ("mifa", "fedvarp")),
]
ROBUST = ("median", "trimmed_mean", "krum", "geometric_median")


def settings_of(protocol: str, **given: Any) -> Settings:
    plain = {"clients": 20, "fraction": 0.3, "crash_rate": 0.1, "rounds": 20, "eval_every": 20, "threads": 1}
    return Settings.of("digits", protocol=protocol, partition="iid", **plain | given)


def accuracy_of(experiment: Experiment) -> float:
    for record in experiment.rounds():
        last = record
    return last.metrics["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["fedavg", "safa"])
@pytest.mark.parametrize("chosen", CHOICES, ids=lambda chosen: next(iter(chosen.values())))
def test_it_trains_digits(chosen: dict[str, Any], protocol: str) -> None:
    assert accuracy_of(Experiment(settings_of(protocol, **chosen))) > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("aggregator", ["buffer", "ca2fl", "fedstale", "refl", "secant"])
def test_it_trains_digits_of_buffered_updates(aggregator: str) -> None:
    careful = {"server_step": 0.3} if aggregator in ("ca2fl", "fedstale") else {}
    assert accuracy_of(Experiment(settings_of("fedbuff", aggregator=aggregator, buffer_size=5, **careful))) > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["fedavg", "safa"])
@pytest.mark.parametrize("aggregator", [*ROBUST, "mean"])
def test_robust_aggregators_resist_one_hostile_client_in_ten_and_the_mean_does_not(
    aggregator: str, protocol: str
) -> None:
    settings = settings_of(protocol, aggregator=aggregator)
    lost = accuracy_of(Experiment(settings)) - accuracy_of(with_hostile(settings))
    assert (lost <= 0.05) == (aggregator in ROBUST), lost


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"protocol": "fedasync", "aggregator": "median"}, "median compares .*; fedasync makes every version of a"),
        ({"protocol": "safa", "aggregator": "own"}, "own needs a protocol that lets every client train its own model"),
        ({"protocol": "fedbuff", "aggregator": "cache"}, "the aggregator cache needs .*; fedbuff adds up deltas"),
        ({"protocol": "local", "server_optimiser": "adam"}, "a server optimiser has no effect around own"),
        ({"protocol": "fedavg", "aggregator": "nonsense"}, "there is no aggregator 'nonsense'; there are mean, "),
        ({"protocol": "fedavg", "server_optimiser": "nonsense"}, "there is no server optimiser 'nonsense'"),
        ({"protocol": "fedavg", "trim": 0.1}, "trim has no effect with aggregator = auto; it is for .* trimmed_mean"),
        ({"protocol": "fedavg", "server_beta2": 0.5}, "server_beta2 has no effect with server_optimiser = none"),
        ({"protocol": "fedavg", "aggregator_options": {"x": 1}}, "mean has no setting 'x'"),
    ],
)  # fmt: skip
def test_a_combination_that_makes_no_sense_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SafaError, match=said):
        Experiment(Settings.of("digits", **given))
