"""Tests are the same every time, whatever they were started by, and leave no process behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings

from tests.programs import MARK, left_behind

settings.register_profile(
    "house", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")


def pytest_configure() -> None:
    """Programs are started with the default signals, also where these tests run as a background job of a script.

    Such a job ignores SIGINT, and what it starts would do so, too; a signal that is handled is not inherited.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _no_process_outlives_the_tests() -> Iterator[None]:
    value = os.environ[MARK] = str(os.getpid())
    yield
    left = left_behind(value)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"tests left processes behind, which were killed: {left}"
