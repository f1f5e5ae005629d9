"""The plan of an arena: worlds, protocols, what is tuned and how, on which seeds, and what counts as a win.

It is a TOML file (`docs/arena.md` has its parts). A world and a protocol together are ordinary settings of a run, so
that a plan can name whatever setting, protocol or aggregator there is.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self

from safa.analysis import higher_is_better
from safa.errors import SafaError, did_you_mean
from safa.experiments.sweep import check_runs
from safa.runs.settings import Settings
from safa.runs.storage import reading
from safa.tasks import find_task

__all__ = ["FORMAT", "Choice", "Entry", "Plan", "Targets", "Win", "World"]

FORMAT = "safa arena 1"
_SETTINGS = {item.name for item in fields(Settings)}
_SEEDS = ("tuning_seeds", "judging_seeds")
_ROUNDS = 10_000_000  # more than fit into any horizon: it is the time that ends a run


@dataclass(frozen=True)
class Entry:
    """A protocol with its settings, and the one setting of its own that is tuned, its knob, if it has one."""

    name: str
    settings: Mapping[str, Any]
    knob: str = ""
    values: Sequence[Any] = ()
    """What the knob may be; here and in the settings, "10%" is that share of the world's clients."""

    def values_for(self, clients: int) -> list[Any]:
        """What the knob may be in a world of so many clients; [None] without a knob."""
        return list(dict.fromkeys(_of_clients(value, clients) for value in self.values)) or [None]


def _of_clients(value: Any, clients: int) -> Any:
    """The number of clients that a share such as "10%" is, at least 1; any other value is itself."""
    if not isinstance(value, str) or not value.endswith("%"):
        return value
    try:
        return max(1, round(float(value[:-1]) / 100 * clients))
    except ValueError:
        raise SafaError(f"a share of the clients is written as 10%, not {value!r}") from None


@dataclass(frozen=True)
class World:
    """The settings that all protocols share in a world, how long it lasts, and the learning rates that are tried."""

    name: str
    task: str
    settings: Mapping[str, Any]
    horizon_s: float
    rates: Sequence[float]
    tuning_seeds: Sequence[int]
    """The seeds on which protocols are tuned."""
    seeds: Sequence[int]
    """The seeds on which they are judged."""
    targets: Sequence[float] = ()
    """Values of the main metric; empty: by the rule of the plan."""

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return int(self.settings.get("clients", find_task(self.task).clients))

    @property
    def metric(self) -> str:
        """The main metric of the task."""
        return next(iter(find_task(self.task).metrics), "loss")

    @property
    def higher(self) -> bool:
        """Whether more of the main metric is better."""
        return higher_is_better(self.metric, find_task(self.task).metrics)


@dataclass(frozen=True)
class Targets:
    """Which values of the main metric are targets: shares of what one protocol reaches by the end of tuning runs."""

    of: str
    shares: Sequence[float]
    held: float = 0.0
    """For which share of the horizon a target must be held."""

    def from_best(self, best: float, *, higher: bool) -> list[float]:
        """The targets, where the protocol reaches so much; where less is better, it is divided by the shares."""
        return [float(f"{best * share if higher else best / share:.4g}") for share in self.shares]


@dataclass(frozen=True)
class Win:
    """What one protocol has to do to win against all others, the rivals."""

    protocol: str
    within: float = 1.1
    """In every world, at most so many times as long to the targets as the best rival."""
    ahead: float = 0.5
    """In this share of the worlds, faster than the best rival by the interval."""
    worst_tenth: float = 0.02
    """How far the worst-served tenth may be below the best rival's."""
    metric: float = 0.02
    """How far the metric in the first of two equal worlds may be from that in the second."""
    equal: Sequence[tuple[str, str]] = ()
    """Pairs of worlds that hold the same data."""


@dataclass(frozen=True)
class Choice:
    """A protocol with a learning rate and a value of its knob."""

    entry: str
    lr: float
    value: Any = None


@dataclass(frozen=True)
class Plan:
    """A whole plan, checked."""

    digest: str
    """A checksum of everything that it says; comments and layout do not count."""
    worlds: Mapping[str, World]
    entries: Mapping[str, Entry]
    targets: Targets
    baselines: Sequence[str]
    win: Win | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all runs."""
    tuned: Mapping[str, Mapping[str, Choice]] = field(default_factory=dict)
    """By world and protocol, what is not tuned again: what an earlier tuning chose."""
    text: bytes = b""
    """The file that it was read from."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """The plan in a file."""
        with reading(path):
            text = path.read_bytes()
        try:
            found = tomllib.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise SafaError(f"{path} is not a plan: {error}") from None
        if found.get("format") != FORMAT:
            raise SafaError(f'{path} is not a plan of this version: its format must be "{FORMAT}"')
        try:
            return replace(cls._of(found), text=text)
        except SafaError as error:
            raise SafaError(f"{path}: {error}") from None

    @classmethod
    def _of(cls, found: dict[str, Any]) -> Self:
        top = _Table("the plan", found)
        settings = top.take("settings", dict, {})
        seeds = {name: _seeds(name, top.take(name, list)) for name in _SEEDS}
        worlds = {name: _world(name, table, seeds) for name, table in top.take("worlds", dict).items()}
        entries = {name: _entry(name, table) for name, table in top.take("protocols", dict).items()}
        plan = cls(
            hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest(),
            worlds,
            entries,
            _made(Targets, _Table("targets", top.take("targets", dict))),
            top.take("baselines", list),
            _made(Win, _Table("win", top.take("win", dict))) if "win" in found else None,
            settings,
            {name: _choices(name, table) for name, table in top.take("tuned", dict, {}).items()},
        )
        top.take("format", str)
        top.refuse_rest()
        plan._check()
        return plan

    def _check(self) -> None:
        """Refuse names that are not in the plan, and a seed for tuning and judging."""
        named = [self.targets.of, *self.baselines, *([self.win.protocol] if self.win else [])]
        named += [name for choices in self.tuned.values() for name in choices]
        worlds = [*self.tuned, *(name for pair in (self.win.equal if self.win else ()) for name in pair)]
        for name, known in [(name, self.entries) for name in named] + [(name, self.worlds) for name in worlds]:
            if name not in known:
                raise SafaError(
                    f"there is no {name!r} in the plan{did_you_mean(name, known)}; it has {', '.join(known)}"
                )
        for world in self.worlds.values():
            both = sorted(set(world.seeds) & set(world.tuning_seeds))
            if both:
                raise SafaError(f"protocols are judged on fresh seeds, but {both[0]} is a seed for tuning, too")

    def chosen(self, patterns: Iterable[str]) -> list[World]:
        """The worlds with these names, which may have the wildcards of a shell; all without any."""
        wanted = list(patterns) or ["*"]
        for pattern in wanted:
            if not any(fnmatch(name, pattern) for name in self.worlds):
                close = did_you_mean(pattern, self.worlds)
                raise SafaError(f"there is no world {pattern!r}{close}; there are {', '.join(self.worlds)}")
        return [world for name, world in self.worlds.items() if any(fnmatch(name, pattern) for pattern in wanted)]

    def choices(self, world: World) -> list[Choice]:
        """Every protocol that is tuned in a world with every learning rate and every value of its knob."""
        known = self.tuned.get(world.name, {})
        return [choice for choice in self.grid(world) if choice.entry not in known]

    def grid(self, world: World) -> list[Choice]:
        """Every protocol with every learning rate and every value of its knob."""
        return [
            Choice(name, lr, value)
            for name, entry in self.entries.items()
            for value in entry.values_for(world.clients)
            for lr in world.rates
        ]

    def runs(self, world: World, choices: Sequence[Choice], seeds: Sequence[int], *, judged: bool) -> list[Settings]:
        """The settings of these choices on these seeds, the seeds varying fastest."""
        return [self._combined(world, choice, seed, judged=judged)[0] for choice in choices for seed in seeds]

    def _combined(self, world: World, choice: Choice, seed: int, *, judged: bool) -> tuple[Settings, list[str]]:
        entry = self.entries[choice.entry]
        own = {name: _of_clients(value, world.clients) for name, value in entry.settings.items()}
        given = {"rounds": _ROUNDS, **self.settings, **world.settings, **own, "lr": choice.lr, "seed": seed}
        given |= {entry.knob: choice.value} if entry.knob else {}
        given |= {"time_limit_s": world.horizon_s, "eval_clients": judged}
        options = {name: given.pop(name) for name in list(given) if name not in _SETTINGS}
        return Settings.combined(world.task, **given | ({"protocol_options": options} if options else {}))

    def check(self, worlds: Iterable[World]) -> None:
        """Refuse whatever can be found wrong with the runs of these worlds before the first of them."""
        for world in worlds:
            grid = self.grid(world)
            try:
                self._check_tuned(world, grid)
                self._check_runs(world, [choice for choice in grid if choice.lr == world.rates[0]])
            except SafaError as error:
                raise SafaError(f"world {world.name}: {error}") from None

    def _check_tuned(self, world: World, grid: Sequence[Choice]) -> None:
        """Refuse what no tuning by this plan could have chosen, and targets that no run of this plan gives."""
        known = self.tuned.get(world.name, {})
        for choice in known.values():
            if choice not in grid:
                raise SafaError(
                    f"{choice.entry} cannot have been tuned to lr {choice.lr} and value {choice.value}, "
                    "which are not in its grid"
                )
        if self.targets.of in known and not world.targets:
            raise SafaError(
                f"{self.targets.of} is not tuned again, so there is nothing to take targets from; name them"
            )

    def _check_runs(self, world: World, choices: Sequence[Choice]) -> None:
        """Refuse settings that are wrong or have no effect for any protocol, and two protocols that are the same."""
        made = [self._combined(world, choice, world.tuning_seeds[0], judged=True) for choice in choices]
        runs = check_runs(made, [find_task(world.task)])
        seen: dict[str, str] = {}
        for run, choice in zip(runs, choices, strict=True):
            other = seen.setdefault(run.to_toml(), choice.entry)
            if other != choice.entry:
                raise SafaError(f"{other} and {choice.entry} have the same settings")


class _Table:
    """A table of the plan, from which what is known is taken one by one."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        if not isinstance(values, dict):
            raise SafaError(f"{name} must be a table")
        self.name, self.values = name, dict(values)

    def take(self, name: str, kind: type[Any], *default: Any) -> Any:
        """A value of a kind, which must be there unless there is a default."""
        if name not in self.values and not default:
            raise SafaError(f"{self.name} must have {name}")
        value = self.values.pop(name, *default)
        value = float(value) if kind is float and isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(value, kind) or (kind in (list, dict) and not value and not default):
            words = {list: "a list with values", dict: "a table with values", str: "text", float: "a number"}
            raise SafaError(f"{name} of {self.name} must be {words[kind]}, not {value!r}")
        return value

    def refuse_rest(self) -> None:
        """Refuse what nobody took."""
        for name in self.values:
            raise SafaError(f"{self.name} has no {name!r}")


def _made(kind: type[Any], table: _Table) -> Any:
    """A dataclass from a table that has its fields."""
    types = {"str": str, "float": float}
    given = {
        item.name: table.take(item.name, types.get(str(item.type), list))
        for item in fields(kind)
        if item.name in table.values
    }
    table.refuse_rest()
    try:
        return kind(**given)
    except TypeError:
        raise SafaError(f"{table.name} must have {' and '.join(list(kind.__match_args__)[:2])}") from None


def _seeds(name: str, values: Sequence[Any]) -> list[int]:
    if len(set(map(repr, values))) < len(values) or any(type(seed) is not int or seed < 0 for seed in values):
        raise SafaError(f"{name} must be different whole numbers, not {values!r}")
    return list(values)


def _world(name: str, values: Mapping[str, Any], seeds: Mapping[str, Sequence[int]]) -> World:
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise SafaError(f"the name of a world is made of letters, digits, dots and dashes, not {name!r}")
    table = _Table(f"world {name}", values)
    horizon_s, rates = table.take("horizon_s", float), table.take("lr", list)
    if not 0 < horizon_s < math.inf:
        raise SafaError(f"horizon_s of world {name} must be above 0, not {horizon_s}")
    tuning, judging = (_seeds(f"{kind} of world {name}", table.take(kind, list, list(seeds[kind]))) for kind in _SEEDS)
    task, targets = table.take("task", str), table.take("targets", list, [])
    return World(name, task, table.values, horizon_s, rates, tuning, judging, targets)


def _choices(world: str, values: Mapping[str, Any]) -> dict[str, Choice]:
    """What an earlier tuning chose in a world, by protocol."""
    found = {}
    for name, given in _Table(f"tuned.{world}", values).values.items():
        table = _Table(f"tuned.{world}.{name}", given)
        found[name] = Choice(name, table.take("lr", float), table.values.pop("value", None))
        table.refuse_rest()
    return found


def _entry(name: str, values: Mapping[str, Any]) -> Entry:
    table = _Table(f"protocol {name}", values)
    knob, grid = table.take("knob", str, ""), table.take("values", list, [])
    if bool(knob) != bool(grid):
        raise SafaError(f"protocol {name} must have both knob and values, or neither")
    return Entry(name, {"protocol": name, **table.values}, knob, grid)
