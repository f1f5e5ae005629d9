"""Rows of numbers, one per client or per version, bounded in memory; and the global models, by version."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from safa.protocol.records import Ids

__all__ = ["RowTable", "Versions"]


class RowTable:
    """Rows of one length by number (of a client, a version, ...), made as they are put."""

    def __init__(self, like: Tensor, *, memory_mb: float) -> None:
        """Rows are like this one in length, type and device; beyond `memory_mb` they are held in files."""

    def put(self, numbers: Ids, rows: Tensor) -> None:
        """The rows of these numbers := these."""

    def get(self, numbers: Ids) -> Tensor:
        """A copy of the rows of these numbers, [K, d]; a `KeyError` where there is none."""

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget these rows."""

    @property
    def numbers(self) -> Ids:
        """The numbers that have a row, in rising order."""

    def take_changed(self) -> Ids:
        """The numbers whose rows were put since this was last asked, in rising order; dropped ones are left out."""


class Versions:
    """The global models that somebody may still start from, by version."""

    def __init__(self, start: Tensor, *, memory_mb: float = 4096.0) -> None:
        """`start` is w(0) as a row."""

    latest: int
    table: RowTable

    @property
    def model(self) -> Tensor:
        """The latest global model."""

    def add(self, version: int, model: Tensor) -> None:
        """Keep a new version, which is the latest from now on."""

    def __getitem__(self, version: int) -> Tensor: ...

    def rows(self, versions: Ids) -> Tensor:
        """The models of these versions, one row each."""

    def forget_all_but(self, needed: Iterable[int]) -> None:
        """Drop the versions that nobody needs any more; the latest always stays."""
