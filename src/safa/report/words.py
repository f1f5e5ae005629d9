"""How numbers, settings and metrics are written for a reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from safa.analysis import Target

__all__ = [
    "TIMES", "TITLES", "capital", "counted", "duration", "goal", "label", "number", "percent", "protocol_name",
    "some_of", "time_unit", "value_of",
]  # fmt: skip

_NAMES = {"safa": "SAFA", "fedavg": "FedAvg", "fedcs": "FedCS", "local": "Fully local training", "fedasync": "FedAsync",
          "fedbuff": "FedBuff", "timelyfl": "TimelyFL", "fedcompass": "FedCompass",
          "fedsecant": "FedSecant"}  # fmt: skip

TIMES = "\N{MULTIPLICATION SIGN}"

TITLES: dict[str, str] = {
    "round_length_s": "round length, s",
    "t_dist_s": "T_dist, s",
    "virtual_time_s": "virtual time, s",
    "sync_ratio": "SR",
    "effective_update_ratio": "EUR",
    "version_variance": "VV",
    "futility": "futility",
    "starved": "starved",
    "fairness": "fairness",
    "time_to_target_s": "time to target, s",
    "fraction": "C",
    "lag_tolerance": "tau",
    "crash_rate": "crash rate",
    "round_limit_s": "T_lim, s",
    "detection_delay_s": "detection delay, s",
    "return_delay_s": "return delay, s",
}
"""Short titles for axes and columns; a name that is not here is its own title, with spaces."""


_LABELS: dict[str, str] = {
    "round_length_s": "Length of a round",
    "t_dist_s": "Time to send the model out",
    "sync_ratio": "Copies sent per client and round",
    "effective_update_ratio": "Clients picked per round",
    "version_variance": "Spread of the versions trained from",
    "futility": "Work thrown away",
    "starved": "Clients left out",
    "fairness": "Evenness between clients",
    "refused": "Updates refused",
    "bytes_down": "Sent to clients",
    "bytes_up": "Sent by clients",
    "virtual_time_s": "Time of all rounds",
    "diverged": "Updates that were not finite",
    "time_to_target_s": "Time to the target",
    "rounds_to_target": "Rounds to the target",
    "bytes_to_target": "Data sent until the target",
}
"""The names of metrics for people."""


def label(column: str) -> str:
    """The name of a metric for people, from that of its column."""
    return _LABELS.get(column, capital(column.replace("_", " ")))


def protocol_name(protocol: str) -> str:
    """A protocol as it is written in a sentence."""
    return _NAMES.get(protocol, protocol)


def capital(text: str) -> str:
    """The text with its first letter large."""
    return text[:1].upper() + text[1:]


def number(value: Any) -> str:
    """A value in a table: numbers short, nothing for what is not there."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if math.isinf(value):
        return "unlimited" if value > 0 else "-inf"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def value_of(name: str, value: Any) -> str:
    """The value of a metric or setting with its unit."""
    text = number(value)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return text or "none"
    if name.startswith("bytes_"):
        size, unit = next(pair for pair in _BYTES if value >= pair[0])
        return f"{value / (size or 1):.4g} {unit}"
    if not name.endswith("_s"):
        return text
    return f"{text} s ({value / 3600:.3g} h)" if value >= 7200 else f"{text} s"


def percent(share: float) -> str:
    """A share of a whole."""
    return f"{100 * share:.0f}%" if share >= 0.095 or share == 0 else f"{100 * share:.1f}%"


def counted(count: int, what: str) -> str:
    """A number of things: "1 round", "2 rounds"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def goal(target: Target) -> str:
    """A target in words."""
    held = f", held for {target.held} evaluations" if target.held > 1 else ""
    return f"{target.metric} {target.value:g}{held}"


def some_of(names: Sequence[str], most: int = 4) -> str:
    """A list of names in words, of which the first few are named."""
    shown, more = list(names[:most]), len(names) - most
    if more > 0:
        return f"{', '.join(shown)} and {more:,} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (0.0, "bytes"))
_TIMES = ((3600.0, "hours"), (60.0, "minutes"), (0.0, "seconds"))


def duration(seconds: float) -> str:
    """A length of time in the unit that suits it, to three digits."""
    size, unit = next((pair for pair in _LENGTHS if abs(seconds) >= 2 * pair[0]), (1.0, "s"))
    return f"{number(seconds / size)} {unit}"


_LENGTHS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))


def time_unit(longest_s: float) -> tuple[float, str]:
    """The unit of an axis of time that reaches that far: its length in seconds and its name."""
    size, name = next(pair for pair in _TIMES if longest_s >= 2 * pair[0])
    return size or 1.0, name
