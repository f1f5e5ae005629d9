"""Which clients' updates went into the global model of which round, from records alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.protocol.records import Ids, RoundRecord, Verdict

__all__ = ["Contributions", "contributions"]


@dataclass(frozen=True, eq=False)
class Contributions:
    """Two tables with a row a round and a column for each client that was asked about."""

    direct: NDArray[np.bool_]
    """It was picked in this round (the event behind P_D)."""
    bypass: NDArray[np.bool_]
    """An undrafted update of it counts for the first time in this round (the event behind P_S)."""


def contributions(records: Iterable[RoundRecord], clients: ArrayLike) -> Contributions:
    """Whether these clients contributed in each round of a run of a protocol that makes one version a round.

    An undrafted update first counts in the next round (Eq. 8), and never if by then its client is picked or has to
    start over (Eq. 6). That a cache entry continues to count in later rounds is no further contribution.
    """
    asked = np.atleast_1d(np.asarray(clients, dtype=np.int64))
    kept = np.zeros(len(asked), dtype=np.bool_)
    direct: list[NDArray[np.bool_]] = []
    bypass: list[NDArray[np.bool_]] = []
    for record in records:
        if np.any(record.into[record.verdict == Verdict.PICKED.value] != record.version):
            raise SafaError("contributions are counted for protocols that make one version a round, such as safa, only")
        picked = _among(asked, record.picked)
        direct.append(picked)
        bypass.append(kept & ~picked & ~_among(asked, record.deprecated))
        kept = _among(asked, record.undrafted)
    shape = len(direct), len(asked)
    return Contributions(np.reshape(direct, shape).astype(np.bool_), np.reshape(bypass, shape).astype(np.bool_))


def _among(asked: Ids, clients: Ids) -> NDArray[np.bool_]:
    return np.asarray((asked[:, None] == clients).any(axis=1))
