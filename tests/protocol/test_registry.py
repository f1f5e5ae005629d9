"""Protocols by name, and those of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from safa.errors import SafaError
from safa.protocol import FedAvg, Safa, available, build, find, registry


class Patient(FedAvg):
    """A protocol from somewhere else, with a setting of its own."""

    name = "patient"

    def __init__(self, sizes: list[float], *, fraction: float, patience: float = 1.0) -> None:
        self.patience = patience
        super().__init__(sizes, fraction=fraction)


def register(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Pretend that a package with this entry point is installed."""
    point = EntryPoint(name=name, value=value, group="safa.protocols")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "safa.protocols" else [])


def test_the_package_brings_six() -> None:
    assert list(available())[:6] == ["safa", "fedavg", "fedcs", "local", "fedasync", "fedbuff"]
    assert find("safa") is Safa


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(SafaError, match="'fedsgd'; there are safa, fedavg, fedcs, local, fedasync, fedbuff"):
        find("fedsgd")


def test_another_package_adds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "patient", f"{__name__}:Patient")
    protocol = build("patient", [1.0], {"fraction": 0.5, "patience": 3.0, "lag_tolerance": 7})
    assert isinstance(protocol, Patient)
    assert protocol.patience == 3.0


def test_a_name_of_the_package_cannot_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "safa", f"{__name__}:Patient")
    assert available()["safa"] is Safa


def test_an_entry_point_must_name_a_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "wrong", "math:pi")
    with pytest.raises(SafaError, match="does not name a Protocol"):
        find("wrong")
