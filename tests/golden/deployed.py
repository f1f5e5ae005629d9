"""Deployments whose results are frozen: real devices and a real server, without a network and in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safa
from tests.deploy.harness import Harness

__all__ = ["DEPLOYED", "deploy"]

_SHARED = {"threads": 1, "lr": 0.01, "clients": 5, "rounds": 12, "fraction": 0.4, "lag_tolerance": 2}
_DELAYS_S = {0: 3.0, 1: 4.0, 2: 9.0, 3: 17.0, 4: 40.0}  # the last lags behind by several rounds

DEPLOYED: dict[str, dict[str, Any]] = {
    "deployed-safa": {"protocol": "safa"},
    "deployed-fedavg": {"protocol": "fedavg", "averaging": "population"},
    "deployed-fedcs": {"protocol": "fedcs"},
    "deployed-local": {"protocol": "local"},
    "deployed-fedasync": {"protocol": "fedasync", "staleness": "hinge", "hinge_lag": 1.0},
    "deployed-fedbuff": {"protocol": "fedbuff", "buffer_size": 3, "server_lr": 0.7},
}
"""The settings of a deployment, by the name of the case."""


def deploy(name: str, folder: Path) -> safa.Run:
    """Run a case to its end in a new folder."""
    return Harness(folder, _SHARED | DEPLOYED[name], delays_s=_DELAYS_S).run()
