"""Settings: defaults, presets, checks, config files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from safa import Settings, run_rounds
from safa.aggregation import registry
from safa.errors import SafaError
from safa.protocol import available as protocols
from safa.runs import presets
from safa.runs.options import Clock
from safa.runs.settings import CLOCKS


def test_a_task_brings_table_2() -> None:
    settings = Settings.of("kdd99")
    values = (settings.clients, settings.rounds, settings.epochs, settings.batch_size, settings.lr)
    assert values == (500, 100, 5, 100, 0.01)
    assert settings.round_limit_s == 1620.0
    assert (settings.clock, settings.lag_tolerance, settings.averaging) == ("causal", 5, "participants")


def test_the_paper_preset() -> None:
    settings = Settings.of("mnist", base={"rounds": 3, "seed": 9}, preset="paper", fraction=0.7)
    assert (settings.clock, settings.lag_tolerance, settings.averaging) == ("paper", 6, "population")
    assert settings.rounds == 50  # all of Table II
    assert settings.seed == 9
    assert settings.fraction == 0.7
    assert settings.server_optimiser == "safa.paper.habits:AsPrinted"


def test_a_preset_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("fraction = 0.7\nlag_tolerance = 2\n")
    settings = Settings.of("mnist", base={"fraction": 0.2, "rounds": 3, "seed": 9}, preset=file, lag_tolerance=4)
    assert (settings.fraction, settings.lag_tolerance, settings.rounds, settings.seed) == (0.7, 4, 50, 9)
    assert Settings.of("mnist", preset=str(file), protocol="fedavg").lag_tolerance == 2  # which has no effect there
    assert presets.names() == ("paper",)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot read .*mine.toml: No such file"),
        (b"\xff\xfe", "cannot read .*mine.toml: it is not text"),
        (b"fraction: 1", "mine.toml is not a preset: "),
        (b"task = 'boston'", "mine.toml is not a preset: it must hold settings alone, and no task"),
        (b"[protocol_options]\na = 1", "it must hold settings alone, and no protocol_options"),
        (b"colour = 'red'", "no setting 'colour'"),
        (b"fraction = 3", "fraction must be above 0 and at most 1, not 3"),
    ],
)
def test_a_file_that_is_no_preset_is_refused(text: bytes | None, complaint: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "mine.toml").write_bytes(text)
    with pytest.raises(SafaError, match=complaint):
        Settings.of("boston", preset=tmp_path / "mine.toml")


def test_no_preset_changes_what_another_run_is_given() -> None:
    with pytest.raises(TypeError):
        presets.read("paper")["clock"] = "causal"  # type: ignore[index]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"fraction": 0}, "fraction must be above 0 and at most 1, not 0"),
        ({"fraction": 1.5}, "fraction must be above 0 and at most 1, not 1.5"),
        ({"crash_rate": -0.1}, "crash_rate must be at least 0 and at most 1, not -0.1"),
        ({"crash_rate": math.nan}, "crash_rate must be"),
        ({"lag_tolerance": 0}, "lag_tolerance must be at least 1, not 0"),
        ({"rounds": 2.5}, "rounds must be a whole number, not 2.5"),
        ({"rounds": math.inf}, "rounds must be a whole number, not inf"),
        ({"seed": True}, "seed must be a whole number, not True"),
        ({"lr": "fast"}, "lr must be auto or a number, not 'fast'"),
        ({"clock": "wall"}, "clock must be one of causal, paper, not 'wall'"),
        ({"keep_progress": 1}, "keep_progress must be true or false, not 1"),
        ({"protocol": "fedsgd"}, "no protocol 'fedsgd'; there are safa"),
        ({"colour": "red"}, "no setting 'colour'"),
        ({"preset": "other"}, "no preset 'other'; there is paper"),
        ({"protocol_options": {"patience": 1}}, "safa has no setting 'patience'; it has fraction, lag_tolerance"),
        ({"protocol_options": 3}, "protocol_options must be settings by name, not 3"),
        ({"protocol_options": {"lag_tolerance": "abc"}}, "lag_tolerance must be a whole number, not 'abc'"),
        ({"momentum": 1.5}, "momentum must be at least 0 and below 1, not 1.5"),
        ({"momentum": 1}, "momentum must be at least 0 and below 1, not 1"),
        ({"lr": math.inf}, "lr must be above 0 and below inf, not inf"),
        ({"mean_size": math.inf}, "mean_size must be at least 1 and at most 1000000000.0, not inf"),
        ({"clients": 10**10}, "clients must be at least 1 and at most 100000000, not 10000000000"),
        ({"rounds": 10**400}, "rounds must be at least 1 and at most 1000000000, not 1000"),
        ({"seed": 2**64}, "seed must be at least 0 and at most 9223372036854775807, not 18446744073709551616"),
        ({"fraction": 10**400}, "fraction must be above 0 and at most 1, not 1000"),
        ({"down_mbps": 10**400}, "down_mbps must be above 0 and at most 9223372036854775807, not 1000"),
        ({"protocol": ["safa"]}, r"protocol must be text, not \['safa'\]"),
        ({"device": 3}, "device must be text, not 3"),
        ({"speeds": 3}, "speeds must be the name of a file, or a number for each client, not 3"),
        ({"train": 1}, "train must be true or false, not 1"),
    ],
)
def test_wrong_settings_say_what_is_wrong(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SafaError, match=complaint):
        Settings.of("boston", **given)


def test_an_unknown_task_lists_what_there_is() -> None:
    with pytest.raises(SafaError, match="no task 'cifar'; there are boston, mnist, kdd99"):
        Settings.of("cifar")


def test_a_config_file_says_everything(tmp_path: Path) -> None:
    odd: dict[str, Any] = {"round_limit_s": math.inf, "speeds": 'odd "name".txt', "protocol_options": {"fraction": 0.5}}
    settings = Settings.of("boston", **odd)
    (tmp_path / "config.toml").write_text(settings.to_toml())
    values = Settings.read_toml(tmp_path / "config.toml")
    assert Settings.of(values.pop("task"), **values) == settings
    assert settings.values()["fraction"] == 0.5


def test_a_broken_config_file_says_so(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    with pytest.raises(SafaError, match="cannot read"):
        Settings.read_toml(file)
    file.write_text("fraction = = 3")
    with pytest.raises(SafaError, match="is not a config file"):
        Settings.read_toml(file)
    file.write_bytes(b"\xff\xff")
    with pytest.raises(SafaError, match="it is not text"):
        Settings.read_toml(file)
    file.write_text(f"rounds = 1{'0' * 5000}")
    with pytest.raises(SafaError, match="is not a config file"):
        Settings.read_toml(file)


# -- settings that have no effect ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"protocol": "fedavg", "lag_tolerance": 3}, "lag_tolerance has no effect with protocol = fedavg; .* safa"),
        ({"server_lr": 2.0}, "server_lr has no effect with protocol = safa; it is for protocol = fedbuff"),
        ({"buffer_size": 3}, "buffer_size has no effect with protocol = safa"),
        ({"protocol": "fedbuff", "mixing": 0.1}, "mixing has no effect with protocol = fedbuff; .* fedasync"),
        ({"protocol": "local", "averaging": "population"}, "averaging has no effect .* protocol = fedavg or fedcs"),
        ({"protocol": "fedavg", "estimate_error": 1.0}, "estimate_error has no effect .* protocol = fedcs"),
        ({"protocol": "fedavg", "keep_progress": False}, "keep_progress has no effect with protocol = fedavg"),
        ({"protocol": "fedasync", "hinge_lag": 1}, "hinge_lag has no effect with staleness = polynomial; .* hinge"),
        (
            {"protocol": "fedasync", "staleness": "hinge", "staleness_exponent": 1},
            "staleness_exponent has no effect with staleness = hinge",
        ),
        ({"optimiser": "adam", "momentum": 0.5}, "momentum has no effect with optimiser = adam; .* optimiser = sgd"),
        ({"clock": "paper", "detection_delay_s": 5}, "detection_delay_s has no effect with clock = paper; .* causal"),
        ({"clock": "paper", "fault_model": "round"}, "fault_model has no effect with clock = paper"),
        ({"clock": "paper", "return_delay_s": 9}, "return_delay_s has no effect with clock = paper; .* causal"),
        (
            {"fault_model": "round", "return_delay_s": 9},
            "return_delay_s has no effect with fault_model = round; .*attempt",
        ),
        ({"clock": "paper", "online_hours": 8}, "online_hours has no effect with clock = paper; .* causal"),
        ({"trace": "t", "online_hours": 8}, "online_hours has no effect where trace come from a file; leave out one"),
        ({"speed_spread": 0.1}, "speed_spread has no effect with speed_distribution = exponential; .* lognormal"),
        ({"size_distribution": "equal", "size_spread": 0.1}, "size_spread has no effect with size_distribution"),
        ({"speeds": "x", "speed_mean": 2}, "speed_mean has no effect where speeds come from a file"),
        ({"speeds": "x", "speed_floor": 0.2}, "speed_floor has no effect where speeds come from a file"),
        ({"sizes": "x", "mean_size": 30}, "mean_size has no effect where sizes come from a file"),
        ({"links": "x", "up_mbps": 3}, "up_mbps has no effect where links come from a file"),
        ({"protocol_options": {"lag_tolerance": 3}, "protocol": "fedavg"}, "fedavg has no setting 'lag_tolerance'"),
        ({"protocol_options": {"hinge_lag": 3.0}, "protocol": "fedasync"}, "hinge_lag has no effect"),
        ({"base": {"protocol": "fedavg", "lag_tolerance": 3}}, "lag_tolerance has no effect"),
        ({"preset": "paper", "protocol": "fedavg", "lag_tolerance": 3}, "lag_tolerance has no effect"),
    ],
    ids=str,
)
def test_a_setting_without_effect_is_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SafaError, match=complaint):
        Settings.of("boston", **given)


@pytest.mark.parametrize(
    "given",
    [
        {"protocol": "fedavg", "lag_tolerance": 5, "server_lr": 1},  # the defaults
        {"protocol": "fedavg", "preset": "paper", "lag_tolerance": 6},  # the preset's
        {"sizes": "x", "mean_size": 506 / 5},  # the task's
        {"protocol": "local", "rounds": 3},
        {"train": False, "lr": 3.0, "partition": "iid", "momentum": 0.5},  # --no-train may be added to any command
    ],
    ids=str,
)
def test_a_default_value_is_accepted_anywhere(given: dict[str, Any]) -> None:
    assert Settings.of("boston", **given)


@pytest.mark.parametrize("protocol", ["safa", "fedavg", "fedcs", "local"])
@pytest.mark.parametrize("preset", [None, "paper"])
def test_the_config_file_of_a_run_can_be_given(protocol: str, preset: str | None, tmp_path: Path) -> None:
    settings = Settings.of("boston", protocol=protocol, preset=preset)
    (tmp_path / "config.toml").write_text(settings.to_toml())
    values = Settings.read_toml(tmp_path / "config.toml")
    assert Settings.of(values.pop("task"), base=values) == settings


CHANGED: dict[str, Any] = {
    "lag_tolerance": 1, "averaging": "population", "fault_model": "round", "keep_progress": False,
    "detection_delay_s": 5.0, "return_delay_s": 50.0,
    "fleet": "two-speed", "mean_size": 50.0, "size_distribution": "equal", "size_spread": 0.1,
    "speed_distribution": "constant", "speed_mean": 3.0, "speed_spread": 0.1, "speed_floor": 0.3, "down_mbps": 3.0,
    "up_mbps": 3.0, "estimate_error": 2.0, "mixing": 0.1, "staleness": "constant", "staleness_exponent": 2.0,
    "hinge_slope": 1.0, "hinge_lag": 1.0, "buffer_size": 3, "server_lr": 2.0, "fraction": 0.4, "round_limit_s": 20.0,
    "work_cap": 0.5, "interval_share": 0.2, "step_ratio": 0.9, "late_factor": 1.0,
}  # fmt: skip
"""Settings with which rounds differ, each with a value other than its default."""


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("protocol", protocols())
def test_exactly_those_settings_are_refused_that_change_nothing(protocol: str, clock: Clock) -> None:
    if clock == "paper" and protocol not in ("safa", "fedavg", "fedcs", "local"):
        return
    plain = Settings.of("digits", protocol=protocol, clock=clock, clients=12, rounds=8, crash_rate=0.5, train=False)
    bad = replace(plain, crash_rate=0.9, fraction=0.9)
    short = replace(plain, fraction=0.9, round_limit_s=60.0, estimate_error=3.0)  # attempts outlast their round
    worlds = [(world, told(world)) for world in (plain, bad, short)]
    for name, value in CHANGED.items():
        if name == "work_cap" and clock == "paper":
            continue  # it is refused
        changes_nothing = all(told(replace(world, **{name: value})) == before for world, before in worlds)
        assert changes_nothing == bool(plain.unmet(name)), name


def told(settings: Settings) -> str:
    """The rounds of a run, as they are written."""
    return "".join(record.to_json() for record in run_rounds(settings))


NAMES: dict[str, Iterable[Any]] = {
    "protocol": protocols(),
    "aggregator": registry.available(),
    "server_optimiser": registry.optimisers(),
    "train": (True, False),
    "local_steps": (0,),
}
"""What settings without a list of choices may be."""


def test_every_setting_that_needs_another_names_one_that_there_is() -> None:
    known = {item.name: item for item in fields(Settings)}
    for item in known.values():
        for other, values in item.metadata.get("needs", {}).items():
            choices = known[other].metadata.get("choices") or [*NAMES.get(other, ()), None]
            assert set(values) <= set(choices), item.name
