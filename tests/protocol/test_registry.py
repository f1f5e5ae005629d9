"""Protocols by name, and those of other packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from safa import Settings, measure, run_rounds
from safa.errors import SafaError
from safa.protocol import Safa, available, build, find
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


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place on the path where packages can be installed, the way that pip lays them out."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install_package(place: Path, entry_point: str) -> None:
    (place / "elsewhere.py").write_text(FOREIGN)
    metadata = place / "elsewhere-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[safa.protocols]\n{entry_point}\n")


def test_the_package_brings_six() -> None:
    assert list(available())[:6] == ["safa", "fedavg", "fedcs", "local", "fedasync", "fedbuff"]
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


def test_a_name_of_the_package_cannot_be_taken(install: Path) -> None:
    install_package(install, "safa = elsewhere:Patient")
    assert available()["safa"] is Safa


def test_an_entry_point_must_name_a_protocol(install: Path) -> None:
    install_package(install, "wrong = math:pi")
    with pytest.raises(SafaError, match="does not name a Protocol"):
        find("wrong")
