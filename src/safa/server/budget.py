"""How the memory that a run may take is shared out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from safa.aggregation.rows import rows_that_fit

__all__ = ["Budget"]

_ROWS_PER_UPDATE = 6  # its start and itself, the same of one that is still being used, and two for all the rest


@dataclass(frozen=True)
class Budget:
    """Shares of `memory_mb`: two thirds for updates, an eighth for entries, a 16th for versions, the rest to train.

    Where clients are few, updates, entries and versions take less, and what they leave is for training, too.
    """

    entries_mb: float
    versions_mb: float
    """Of which versions take a quarter."""
    updates: int
    """How many updates are asked for at a time."""
    training_mb: float

    @classmethod
    def of(cls, memory_mb: float, row: Tensor, clients: int) -> Budget:
        """The shares where models are like this row, and clients have an entry, a version and two updates each."""
        updates = rows_that_fit(row, memory_mb, times=_ROWS_PER_UPDATE)
        all_mb = clients * row.numel() * row.element_size() / 2**20
        others_mb = min(memory_mb / 8, all_mb) + min(memory_mb / 16, all_mb) + min(memory_mb * 2 / 3, 4 * all_mb)
        return cls(memory_mb / 8, memory_mb / 4, updates, memory_mb - others_mb)
