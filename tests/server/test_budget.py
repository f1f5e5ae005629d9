"""What a run holds and what it works on keep to `memory_mb` together."""

from __future__ import annotations

import pytest
import torch

from safa.server.budget import Budget

ROW = torch.zeros(2**18)  # 1 MB


@pytest.mark.parametrize("clients", [0, 1, 10, 100, 1000, 10**6])
def test_the_shares_fit_together(clients: int) -> None:
    budget = Budget.of(600.0, ROW, clients)
    held = min(budget.entries_mb, clients) + min(budget.versions_mb / 4, clients)
    at_work = 4 * min(budget.updates, clients)
    assert held + at_work + budget.training_mb == pytest.approx(600.0)
    assert budget.training_mb >= 600 / 8


def test_few_clients_leave_nearly_everything_for_training() -> None:
    assert Budget.of(4096.0, ROW, 100).training_mb == 4096 - 600


def test_one_update_at_a_time_is_the_least() -> None:
    assert Budget.of(0.001, ROW, 5).updates == 1
