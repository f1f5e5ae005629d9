"""The settings of the paper's experiments, as far as they differ from the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PRESETS"]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": {
        "clock": "paper",
        "fault_model": "round",
        # The tables called a client deprecated when (t-1) - v > 5, which is Eq. 3 with tau = 6.
        "lag_tolerance": 6,
        "averaging": "population",
        "keep_best": True,
        "warm_start": True,
    },
}
"""Preset name -> settings. Table II itself comes with the task."""
