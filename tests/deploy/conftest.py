"""What tests of deployments share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What a server without a network writes to its log."""
    with caplog.at_level(logging.INFO, "safa.deploy"):
        yield caplog
