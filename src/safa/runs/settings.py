"""The settings of a run, in one flat, frozen, checked object.

Symbols of the paper are next to the names that replace them here: `fraction` C, `crash_rate` cr, `lag_tolerance` tau,
`rounds` r, `clients` m, `epochs` E, `batch_size` B, `lr` the learning rate, `round_limit_s` T_lim.

A setting that is given must have an effect. Which protocols take it as a parameter is known from their constructors
(`safa.protocol.registry`); what else it needs is in its `needs`. One that has no effect in the run is refused,
unless it has its default value: a config file that a run wrote names all settings.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, Unpack

from safa.analysis.targets import Target
from safa.errors import MisuseError, SafaError, did_you_mean
from safa.protocol import registry
from safa.protocol.continuous import STALENESSES
from safa.protocol.fedavg import AVERAGINGS
from safa.runs import presets
from safa.runs.fields import as_toml, checked, option
from safa.runs.options import SettingsOptions
from safa.runs.schedule import Schedule
from safa.tasks import Task, check_partition, find_task, sizes_decided
from safa.tasks.references import reference_of
from safa.vocabulary import FAULT_MODELS, FLEETS, OPTIMISERS, SIZE_DISTRIBUTIONS, SPEED_DISTRIBUTIONS, TRAINERS

__all__ = ["CLOCKS", "FORMAT", "Settings", "refuse_unused"]

CLOCKS = ("causal", "paper")
FORMAT = "safa run 2"
"""What the first line of the config.toml in a run's folder says: what wrote it, and in which format."""


_RUN, _WORK, _WORLD, _OTHERS = "the run", "the federation", "the world", "other protocols"
_LEARN, _AGGREGATION = "learning", "aggregation"

_CAUSAL = {"clock": ("causal",)}
_DRAWN_SIZES = {"sizes": (None,)}
_DRAWN_SPEEDS = {"speeds": (None,)}
_PAPER_SPEEDS = _DRAWN_SPEEDS | {"fleet": ("paper",)}
_SAME_LINKS = {"links": (None,), "fleet": ("paper", "two-speed", "lognormal")}
_HINGE = {"staleness": ("hinge",)}
_TRAINING = {"train": (True,)}
_EPOCHS = {"local_steps": (0,)}


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

    until: str = option(
        "", "end the run when a target has been held: METRIC=VALUE, or METRIC=VALUE,held=ROUNDS", group=_RUN,
        is_list=False, needs=_TRAINING,
    )  # fmt: skip

    time_limit_s: float = option(
        math.inf, "end the run before the first round that would close later than this, in seconds (inf: never)",
        group=_RUN, flag="--time-limit", above=0, needs=_CAUSAL,
    )  # fmt: skip

    fraction: float = option(0.3, "C: the share of clients whose updates a round wants", group=_WORK, above=0, most=1)
    lag_tolerance: int = option(
        5, "tau: how many versions a client may lag behind before it starts over (safa)", group=_WORK, least=1
    )
    rounds: int = option(None, "r: how many rounds", group=_WORK, least=1, limit=1_000_000_000)
    clients: int = option(None, "m: how many clients", group=_WORK, least=1, limit=100_000_000)
    epochs: int = option(
        None, "E: passes over its data that a client makes for one update", group=_WORK, least=1, needs=_EPOCHS
    )
    local_steps: int = option(
        0, "mini-batch steps that a client makes for one update, instead of epochs (0: epochs)", group=_WORK, least=0
    )
    batch_size: int = option(None, "B: samples in a mini-batch", group=_WORK, least=1)
    lr: float | Literal["auto"] = option(
        None, "the learning rate; auto: found by a short range test before the first round", group=_WORK, above=0,
        below=math.inf, words=("auto",),
    )  # fmt: skip
    schedule: str = option(
        "constant", "the learning rate by round: constant, cosine, step:EVERY:FACTOR, warmup:ROUNDS, several joined by "
        "+, or your own, package.module:function", group=_WORK,
    )  # fmt: skip
    round_limit_s: float = option(
        None, "T_lim: when a round is closed at the latest, in seconds (inf: never)", group=_WORK, flag="--round-limit",
        above=0,
    )  # fmt: skip
    averaging: str = option(
        "participants", "what FedAvg and FedCS average over: the participants (McMahan) or the population (the paper)",
        group=_WORK, choices=AVERAGINGS,
    )  # fmt: skip

    work_cap: float | Literal["auto"] = option(
        "auto", "ask a client for as much of its work as it does in so many times the median client's time (0: for all "
        "of it; auto: the protocol's own, 3 of fedsecant and 0 of the others)", group=_WORK, least=0, below=math.inf,
        words=("auto",), needs=_CAUSAL,
    )  # fmt: skip
    normalise_work: bool = option(
        False, "whether the weight of a change is divided by the share of the work that was done for it", group=_WORK,
        needs=_CAUSAL,
    )  # fmt: skip

    crash_rate: float = option(0.3, "cr: how likely a stretch of work is cut short", group=_WORLD, least=0, most=1)
    fault_model: str = option(
        "attempt", "whether a crash is drawn once per attempt or once per round (causal clock)", group=_WORLD,
        choices=FAULT_MODELS, needs=_CAUSAL,
    )  # fmt: skip
    keep_progress: bool = option(
        True, "whether a client that crashed continues where it was", group=_WORLD,
        needs=_CAUSAL | {"protocol": ("safa", "local", "fedasync", "fedbuff", "fedcompass", "fedsecant")},
    )  # fmt: skip
    detection_delay_s: float = option(
        60.0, "how long the server needs to notice a loss, in seconds (0: at once, inf: never)", group=_WORLD,
        flag="--detection-delay", least=0, needs=_CAUSAL,
    )  # fmt: skip
    return_delay_s: float = option(
        0.0, "mean time in seconds after which a client that crashed is back, drawn (0: when the next round opens, as "
        "in the paper)", group=_WORLD, flag="--return-delay", least=0, below=math.inf,
        needs=_CAUSAL | {"fault_model": ("attempt",)},
    )  # fmt: skip
    fleet: str = option(
        "paper", "whose speeds and links: paper (as the options below say), phones, two-speed or lognormal",
        group=_WORLD, choices=FLEETS, needs=_DRAWN_SPEEDS,
    )  # fmt: skip
    mean_size: float = option(
        None, "mean number of samples that a client holds", group=_WORLD, least=1, most=1e9, needs=_DRAWN_SIZES
    )
    size_distribution: str = option(
        "normal", "how the clients' numbers of samples differ", group=_WORLD, choices=SIZE_DISTRIBUTIONS,
        needs=_DRAWN_SIZES,
    )  # fmt: skip
    size_spread: float = option(
        0.3, "standard deviation of a normal size over its mean", group=_WORLD, least=0, most=1000,
        needs=_DRAWN_SIZES | {"size_distribution": ("normal",)},
    )  # fmt: skip
    speed_distribution: str = option(
        "exponential", "how the clients' speeds differ", group=_WORLD, choices=SPEED_DISTRIBUTIONS, needs=_PAPER_SPEEDS
    )
    speed_mean: float = option(
        1.0, "mean speed in mini-batches per second; of the fleet phones the median, of two-speed the fast clients'",
        group=_WORLD, above=0, below=math.inf, needs=_DRAWN_SPEEDS,
    )  # fmt: skip
    speed_spread: float = option(
        0.5, "standard deviation over the mean (normal), or sigma of the logarithm (lognormal)", group=_WORLD, least=0,
        most=1000, needs=_PAPER_SPEEDS | {"speed_distribution": ("normal", "lognormal")},
    )  # fmt: skip
    speed_floor: float = option(None, "a speed below this is drawn again", group=_WORLD, above=0, needs=_PAPER_SPEEDS)
    down_mbps: float = option(1.4, "a client's download bandwidth in Mbit/s", group=_WORLD, above=0, needs=_SAME_LINKS)
    up_mbps: float = option(1.4, "a client's upload bandwidth in Mbit/s", group=_WORLD, above=0, needs=_SAME_LINKS)
    server_mbps: float = option(10_000.0, "the server's bandwidth in Mbit/s", group=_WORLD, above=0)
    model_size_mb: float = option(
        10.0, "the size of the model on the wire in MB", group=_WORLD, least=0, below=math.inf
    )
    speeds: str | tuple[float, ...] | None = option(
        None, "speeds from a file instead of a distribution: a line per client, or FedScale's devices", group=_WORLD,
        is_file=True,
    )  # fmt: skip
    sizes: str | tuple[float, ...] | None = option(
        None, "sizes from a file, one line per client, instead of a distribution", group=_WORLD, is_file=True
    )
    links: str | tuple[tuple[float, float], ...] | None = option(
        None, "bandwidths from a CSV file with columns down_mbps,up_mbps, a line per client, or FedScale's devices",
        group=_WORLD, is_file=True,
    )  # fmt: skip
    trace: str | tuple[tuple[float, float, float], ...] | None = option(
        None, "when clients are online, from a CSV file with columns client,online_from_s,online_until_s, or "
        "FedScale's availability", group=_WORLD, is_file=True,
    )  # fmt: skip
    online_hours: float = option(
        0.0, "hours a day that a client is online, in one stretch around a time of its own, most of them at night (0: "
        "always)", group=_WORLD, least=0, below=24, needs=_CAUSAL | {"trace": (None,)},
    )  # fmt: skip

    estimate_error: float = option(
        0.0, "how far the server is off when it guesses a client's time (sigma of the logarithm)", group=_OTHERS,
        least=0, below=math.inf, needs={"protocol": ("fedcs", "timelyfl", "fedcompass", "fedsecant")},
    )  # fmt: skip
    mixing: float = option(0.6, "alpha of FedAsync: the weight of a fresh update", group=_OTHERS, above=0, most=1)
    staleness: str = option("polynomial", "how FedAsync discounts a stale update", group=_OTHERS, choices=STALENESSES)
    staleness_exponent: float = option(
        0.5, "a in (1+lag)^-a, polynomial staleness", group=_OTHERS, least=0, below=math.inf,
        needs={"staleness": ("polynomial",)},
    )  # fmt: skip
    hinge_slope: float = option(
        10.0, "a in 1/(a(lag-b)+1), hinge staleness", group=_OTHERS, least=0, below=math.inf, needs=_HINGE
    )
    hinge_lag: float = option(
        4.0, "b, the lag up to which hinge staleness discounts nothing", group=_OTHERS, least=0, needs=_HINGE
    )
    buffer_size: int = option(10, "K: how many updates FedBuff merges at a time", group=_OTHERS, least=1)
    server_lr: float = option(
        1.0, "the step size of FedBuff's and FedCompass's server", group=_OTHERS, above=0, below=math.inf
    )
    interval_share: float = option(
        0.5, "k/n of TimelyFL: the share of the clients drawn that have the time for all their work", group=_OTHERS,
        above=0, most=1,
    )  # fmt: skip
    step_ratio: float = option(
        0.2, "Qmin/Qmax of FedCompass: the least share of its work that a client is asked for", group=_OTHERS, above=0,
        most=1,
    )  # fmt: skip
    late_factor: float = option(
        1.2, "lambda of FedCompass: how many times its own time a group is waited for; TimelyFL: of the interval",
        group=_OTHERS, least=1,
    )  # fmt: skip

    aggregator: str = option(
        "auto", "what makes the global model of the updates (auto: the protocol's own); `safa aggregators` lists them",
        group=_AGGREGATION, needs=_TRAINING,
    )  # fmt: skip
    trim: float = option(
        0.2, "share of the updates that trimmed_mean cuts at each end", group=_AGGREGATION, least=0, below=0.5,
        needs={"aggregator": ("trimmed_mean",)},
    )  # fmt: skip
    hostile: float = option(
        0.2, "share of hostile clients that krum assumes", group=_AGGREGATION, least=0, below=0.5,
        needs={"aggregator": ("krum",)},
    )  # fmt: skip
    server_step: float = option(
        1.0, "the step size of MIFA, FedVARP, CA2FL, FedStale and SCAFFOLD", group=_AGGREGATION, above=0,
        below=math.inf, needs={"aggregator": ("mifa", "fedvarp", "ca2fl", "fedstale", "scaffold")},
    )  # fmt: skip
    server_optimiser: str = option(
        "none", "the server's optimiser around the aggregator; `safa aggregators` lists them", group=_AGGREGATION,
        needs=_TRAINING,
    )  # fmt: skip
    server_optimiser_lr: float = option(
        0.1, "eta, the learning rate of the server's optimiser", group=_AGGREGATION, above=0, below=math.inf,
        needs={"server_optimiser": ("momentum", "adagrad", "adam", "yogi")},
    )  # fmt: skip
    server_momentum: float = option(
        0.9, "beta_1 of the server's optimiser", group=_AGGREGATION, least=0, below=1,
        needs={"server_optimiser": ("momentum", "adagrad", "adam", "yogi")},
    )  # fmt: skip
    server_beta2: float = option(
        0.99, "beta_2 of the server's optimiser", group=_AGGREGATION, least=0, below=1,
        needs={"server_optimiser": ("adam", "yogi")},
    )  # fmt: skip
    server_epsilon: float = option(
        1e-3, "tau of the server's optimiser: what is added to the square root", group=_AGGREGATION, above=0,
        below=math.inf, needs={"server_optimiser": ("adagrad", "adam", "yogi")},
    )  # fmt: skip

    partition: str = option(
        "contiguous", "who holds which samples; `safa partitions` lists the ways. A task whose data are its clients' "
        "own has natural by default", group=_LEARN,
    )  # fmt: skip
    shuffle: bool = option(False, "whether a client goes through its samples in a new order every epoch", group=_LEARN)
    trainer: str = option(
        "auto", "batched: many clients as one computation; threads: side by side on the cores; processes: likewise, in "
        "processes, on Linux; serial: one after the other, the oracle; ray: batched, on the machines of a Ray cluster; "
        "auto: the fastest here of batched, processes (or threads) and serial, by a short measurement", group=_LEARN,
        choices=TRAINERS,
    )  # fmt: skip
    device: str = option("cpu", "where to train: cpu or cuda", group=_LEARN)
    compile: bool = option(
        False, "let torch compile the steps of a model on a GPU: up to a minute for each number of clients when it is "
        "done first, for long runs", group=_LEARN,
    )  # fmt: skip
    tf32: bool = option(False, "let a GPU round the inputs of matrix products to 10 bits", group=_LEARN)
    threads: int = option(
        0, "threads that torch computes with; 0: as many as it takes here, and the run's folder says how many",
        group=_LEARN, least=0, most=1024,
    )  # fmt: skip
    optimiser: str = option("sgd", "the clients' optimiser", group=_LEARN, choices=OPTIMISERS)
    momentum: float = option(0.0, "momentum of SGD", group=_LEARN, least=0, below=1, needs={"optimiser": ("sgd",)})
    nesterov: bool = option(False, "Nesterov's momentum", group=_LEARN, needs={"optimiser": ("sgd",)})
    clip: float = option(
        0.0, "the largest norm of a gradient; longer ones are cut to it (0: none is)", group=_LEARN, least=0,
        below=math.inf,
    )  # fmt: skip
    weight_decay: float = option(0.0, "weight decay of the clients' optimiser", group=_LEARN, least=0, most=1e30)
    proximal: float = option(
        0.0, "mu of FedProx: pulls clients back to where they started", group=_LEARN, least=0, most=1e30
    )
    eval_every: int = option(1, "evaluate the global model every so many rounds", group=_LEARN, least=1)
    eval_clients: bool = option(False, "evaluate the last model on every client's own data, too", group=_LEARN)
    memory_mb: float = option(
        0.0, "memory for models and updates, in MB; what does not fit is in a file (0: 4096, or a quarter of a GPU's)",
        group=_LEARN, least=0, most=1e12,
    )  # fmt: skip
    checkpoint_every: int = option(10, "write a checkpoint every so many rounds", group=_LEARN, least=1)
    train: bool = field(default=True)
    """Whether a model is trained, or the rounds are simulated only."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """The metrics of the problem, the main one first: "higher" or "lower", whichever is better. A run fills it in."""
    aggregator_options: Mapping[str, Any] = field(default_factory=dict)
    """The own settings of another package's aggregator, by the names of its parameters."""
    protocol_options: Mapping[str, Any] = field(default_factory=dict)
    """A protocol's own settings, by the names of its parameters: those that are not filled from this run's settings."""

    @classmethod
    def of(
        cls,
        task: str | Task,
        *,
        base: Mapping[str, Any] | None = None,
        preset: str | Path | None = None,
        **given: Unpack[SettingsOptions],
    ) -> Self:
        """Settings for a task: its defaults, then `base`, then a preset (see `safa.runs.presets`), then what is given.

        A preset brings the task's defaults along, so that it decides whatever is not given with it. What is given or in
        `base` must have an effect in the run, or its default value.
        """
        settings, changed = cls.combined(task, base=base, preset=preset, **given)
        refuse_unused([(settings, changed)])
        return settings

    @classmethod
    def combined(
        cls, task: str | Task, *, base: Mapping[str, Any] | None = None, preset: str | Path | None = None, **given: Any
    ) -> tuple[Self, list[str]]:
        """The settings that `of` makes, before `refuse_unused`, and the names of those that must have an effect.

        These are what was given with a value that is neither the default nor the preset's, and of `base`, which may be
        the config file of a run with a preset, what has neither the default value nor that of a preset of the package.
        """
        if not isinstance(task, str | Task):
            raise SafaError(f"a task is given by its name, not as {task!r}")
        chosen = task if isinstance(task, Task) else find_task(task)
        defaults = _defaults(chosen)
        fixed = defaults | dict(presets.read(preset)) if preset is not None else {}
        values = defaults | dict(base or {}) | fixed | given
        known = [item.name for item in fields(cls)]
        for unknown in sorted(values.keys() - set(known)):
            raise SafaError(f"there is no setting {unknown!r}{did_you_mean(unknown, known)}")
        settings = cls(task=chosen.name, **values)
        usual = {item.name: [item.default] for item in fields(cls) if item.default is not MISSING}
        usual |= {name: [value] for name, value in defaults.items()}
        named = [*given, *values.get("protocol_options", {})]
        changed = [name for name in named if settings._differs(name, usual, [fixed[name]] if name in fixed else [])]
        of_base = [name for name in base or () if name not in named]
        changed += [name for name in of_base if settings._differs(name, usual, presets.values_of_all(name))]
        return settings, changed

    def _differs(self, name: str, usual: Mapping[str, list[Any]], preset: Sequence[Any]) -> bool:
        """Whether a setting has a value of its own: neither a usual one nor one that a preset gives it."""
        harmless = [*usual.get(name, ()), *preset]
        return bool(harmless) and getattr(self, name) not in harmless

    def __post_init__(self) -> None:
        if callable(self.schedule):
            object.__setattr__(self, "schedule", reference_of(self.schedule))
        for name in ("task", "protocol", "aggregator", "server_optimiser", "until", "schedule"):
            if not isinstance(getattr(self, name), str):
                raise SafaError(f"{name} must be text, not {getattr(self, name)!r}")
        if not isinstance(self.train, bool):
            raise SafaError(f"train must be true or false, not {self.train!r}")
        self._take_options()
        for item in fields(self):
            if item.metadata:
                object.__setattr__(self, item.name, checked(item.name, getattr(self, item.name), item))
        check_partition(self.partition)
        Schedule.parse(self.schedule)
        if self.nesterov and self.optimiser == "sgd" and not self.momentum:
            raise SafaError("nesterov needs a momentum above 0")
        if not all(better in ("higher", "lower") for better in self.metrics.values()):
            raise SafaError(f"metrics must say higher or lower of each, not {dict(self.metrics)!r}")
        self.target  # noqa: B018 - one that cannot be reached is refused here

    def _take_options(self) -> None:
        """Check the own settings of protocol and aggregator, of which those behind "aggregator." are the latter's.

        One that a protocol shares with the run is the run's setting of that name.
        """
        for table in _TABLES:
            if not isinstance(getattr(self, table), Mapping):
                raise SafaError(f"{table} must be settings by name, not {getattr(self, table)!r}")
        protocol = registry.find(self.protocol)
        known, shared = registry.parameters(protocol), registry.shared(protocol)
        own, aggregator = dict(self.protocol_options), dict(self.aggregator_options)
        for name in self.protocol_options:
            if name.startswith(_AGGREGATOR):
                aggregator[name.removeprefix(_AGGREGATOR)] = own.pop(name)
            elif name not in known:
                close = did_you_mean(name, known)
                raise SafaError(f"{self.protocol} has no setting {name!r}{close}; it has {', '.join(known)}")
            elif name in shared and name in _OPTIONS:
                object.__setattr__(self, name, own.pop(name))
        for name, value in (*own.items(), *aggregator.items()):
            if not _is_plain(value):
                raise SafaError(f"{name} must be a number, true, false, text or a list of these, not {value!r}")
        object.__setattr__(self, "protocol_options", own)
        object.__setattr__(self, "aggregator_options", aggregator)

    def unmet(self, name: str) -> list[str]:
        """Why a setting has no effect in this run, a sentence for each reason; none if it has an effect."""
        if name in _SIZES and self.decides_sizes:
            return [f"{name} has no effect with partition = {self.partition}, which decides what every client holds"]
        protocol = registry.find(self.protocol)
        needs: dict[str, tuple[str | bool | None, ...]] = dict(_OPTIONS[name].get("needs", {}))
        if name == "keep_progress" and self.return_delay_s:
            needs.pop("protocol")  # clients return by themselves, whatever the protocol
        takers = registry.takers(name)
        if takers and name not in _OF_EVERY_RUN and name not in registry.shared(protocol):
            needs["protocol"] = takers
        elif not registry.is_own(protocol) or (name == "estimate_error" and self.work_cap not in ("auto", 0)):
            needs.pop("protocol", None)  # nobody but its author knows what another package's protocol makes of it
        return [
            _no_effect(name, other, getattr(self, other), allowed)
            for other, allowed in needs.items()
            if getattr(self, other) not in allowed
        ]

    @property
    def decides_sizes(self) -> bool:
        """Whether the partition decides how many samples every client holds, and not the world."""
        return sizes_decided(self.partition)

    @property
    def target(self) -> Target | None:
        """What ends the run before its last round, if anything does."""
        return Target.parse(self.until, self.metrics) if self.until else None

    @property
    def learning_rate(self) -> float:
        """The learning rate as a number; `auto` has been replaced by one before anybody trains."""
        if isinstance(self.lr, str):
            raise MisuseError("the learning rate has not been found yet")
        return self.lr

    def values(self) -> dict[str, Any]:
        """All settings by name; a protocol's own settings are called `protocol.NAME`."""
        run = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _TABLES}
        return run | {
            f"{kind}.{name}": value for table, kind in _TABLES.items() for name, value in getattr(self, table).items()
        }

    def to_toml(self) -> str:
        """A config file that says everything needed to run this again."""
        lines = [
            f"{item.name} = {as_toml(getattr(self, item.name))}"
            for item in fields(self)
            if item.name not in _TABLES and getattr(self, item.name) is not None
        ]
        for table in _TABLES:
            options = getattr(self, table)
            if options:
                lines += ["", f"[{table}]", *(f"{name} = {as_toml(v)}" for name, v in options.items())]
        return "\n".join(lines) + "\n"

    @staticmethod
    def read_toml(path: str | Path) -> dict[str, Any]:
        """The settings that a config file gives, `task` among them, to be passed on to `Settings.of`."""
        try:
            found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise SafaError(f"cannot read {path}: {reason}") from None
        except (ValueError, RecursionError) as error:  # a number of too many digits, tables too deep
            raise SafaError(f"{path} is not a config file: {error}") from None
        made_as = found.pop("format", FORMAT)
        if made_as != FORMAT:
            raise SafaError(f"{path} is of a format that this version cannot read: {made_as!r} instead of {FORMAT!r}")
        return found


_AGGREGATOR = "aggregator."
_TABLES = {"metrics": "metric", "protocol_options": "protocol", "aggregator_options": "aggregator"}
"""Settings that are tables, and what the names in them are put behind."""
_OPTIONS = {item.name: item.metadata for item in fields(Settings)}
_SIZES = ("sizes", "mean_size", "size_distribution", "size_spread")
"""Settings that say how many samples clients hold."""
_OF_EVERY_RUN = ("rounds",)
"""Settings that some protocol takes, and that every run uses besides."""


def _defaults(task: Task) -> dict[str, Any]:
    """The settings that a task brings along."""
    return {
        "rounds": task.rounds,
        "clients": task.clients,
        "epochs": task.epochs,
        "batch_size": task.batch_size,
        "lr": task.lr,
        "round_limit_s": task.round_limit_s,
        "speed_floor": task.speed_floor,
        "mean_size": task.samples / task.clients,
        "metrics": dict(task.metrics),
    } | ({"partition": "natural", "mean_size": sum(task.sizes) / len(task.sizes)} if task.sizes else {})


def refuse_unused(runs: Sequence[tuple[Settings, Sequence[str]]]) -> None:
    """Refuse a setting that has no effect in any of these runs; each comes with the names that must have one."""
    for name in dict.fromkeys(name for _, names in runs for name in names):
        reasons = [settings.unmet(name) for settings, _ in runs]
        if all(reasons):
            raise SafaError(min(reasons, key=len)[0])


def _no_effect(name: str, other: str, value: Any, allowed: Sequence[str | bool | None]) -> str:
    if None in allowed:
        given = "come from a file" if isinstance(value, str) else "are given"
        return f"{name} has no effect where {other} {given}; leave out one of the two"
    if other == "train":
        return f"{name} has no effect where nothing is trained"
    wanted = " or ".join(map(str, allowed))
    return f"{name} has no effect with {other} = {value}; it is for {other} = {wanted}"


def _is_plain(value: Any) -> bool:
    """Whether a config file can hold the value."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)
