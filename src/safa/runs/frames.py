"""The records of a run as data frames of pandas, which is loaded when one is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from safa.analysis.client_map import lag
from safa.errors import SafaError
from safa.protocol.records import Refusal, RoundRecord, Verdict

__all__ = ["frame", "round_row", "rounds_frame", "updates_frame"]

_COUNTED = ("picked", "undrafted", "refused", "crashed", "deprecated", "sent", "joined", "left")
_SCALARS = tuple(item.name for item in fields(RoundRecord) if str(item.type) in ("int", "float", "Rule", "EndedBy"))


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows of values by name as a data frame."""
    return _pandas().DataFrame(rows)


def rounds_frame(records: Iterable[RoundRecord]) -> Any:
    """A row a round: its numbers, how many clients were picked and so on, its loss, and a column for each metric."""
    return frame([round_row(record) for record in records])


def round_row(record: RoundRecord) -> dict[str, Any]:
    """The row of a round, by column."""
    numbers = {name: getattr(record, name) for name in _SCALARS}
    numbers |= {"rule": str(record.rule), "ended_by": str(record.ended_by), "length_s": record.length_s}
    counts = {name: len(getattr(record, name)) for name in _COUNTED}
    return numbers | counts | {"loss": math.nan if record.loss is None else record.loss, **record.metrics}


def updates_frame(records: Iterable[RoundRecord]) -> Any:
    """A row an update that came in, in order of arrival, with what became of it."""
    pandas = _pandas()
    parts = [pandas.DataFrame(_updates(record)) for record in records]
    return pandas.concat(parts, ignore_index=True) if parts else pandas.DataFrame()


def _updates(record: RoundRecord) -> dict[str, Any]:
    verdicts, refusals = _names(Verdict), _names(Refusal)
    return {
        "round": np.full(len(record.client), record.round),
        "client": record.client,
        "base": record.base,
        "verdict": verdicts[record.verdict],
        "refusal": refusals[record.refusal],
        "arrival_s": record.arrival_s,
        "weight": record.weight,
        "into": record.into,
        "work": record.work,
        "lag": lag(record),
    }


def _names(kind: type[Verdict] | type[Refusal]) -> Any:
    """The names of the members by number, in small letters."""
    return np.array([member.name.lower() for member in kind], dtype=object)


def _pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError:
        raise SafaError("a data frame needs pandas, which is not installed: pip install 'safa[pandas]'") from None
    return pandas
