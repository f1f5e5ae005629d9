"""A problem whose worker is killed where a file says so, once."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from safa import Problem

PLACE = "SAFA_TESTS_DYING"
"""The variable that names the file. In the file is the number of the one process that is spared."""


def die_once() -> None:
    """Kill this process, as a machine kills one that it has no memory for, and remove the file."""
    path = Path(os.environ.get(PLACE, os.devnull))
    with suppress(FileNotFoundError):
        if (path.read_text() or str(os.getpid())) != str(os.getpid()):
            path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def loss(output: Tensor, target: Tensor) -> Tensor:
    die_once()
    return nn.functional.mse_loss(output.squeeze(-1), target)


def problem() -> Problem:
    x = torch.linspace(-1, 1, 240).view(60, 4)
    y = x.sum(dim=1).sin()
    return Problem(
        model=lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)),
        loss=loss,
        metrics={"closeness": lambda output, target: -loss(output, target)},
        train=(x, y),
        test=(x[::6], y[::6]),
    )
