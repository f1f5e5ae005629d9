"""The settings of a run, in one flat, frozen, checked object.

Symbols of the paper stand next to the names that replace them here: `fraction` C, `crash_rate` cr, `lag_tolerance` tau,
`rounds` r, `clients` m, `epochs` E, `batch_size` B, `lr` the learning rate, `round_limit_s` T_lim.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from safa.errors import SafaError
from safa.fleet import FAULT_MODELS, SIZE_DISTRIBUTIONS, SPEED_DISTRIBUTIONS
from safa.paper import PRESETS
from safa.protocol import registry
from safa.protocol.continuous import STALENESSES
from safa.protocol.fedavg import AVERAGINGS
from safa.tasks import Task, check_partition, find_task
from safa.vocabulary import OPTIMISERS, TRAINERS

__all__ = ["CLOCKS", "Settings", "as_toml", "checked", "option"]

CLOCKS = ("causal", "paper")


def option(
    default: Any,
    help_text: str,
    *,
    group: str,
    flag: str | None = None,
    choices: tuple[str, ...] | None = None,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    is_file: bool = False,
) -> Any:
    """A setting with its default, its help text, and what is allowed."""
    metadata = {
        "help": help_text,
        "group": group,
        "flag": flag,
        "choices": choices,
        "above": above,
        "least": least,
        "most": most,
        "is_file": is_file,
    }
    if default is None and not is_file:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


_RUN, _WORK, _WORLD, _RIVALS = "the run", "the federation", "the world", "rivals of SAFA"
_LEARN = "learning"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a run. Build it with `Settings.of(task, ...)`, which fills in the task's defaults."""

    task: str
    protocol: str = option("safa", "the protocol; `safa protocols` lists them", group=_RUN)
    clock: str = option(
        "causal", "causal: an update counts when it arrives; paper: the idealised rounds of its tables", group=_RUN,
        choices=CLOCKS,
    )  # fmt: skip
    seed: int = option(0, "the seed of the world; same seed, same world for every protocol", group=_RUN, least=0)

    fraction: float = option(0.3, "C: the share of clients whose updates a round wants", group=_WORK, above=0, most=1)
    lag_tolerance: int = option(
        5, "tau: how many versions a client may lag behind before it starts over (safa)", group=_WORK, least=1
    )
    rounds: int = option(None, "r: how many rounds", group=_WORK, least=1)
    clients: int = option(None, "m: how many clients", group=_WORK, least=1)
    epochs: int = option(None, "E: passes over its data that a client makes for one update", group=_WORK, least=1)
    batch_size: int = option(None, "B: samples in a mini-batch", group=_WORK, least=1)
    lr: float = option(None, "the learning rate", group=_WORK, above=0)
    round_limit_s: float = option(
        None, "T_lim: when a round is closed at the latest, in seconds (inf: never)", group=_WORK, flag="--round-limit",
        above=0,
    )  # fmt: skip
    averaging: str = option(
        "participants", "what FedAvg and FedCS average over: the participants (McMahan) or the population (the paper)",
        group=_WORK, choices=AVERAGINGS,
    )  # fmt: skip

    crash_rate: float = option(0.3, "cr: how likely a stretch of work is cut short", group=_WORLD, least=0, most=1)
    fault_model: str = option(
        "attempt", "whether a client is struck once per attempt or once per round (causal clock)", group=_WORLD,
        choices=FAULT_MODELS,
    )  # fmt: skip
    keep_progress: bool = option(True, "whether a client that crashed goes on where it was", group=_WORLD)
    detection_delay_s: float = option(
        60.0, "how long the server needs to notice a loss, in seconds (0: at once, inf: never)", group=_WORLD,
        flag="--detection-delay", least=0,
    )  # fmt: skip
    mean_size: float = option(None, "mean number of samples that a client holds", group=_WORLD, least=1)
    size_distribution: str = option(
        "normal", "how the clients' numbers of samples differ", group=_WORLD, choices=SIZE_DISTRIBUTIONS
    )
    size_spread: float = option(0.3, "standard deviation of a normal size over its mean", group=_WORLD, least=0)
    speed_distribution: str = option(
        "exponential", "how the clients' speeds differ", group=_WORLD, choices=SPEED_DISTRIBUTIONS
    )
    speed_mean: float = option(1.0, "mean speed in mini-batches per second", group=_WORLD, above=0)
    speed_spread: float = option(
        0.5, "standard deviation over the mean (normal), or sigma of the logarithm (lognormal)", group=_WORLD, least=0
    )
    speed_floor: float = option(None, "a speed below this is drawn again", group=_WORLD, above=0)
    down_mbps: float = option(1.4, "a client's download bandwidth in Mbit/s", group=_WORLD, above=0)
    up_mbps: float = option(1.4, "a client's upload bandwidth in Mbit/s", group=_WORLD, above=0)
    server_mbps: float = option(10_000.0, "the server's bandwidth in Mbit/s", group=_WORLD, above=0)
    model_size_mb: float = option(10.0, "the size of the model on the wire in MB", group=_WORLD, least=0)
    speeds: str | None = option(
        None, "speeds from a file, one line per client, instead of a distribution", group=_WORLD, is_file=True
    )
    sizes: str | None = option(
        None, "sizes from a file, one line per client, instead of a distribution", group=_WORLD, is_file=True
    )
    links: str | None = option(
        None,
        "bandwidths from a CSV file with columns down_mbps,up_mbps, a line per client",
        group=_WORLD,
        is_file=True,
    )
    trace: str | None = option(
        None, "when clients are online, from a CSV file with columns client,online_from_s,online_until_s", group=_WORLD,
        is_file=True,
    )  # fmt: skip

    estimate_error: float = option(
        0.0, "how far FedCS is off when it guesses a client's time (sigma of the logarithm)", group=_RIVALS, least=0
    )
    mixing: float = option(0.6, "alpha of FedAsync: the weight of a fresh update", group=_RIVALS, above=0, most=1)
    staleness: str = option("polynomial", "how FedAsync discounts a stale update", group=_RIVALS, choices=STALENESSES)
    staleness_exponent: float = option(0.5, "a in (1+lag)^-a, polynomial staleness", group=_RIVALS, least=0)
    hinge_slope: float = option(10.0, "a in 1/(a(lag-b)+1), hinge staleness", group=_RIVALS, least=0)
    hinge_lag: float = option(4.0, "b, the lag up to which hinge staleness discounts nothing", group=_RIVALS, least=0)
    buffer_size: int = option(10, "K: how many updates FedBuff merges at a time", group=_RIVALS, least=1)
    server_lr: float = option(1.0, "the step size of FedBuff's server", group=_RIVALS, above=0)

    partition: str = option(
        "contiguous", "who holds which samples: contiguous (the paper), iid, dirichlet:ALPHA or shards:N", group=_LEARN
    )
    trainer: str = option(
        "batched", "batched: many clients at once; serial: one after the other, slow, the oracle", group=_LEARN,
        choices=TRAINERS,
    )  # fmt: skip
    device: str = option("cpu", "where to train: cpu or cuda", group=_LEARN)
    tf32: bool = option(False, "let a GPU round the inputs of matrix products to 10 bits", group=_LEARN)
    threads: int = option(
        0, "threads that torch computes with; 0: as many as it takes here, and the run's folder says how many",
        group=_LEARN, least=0, most=1024,
    )  # fmt: skip
    optimiser: str = option("sgd", "the clients' optimiser", group=_LEARN, choices=OPTIMISERS)
    momentum: float = option(0.0, "momentum of SGD", group=_LEARN, least=0)
    weight_decay: float = option(0.0, "weight decay of the clients' optimiser", group=_LEARN, least=0)
    proximal: float = option(0.0, "mu of FedProx: pulls clients back to where they started", group=_LEARN, least=0)
    eval_every: int = option(1, "evaluate the global model every so many rounds", group=_LEARN, least=1)
    eval_clients: bool = option(False, "evaluate the last model on every client's own data, too", group=_LEARN)
    keep_best: bool = option(
        False, "send out the best model so far by test loss, as the paper did: this peeks at the test set", group=_LEARN
    )
    warm_start: bool = option(
        False, "start the cache from one epoch of training by every client, as the paper did", group=_LEARN
    )
    memory_mb: float = option(
        4096.0, "memory for models and updates; what does not fit is held in a file", group=_LEARN, above=0
    )
    checkpoint_every: int = option(10, "write a checkpoint every so many rounds", group=_LEARN, least=1)
    train: bool = field(default=True)
    """Whether a model is trained, or the rounds are simulated only."""
    protocol_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a protocol that comes from another package."""

    @classmethod
    def of(
        cls, task: str | Task, *, base: Mapping[str, Any] | None = None, preset: str | None = None, **given: Any
    ) -> Self:
        """Settings for a task: its defaults, then `base`, then a preset (such as "paper"), then what is given.

        A preset brings the task's defaults along, so that it sets all of the paper's Table II.
        """
        if preset is not None and preset not in PRESETS:
            raise SafaError(f"there is no preset {preset!r}; there is {', '.join(PRESETS)}")
        chosen = task if isinstance(task, Task) else find_task(task)
        defaults = {
            "rounds": chosen.rounds,
            "clients": chosen.clients,
            "epochs": chosen.epochs,
            "batch_size": chosen.batch_size,
            "lr": chosen.lr,
            "round_limit_s": chosen.round_limit_s,
            "speed_floor": chosen.speed_floor,
            "mean_size": chosen.samples / chosen.clients,
        }
        values = defaults | dict(base or {}) | (defaults | dict(PRESETS[preset]) if preset else {}) | given
        unknown = values.keys() - {item.name for item in fields(cls)}
        if unknown:
            raise SafaError(f"there is no setting {sorted(unknown)[0]!r}")
        return cls(task=chosen.name, **values)

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.metadata:
                object.__setattr__(self, item.name, checked(item.name, getattr(self, item.name), item))
        check_partition(self.partition)
        known = registry.parameters(registry.find(self.protocol))
        for name in self.protocol_options:
            if name not in known:
                raise SafaError(f"{self.protocol} has no setting {name!r}; it has {', '.join(known)}")

    def values(self) -> dict[str, Any]:
        """All settings by name, those of a foreign protocol among them."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "protocol_options"}
        return own | dict(self.protocol_options)

    def to_toml(self) -> str:
        """A config file that says everything needed to run this again."""
        lines = [
            f"{item.name} = {as_toml(getattr(self, item.name))}"
            for item in fields(self)
            if item.name != "protocol_options" and getattr(self, item.name) is not None
        ]
        if self.protocol_options:
            lines += [
                "",
                "[protocol_options]",
                *(f"{name} = {as_toml(v)}" for name, v in self.protocol_options.items()),
            ]
        return "\n".join(lines) + "\n"

    @staticmethod
    def read_toml(path: str | Path) -> dict[str, Any]:
        """The settings that a config file gives, `task` among them, to be passed on to `Settings.of`."""
        try:
            return tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else "it is not text"
            raise SafaError(f"cannot read {path}: {reason}") from None
        except tomllib.TOMLDecodeError as problem:
            raise SafaError(f"{path} is not a config file: {problem}") from None


def checked(name: str, value: Any, item: Any) -> Any:
    """The value in its proper type, or an error that says what was wrong, what was given and what is allowed."""
    allowed = item.metadata
    if allowed["is_file"]:
        return None if value is None else str(value)
    if allowed["choices"] is not None and value not in allowed["choices"]:
        raise SafaError(f"{name} must be one of {', '.join(allowed['choices'])}, not {value!r}")
    if item.type == "bool" and not isinstance(value, bool):
        raise SafaError(f"{name} must be true or false, not {value!r}")
    return _checked_number(name, value, item) if item.type in ("int", "float") else value


def _checked_number(name: str, value: Any, item: Any) -> int | float:
    whole = item.type == "int"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (whole and not float(value).is_integer()):
        raise SafaError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    above, least, most = (item.metadata[key] for key in ("above", "least", "most"))
    fits = (above is None or value > above) and (least is None or value >= least) and (most is None or value <= most)
    if not fits:
        lower = f"above {above}" if above is not None else f"at least {least}"
        raise SafaError(f"{name} must be {lower}{'' if most is None else f' and at most {most}'}, not {value}")
    return int(value) if whole else float(value)


def as_toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)
