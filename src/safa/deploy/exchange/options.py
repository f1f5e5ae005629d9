"""What an operator decides about a deployment, beside the settings that it shares with a simulation.

They stand in `deploy.toml` of the run's folder. A config file that is given to `safa deploy` holds them in a table
`[deploy]`; everything else in it is read as for `safa run`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from safa.deploy.exchange.codec import CODECS
from safa.deploy.exchange.screening import Screen
from safa.errors import SafaError
from safa.runs.fields import as_toml, checked, option
from safa.runs.settings import Settings

__all__ = ["FILE", "Options"]

FILE = "deploy.toml"
"""Where they stand in the folder of a run."""

_FLEET, _CODEC, _SCREEN = "the devices", "the codec", "screening"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The operator's part of a deployment."""

    start_with: int = option(1, "how many clients must have enrolled before the first round", group=_FLEET, least=1)
    leave_after_s: float = option(
        3600.0, "a client that is offline for so many seconds has left, until it comes back (inf: never)", group=_FLEET,
        flag="--leave-after", above=0,
    )  # fmt: skip
    max_size: float = option(1e6, "the largest n_k that a client may declare", group=_FLEET, above=0)
    size_multiple: float = option(
        5.0, "a client's n_k counts up to so many times the median of all clients' (inf: as it declares)", group=_FLEET,
        above=0,
    )  # fmt: skip
    max_clients: int = option(10_000, "how many clients may enrol", group=_FLEET, least=1)
    ttl_s: float = option(
        86_400.0, "how long a client may work on one attempt, in seconds; then it is lost", group=_FLEET, flag="--ttl",
        above=0,
    )  # fmt: skip
    poll_s: float = option(0.5, "how often the server looks for replies, in seconds", group=_FLEET, flag="--poll",
        above=0,
    )  # fmt: skip
    codec: str = option("float32", "how models are sent: float32, float16 or int8", group=_CODEC, choices=CODECS)
    max_mb: float = option(
        0.0,
        "the largest update that is accepted, in MB (0: twice the model, and 1 MB)",
        group=_SCREEN,
        least=0,
        most=1e9,
    )
    norm_bound: float = option(math.inf, "the largest norm of an update's delta", group=_SCREEN, above=0)
    norm_multiple: float = option(
        10.0, "the same in multiples of the running median of the clients' norms", group=_SCREEN, above=0
    )
    warm_up: int = option(
        3, "how many clients the median needs; before that, an update trained by the server is used",
        group=_SCREEN, least=1,
    )  # fmt: skip
    rejections_allowed: int = option(
        3, "N: a client is blocked with its N-th rejection in a row", group=_SCREEN, least=1
    )  # fmt: skip

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, checked(item.name, getattr(self, item.name), item))
        for name in ("ttl_s", "poll_s", "max_size"):
            if not math.isfinite(getattr(self, name)):
                raise SafaError(f"{name} must be finite")

    def screen(self, model_bytes: int) -> Screen:
        """What is allowed of an update of a model of so many bytes."""
        most = int(self.max_mb * 1e6) or 2 * model_bytes + 1_000_000
        return Screen(
            max_bytes=most,
            norm_bound=self.norm_bound,
            norm_multiple=self.norm_multiple,
            window=max(255, self.warm_up),
            warm_up=self.warm_up,
            rejections_allowed=self.rejections_allowed,
        )

    def to_toml(self) -> str:
        """All options as a file that `read` reads."""
        return "".join(f"{item.name} = {as_toml(getattr(self, item.name))}\n" for item in fields(self))

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Options from values by name; one that does not exist is an error."""
        unknown = values.keys() - {item.name for item in fields(cls)}
        if unknown:
            raise SafaError(f"there is no option {sorted(unknown)[0]!r} of a deployment")
        return cls(**values)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Options from a file."""
        return cls.of(Settings.read_toml(path))
