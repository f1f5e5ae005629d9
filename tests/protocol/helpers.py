"""Small helpers to drive a protocol by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safa.protocol import (
    Dispatch,
    Events,
    FedAsync,
    FedAvg,
    FedBuff,
    FedCompass,
    FedCS,
    FedSecant,
    Local,
    Protocol,
    Safa,
    TimelyFL,
    build,
)
from safa.protocol.records import Ids


class Sparing(Protocol):
    """Asks the faster clients for all their work, and in even rounds those that take long for less."""

    def _fresh_client(self) -> dict[str, Any]:
        return super()._fresh_client() | {"_share": 1.0}

    def __init__(self, sizes: NDArray[np.float64], **settings: Any) -> None:
        self._share = np.empty(0)
        super().__init__(sizes, **settings)

    def _invite(self, draws: NDArray[np.float64], expected_s: NDArray[np.float64]) -> Dispatch:
        least = expected_s.min(initial=np.inf)
        self._share[:] = np.minimum(1.0, 2 * least / expected_s) if self.round % 2 == 0 else 1.0
        return super()._invite(draws, expected_s)  # type: ignore[safe-super]

    def _work(self, clients: Ids) -> NDArray[np.float64]:
        return self._share[clients]


class SparingSafa(Sparing, Safa):
    """SAFA that asks for parts."""


class SparingFedAvg(Sparing, FedAvg):
    """FedAvg that asks for parts."""


class SparingFedAsync(Sparing, FedAsync):
    """FedAsync that asks for parts."""


class SparingLocal(Sparing, Local):
    """Local training of parts."""


PROTOCOLS: dict[str, Callable[[NDArray[np.float64]], Protocol]] = {
    "safa": lambda sizes: Safa(sizes, fraction=0.5, lag_tolerance=2, round_limit_s=9),
    "safa without a deadline": lambda sizes: Safa(sizes, fraction=0.3),
    "fedavg": lambda sizes: FedAvg(sizes, fraction=0.5, round_limit_s=9),
    "fedavg over the population": lambda sizes: FedAvg(sizes, fraction=1.0, averaging="population"),
    "fedcs": lambda sizes: FedCS(sizes, fraction=0.7, round_limit_s=15),
    "local": lambda sizes: Local(sizes, fraction=0.5, rounds=3, round_limit_s=9),
    "fedasync": lambda sizes: FedAsync(sizes, fraction=0.5, round_limit_s=20),
    "fedbuff": lambda sizes: FedBuff(sizes, fraction=0.5, buffer_size=3, round_limit_s=20),
    "timelyfl": lambda sizes: TimelyFL(sizes, fraction=0.7, late_factor=1.5, round_limit_s=20),
    "fedcompass": lambda sizes: FedCompass(sizes, fraction=0.5, round_limit_s=20),
    "fedcompass without a deadline": lambda sizes: FedCompass(sizes, fraction=0.8, step_ratio=0.5, late_factor=1.0),
    "fedsecant": lambda sizes: FedSecant(sizes, round_limit_s=20),
    "safa with a work cap": lambda sizes: build("safa", sizes, {"fraction": 0.5, "lag_tolerance": 2, "work_cap": 1}),
    "fedbuff with a work cap": lambda sizes: build(
        "fedbuff", sizes, {"fraction": 0.5, "buffer_size": 3, "work_cap": 0.5, "normalise_work": True}
    ),
    "safa in parts": lambda sizes: SparingSafa(sizes, fraction=0.5, lag_tolerance=2, round_limit_s=9),
    "fedavg in parts": lambda sizes: SparingFedAvg(sizes, fraction=0.5, round_limit_s=9),
    "fedasync in parts": lambda sizes: SparingFedAsync(sizes, fraction=0.5, round_limit_s=20),
    "local in parts": lambda sizes: SparingLocal(sizes, fraction=0.5, rounds=3, round_limit_s=9),
}
"""Every protocol of the package, and some that ask for parts of the work, with settings that make much happen
in few rounds."""


def open_round(protocol: Protocol, now: float, *, draws: list[float] | None = None) -> Dispatch:
    """Open a round without caring for draws and estimates."""
    return protocol.open_round(
        now=now,
        draws=np.linspace(0, 1, protocol.clients) if draws is None else draws,
        expected_s=np.ones(protocol.clients),
    )


def arrive(protocol: Protocol, clients: list[int], at_s: float, *, late: bool = False) -> list[int]:
    """Let clients commit from the version that they hold; the refusals come back."""
    events = Events.arrivals(clients, protocol.versions[clients], at_s=at_s)
    return [int(code) for code in protocol.receive(events, late=late).refusal]


def lose(protocol: Protocol, clients: list[int], at_s: float) -> list[int]:
    """Let clients be found lost; the refusals come back."""
    return [int(code) for code in protocol.receive(Events.losses(clients, at_s=at_s)).refusal]
