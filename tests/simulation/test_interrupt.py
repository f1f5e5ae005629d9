"""Ctrl-C is not lost: no code of ours runs where numpy would drop the exception."""

from __future__ import annotations

import enum
import sys
from types import FrameType
from typing import Any

import pytest

from safa import Settings
from safa.experiments.simulate import Experiment
from safa.protocol import available


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("protocol", sorted(available()))
def test_numpy_asks_no_enumeration_for_attributes(protocol: str, train: bool) -> None:
    """It does if an array is compared with a member; Python 3.11 answers by a method, in which Ctrl-C is dropped."""
    asked = set()

    def observe(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == enum.__file__ and frame.f_code.co_name == "__getattr__":
            caller = frame.f_back
            assert caller is not None
            if "/safa/" in caller.f_code.co_filename:
                asked.add(f"{caller.f_code.co_filename}:{caller.f_lineno}")

    settings = Settings.of("boston", protocol=protocol, rounds=6, crash_rate=0.3, train=train, trainer="serial")
    experiment = Experiment(settings)
    sys.setprofile(observe)
    try:
        for _ in experiment.rounds():
            pass
    finally:
        sys.setprofile(None)
    assert not asked
