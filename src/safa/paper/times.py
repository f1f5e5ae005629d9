"""Times as the paper's tables have them: T_dist was computed from all copies that were sent since round 1."""

from __future__ import annotations

from collections.abc import Iterable

from safa.protocol.records import RoundRecord

__all__ = ["PRINTED_TIMES", "PrintedTimes", "printed_name", "printed_times"]

PRINTED_TIMES: dict[str, str] = {
    "round_length_s_as_printed": "mean length of a round with T_dist as printed",
    "t_dist_s_as_printed": "mean T_dist as the paper has it: of all copies since round 1",
}
"""What is measured in addition to the metrics of a run, by name, with what each one says."""


def printed_name(metric: str) -> str:
    """Under which name a result has a metric as the tables print it."""
    name = f"{metric}_as_printed"
    return name if name in PRINTED_TIMES else metric


class PrintedTimes:
    """Computes the two times from the records of a run, one after the other."""

    def __init__(self) -> None:
        self._rounds = 0
        self._length_s = self._dist_s = self._dist_since_s = 0.0

    def add(self, record: RoundRecord) -> None:
        """Add the next round."""
        self._rounds += 1
        self._length_s += record.length_s
        self._dist_s += record.distribution_s
        self._dist_since_s += self._dist_s

    def values(self) -> dict[str, float]:
        """The times so far, under the names in `PRINTED_TIMES`."""
        rounds = max(1, self._rounds)
        length_s, dist_s, printed_s = self._length_s / rounds, self._dist_s / rounds, self._dist_since_s / rounds
        return dict(zip(PRINTED_TIMES, (length_s - dist_s + printed_s, printed_s), strict=True))


def printed_times(records: Iterable[RoundRecord]) -> dict[str, float]:
    """The times of a whole run."""
    times = PrintedTimes()
    for record in records:
        times.add(record)
    return times.values()
