"""Runs in which one client in ten is hostile: it sends the negative of its delta, tenfold."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from safa import Settings
from safa.experiments.simulate import Experiment
from safa.protocol.records import Ids

__all__ = ["with_hostile"]


class Hostile:
    """Some clients send the negative of their delta, tenfold."""

    def __init__(self, inner: Any, hostile: Ids) -> None:
        self._inner, self._hostile = inner, hostile
        self.train = inner.train

    def updates(self, clients: Ids, bases: Ids, start: Tensor, **given: Any) -> Tensor:
        rows: Tensor = self._inner.updates(clients, bases, start, **given)
        bad = np.flatnonzero(np.isin(clients, self._hostile)).tolist()
        rows[bad] = start[bad] - 10 * (rows[bad] - start[bad])
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def with_hostile(settings: Settings) -> Experiment:
    """One client in ten is hostile."""
    experiment = Experiment(settings)
    learner: Any = experiment.server.learner
    learner._source = Hostile(learner._source, np.arange(0, settings.clients, 10))
    return experiment
