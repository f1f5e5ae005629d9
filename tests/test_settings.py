"""Settings: defaults, presets, checks, config files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from safa import Settings
from safa.errors import SafaError


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
        ({"lr": "fast"}, "lr must be a number, not 'fast'"),
        ({"clock": "wall"}, "clock must be one of causal, paper, not 'wall'"),
        ({"keep_progress": 1}, "keep_progress must be true or false, not 1"),
        ({"protocol": "fedsgd"}, "no protocol 'fedsgd'; there are safa"),
        ({"colour": "red"}, "no setting 'colour'"),
        ({"preset": "other"}, "no preset 'other'; there is paper"),
        ({"protocol_options": {"patience": 1}}, "safa has no setting 'patience'; it has fraction, lag_tolerance"),
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
