"""Deployments in virtual time come to the frozen results (`tests/golden`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.deployed import DEPLOYED, deploy
from tests.golden.frozen import check


@pytest.mark.parametrize("name", DEPLOYED)
def test_a_deployment_comes_to_the_frozen_result(name: str, tmp_path: Path) -> None:
    check(name, deploy(name, tmp_path))
