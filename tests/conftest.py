"""Tests are the same every time, whatever they were started by, and leave no process behind."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from safa.tasks.files import FILES
from tests.programs import MARK, left_behind, unavailable

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is started first, and what is kept together where tests run side by side (`pytest -n 3 --dist loadgroup`).

    Of deployments with real processes, which mostly wait, two run at a time; modules that are expensive to set up run
    in one process each.
    """
    deployments = itertools.cycle(("deployment-1", "deployment-2"))
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        if is_slow and "/tests/deploy/" in item.path.as_posix():
            item.add_marker(pytest.mark.xdist_group(next(deployments)))
        elif item.path.name in ("test_browser.py", "test_golden.py", "test_reproduction.py"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def _no_process_outlives_the_tests() -> Iterator[None]:
    value = os.environ[MARK] = str(os.getpid())
    yield
    left = left_behind(value)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"tests left processes behind, which were killed: {left}"


@pytest.fixture(scope="session", autouse=True)
def _cache_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests keep for later is not the user's; tests that run side by side share it."""
    folder = tmp_path_factory.getbasetemp()
    os.environ["SAFA_CACHE"] = str((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "safa-cache")


@pytest.fixture
def real_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real data files, where somebody has put them."""
    folder = Path(os.environ.get("SAFA_DATA") or Path(__file__).parent.parent.parent / "shared" / "data")
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing:
        unavailable(f"set SAFA_DATA to a folder that holds {', '.join(missing)} to run this test")
    monkeypatch.setenv("SAFA_DATA", str(folder))
