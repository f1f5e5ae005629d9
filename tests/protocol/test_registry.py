"""Protocols by name, and those of other packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from safa import Settings, measure, run_rounds
from safa.errors import SafaError
from safa.experiments.sweep import combinations, run_sweep
from safa.protocol import Safa, available, build, find
from safa.report import read_table
from safa.testing import check_protocol

FOREIGN = '''
from safa.protocol import FedAvg

class Patient(FedAvg):
    """Waits a little longer."""

    name = "patient"

    def __init__(self, sizes, *, fraction, patience=1.0, round_limit_s=9.0):
        self.patience = patience
        super().__init__(sizes, fraction=fraction, round_limit_s=round_limit_s * patience)
'''


OWN_SETTINGS = """
from safa.protocol import FedAvg, Safa

class Heavy(FedAvg):
    name = "heavy"

    def __init__(self, sizes, *, fraction, momentum=0.25, rounds=7, seed, round_limit_s=9.0):
        self.momentum, self.rounds, self.seed = momentum, rounds, seed
        super().__init__(sizes, fraction=fraction, round_limit_s=round_limit_s)

class Counting(Safa):
    name = "counting"
    run_settings = ("rounds",)

    def __init__(self, sizes, *, fraction, rounds, lag_tolerance=5, buffer_size=1, round_limit_s=9.0):
        self.rounds, self.buffer_size = rounds, buffer_size
        super().__init__(sizes, fraction=fraction, lag_tolerance=lag_tolerance, round_limit_s=round_limit_s)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place on the path where packages can be installed, the way that pip lays them out."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install_package(place: Path, entry_point: str) -> None:
    (place / "elsewhere.py").write_text(FOREIGN)
    (place / "own_settings.py").write_text(OWN_SETTINGS)
    metadata = place / "elsewhere-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[safa.protocols]\n{entry_point}\n")


def test_the_package_brings_nine() -> None:
    names = ["safa", "fedavg", "fedcs", "local", "fedasync", "fedbuff", "timelyfl", "fedcompass", "fedsecant"]
    assert list(available())[:9] == names
    assert find("safa") is Safa


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(SafaError, match="'fedsgd'; there are safa, fedavg, fedcs, local, fedasync, fedbuff"):
        find("fedsgd")


def test_another_package_adds_its_own(install: Path) -> None:
    install_package(install, "patient = elsewhere:Patient")
    run = {"fraction": 0.5, "lag_tolerance": 7, "round_limit_s": 2.0}
    protocol = build("patient", [1.0], run, {"patience": 3.0})
    assert protocol.round_limit_s == 6.0
    check_protocol(lambda sizes: build("patient", sizes, {"fraction": 0.5}), scripts=3)
    settings = Settings.of("boston", protocol="patient", protocol_options={"patience": 2.0}, rounds=3)
    assert measure(run_rounds(settings))["sync_ratio"] == 0.4


def built(settings: Settings) -> Any:
    return build(settings.protocol, [1.0], settings.values(), settings.protocol_options)


def test_a_setting_of_its_own_is_not_filled_from_the_run(install: Path) -> None:
    install_package(install, "heavy = own_settings:Heavy")
    run: dict[str, Any] = {"protocol": "heavy", "momentum": 0.9, "rounds": 3, "fraction": 0.5, "round_limit_s": 4.0}
    settings = Settings.of("boston", **run, protocol_options={"seed": 11, "momentum": 0.5})
    protocol = built(settings)
    assert (protocol.momentum, protocol.rounds, protocol.seed) == (0.5, 7, 11)
    assert (protocol.fraction, protocol.round_limit_s) == (0.5, 4.0)
    values = settings.values()
    assert (values["momentum"], values["rounds"], values["seed"]) == (0.9, 3, 0)
    assert (values["protocol.momentum"], values["protocol.seed"]) == (0.5, 11)
    assert len(list(run_rounds(settings))) == 3


def test_a_setting_of_its_own_survives_a_config_file(install: Path, tmp_path: Path) -> None:
    install_package(install, "heavy = own_settings:Heavy")
    own = {"seed": [1, True, "x"], "momentum": 0.5}
    settings = Settings.of("boston", protocol="heavy", protocol_options=own)
    (tmp_path / "config.toml").write_text(settings.to_toml())
    assert Settings(**Settings.read_toml(tmp_path / "config.toml")) == settings
    with pytest.raises(SafaError, match="momentum must be a number, true, false, text or a list of these"):
        Settings.of("boston", protocol="heavy", protocol_options={"momentum": {"a": 1}})


def test_a_setting_of_its_own_without_a_default_must_be_given(install: Path) -> None:
    install_package(install, "heavy = own_settings:Heavy")
    with pytest.raises(SafaError, match="heavy needs its setting 'seed', which has no default; give it with --set"):
        run_rounds(Settings.of("boston", protocol="heavy", rounds=3, seed=4))


def test_what_it_inherits_or_asks_for_is_filled_from_the_run(install: Path) -> None:
    install_package(install, "counting = own_settings:Counting")
    settings = Settings.of("boston", protocol="counting", lag_tolerance=3, rounds=4)
    protocol = built(settings)
    assert (protocol.lag_tolerance, protocol.rounds, protocol.buffer_size) == (3, 4, 1)
    assert built(Settings.of("boston", protocol="counting", protocol_options={"lag_tolerance": 2})).lag_tolerance == 2
    with pytest.raises(
        SafaError, match="buffer_size has no effect with protocol = counting; it is for protocol = fedbuff"
    ):
        Settings.of("boston", protocol="counting", buffer_size=3)
    check_protocol(lambda sizes: build("counting", sizes, {"fraction": 0.5, "rounds": 4}), scripts=3)


def test_a_column_of_a_sweep_keeps_its_own_setting_apart(install: Path, tmp_path: Path) -> None:
    install_package(install, "heavy = own_settings:Heavy")
    options = {"seed": 1, "momentum": 0.5}
    runs = combinations(
        ["boston"], {"protocol": ["heavy"], "rounds": [2], "train": [False], "protocol_options": [options]}
    )
    (row,) = run_sweep(runs, tmp_path / "sweep")
    assert (row["momentum"], row["protocol.momentum"]) == (0.0, 0.5)
    (read,) = read_table(tmp_path / "sweep" / "results.csv")
    assert (read["seed"], read["protocol.seed"]) == (0, 1)


def test_a_name_of_the_package_cannot_be_taken(install: Path) -> None:
    install_package(install, "safa = elsewhere:Patient")
    assert available()["safa"] is Safa


def test_an_entry_point_must_name_a_protocol(install: Path) -> None:
    install_package(install, "wrong = math:pi")
    with pytest.raises(SafaError, match="does not name a Protocol"):
        find("wrong")


def test_an_entry_point_that_cannot_be_loaded_is_one_sentence(install: Path) -> None:
    install_package(install, "patient = nowhere:Patient")
    with pytest.raises(SafaError, match=r"the entry point 'patient' of safa\.protocols cannot be loaded: No module"):
        find("patient")
    assert find("safa") is Safa


def test_what_a_foreign_constructor_raises_is_one_sentence(install: Path) -> None:
    install_package(install, "patient = elsewhere:Patient")
    with pytest.raises(SafaError, match="patient refuses its settings: can't multiply sequence"):
        build("patient", [1.0], {"fraction": 0.5, "round_limit_s": 2.0}, {"patience": "long"})
    with pytest.raises(SafaError, match=r"^fraction must be above 0"):
        build("patient", [1.0], {"fraction": 5.0})
    with pytest.raises(TypeError):  # of this package, it is a mistake that must be seen
        build("safa", [1.0], {"fraction": "half"})
