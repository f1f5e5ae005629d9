"""Targets: when a metric of the global model has reached a value, and held it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from safa.errors import SafaError, did_you_mean
from safa.protocol.records import RoundRecord

__all__ = ["TARGET_METRICS", "Reached", "Target", "higher_is_better", "reached", "target_words", "time_to_target"]

TARGET_METRICS: dict[str, str] = {
    "time_to_target_s": "when the target was reached, and then held",
    "rounds_to_target": "the round in which the target was reached",
    "bytes_to_target": "bytes sent and received until the target was reached",
}
"""What a target adds to the metrics of a run, with what each one says; None for one that was not reached."""

_WRITTEN = re.compile(r"([A-Za-z]\w*)=([^,]+)(?:,held=(\d+))?")


@dataclass(frozen=True)
class Target:
    """A value of a metric, or of the loss, that is to be held for so many evaluations in a row."""

    metric: str
    value: float
    held: int = 1
    higher: bool = True
    """Whether more of the metric is better."""

    @classmethod
    def parse(cls, text: str, directions: Mapping[str, str]) -> Target:
        """The target in `METRIC=VALUE[,held=ROUNDS]`; `directions` are the metrics that there are."""
        found = _WRITTEN.fullmatch(text.replace(" ", ""))
        value = _number(found[2]) if found else math.nan
        held = int(found[3] or 1) if found else 0
        if not found or not math.isfinite(value) or held < 1:
            raise SafaError(f"a target must be METRIC=VALUE or METRIC=VALUE,held=ROUNDS, not {text!r}")
        if found[1] != "loss" and found[1] not in directions:
            known = ["loss", *directions]
            close = did_you_mean(found[1], known)
            raise SafaError(f"there is no metric {found[1]!r} to reach{close}; there is {', '.join(known)}")
        return cls(found[1], value, held, higher_is_better(found[1], directions))

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}" + (f",held={self.held}" if self.held > 1 else "")

    def is_met_by(self, scores: Mapping[str, float]) -> bool:
        """Whether loss and metrics, by name, are at the target."""
        value = scores.get(self.metric)
        return value is not None and (value >= self.value if self.higher else value <= self.value)


def higher_is_better(metric: str, directions: Mapping[str, str]) -> bool:
    """Whether more of a metric is better; less of the loss is."""
    return metric != "loss" and directions.get(metric, "higher") == "higher"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


class Reached:
    """Follows a run, record by record, to the target: when it was reached, if it was then held."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.held = False
        """Whether the target has been reached and held."""
        self._row = 0
        self._bytes = 0.0
        self._since: tuple[float, int, float] | None = None

    def add(self, record: RoundRecord) -> None:
        """Take in the next round."""
        self._bytes += record.bytes_down + record.bytes_up
        if record.loss is not None:
            self.evaluated({"loss": record.loss, **record.metrics}, record.closed_s, record.round)

    def evaluated(self, scores: Mapping[str, float], at_s: float, number: int = 0) -> None:
        """Take in loss and metrics, by name, of the next model that was evaluated."""
        if self.held:
            return
        if not self.target.is_met_by(scores):
            self._row, self._since = 0, None
            return
        self._row += 1
        self._since = self._since or (at_s, number, self._bytes)
        self.held = self._row >= self.target.held

    def values(self) -> dict[str, Any]:
        """Under the names in `TARGET_METRICS`."""
        found = self._since if self.held and self._since else (None, None, None)
        return dict(zip(TARGET_METRICS, found, strict=True))


def target_words(target: Target | None, values: Mapping[str, Any]) -> str:
    """Whether and when a run reached its target, from its metrics, in a sentence; nothing where it has none."""
    if target is None:
        return ""
    number, at_s = values["rounds_to_target"], values["time_to_target_s"]
    if number is None:
        return f"The target {target} was not reached."
    return f"The target {target} was reached in round {number}, after {at_s:,.0f} s."


def time_to_target(evaluations: Iterable[tuple[float, Mapping[str, float]]], target: Target) -> float | None:
    """When a target was reached, and then held, by models whose times and scores these are; None if never."""
    follower = Reached(target)
    for at_s, scores in evaluations:
        follower.evaluated(scores, at_s)
    found: float | None = follower.values()["time_to_target_s"]
    return found


def reached(records: Iterable[RoundRecord], target: Target) -> dict[str, Any]:
    """When a run reached a target that it then held, under the names in `TARGET_METRICS`."""
    follower = Reached(target)
    for record in records:
        follower.add(record)
    return follower.values()
