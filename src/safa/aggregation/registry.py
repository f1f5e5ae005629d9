"""Aggregators by name, and server optimisers, which are wrapped around one: they are loaded when they are asked for.

Another package adds its own through an entry point, without touching this one:

    [project.entry-points."safa.aggregators"]
    mine = "my_package:MyAggregator"

An aggregator of this package is given the run's settings that its constructor has parameters for. One of another
package shares with the run only what it has from here: the parameters of the class that it is derived from, and those
that it names in `run_settings`. All others are its own, whatever they are called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from safa.aggregation.aggregator import Aggregator
from safa.errors import SafaError, did_you_mean
from safa.protocol.records import Rule

__all__ = [
    "available",
    "build",
    "build_optimiser",
    "check",
    "find",
    "find_optimiser",
    "is_own",
    "optimisers",
    "parameters",
    "shared",
]

_GROUP = "safa.aggregators"
_OF_THIS_PACKAGE = "safa."

_AGGREGATORS: dict[str, tuple[str, str]] = {
    "mean": ("safa.aggregation.mean:Mean", "the mean over the participants (FedAvg)"),
    "population": (
        "safa.aggregation.mean:PopulationMean",
        "the mean over everybody, the old model for those that took no part",
    ),
    "cache": ("safa.aggregation.model_cache:ModelCache", "the sum of one entry per client, a model (SAFA)"),
    "mixing": ("safa.aggregation.mixing:Mixing", "every update is mixed into the global model (FedAsync)"),
    "buffer": ("safa.aggregation.buffer:Buffer", "what training changed is added to the global model (FedBuff)"),
    "own": ("safa.aggregation.own_models:OwnModels", "everyone trains its own model; their sum (fully local training)"),
    "mifa": ("safa.aggregation.update_cache:Mifa", "the mean of one entry per client, its latest delta (MIFA)"),
    "fedvarp": (
        "safa.aggregation.update_cache:FedVarp",
        "the mean delta, corrected by those that clients had before (FedVARP)",
    ),
    "ca2fl": (
        "safa.aggregation.ca2fl:Ca2fl",
        "what training changed, calibrated by what it changed before for every client (CA2FL)",
    ),
    "fedstale": (
        "safa.aggregation.fedstale:FedStale",
        "rare clients' deltas count more, and a part of the latest of everybody (FedStale)",
    ),
    "refl": (
        "safa.aggregation.refl:Refl",
        "the mean delta; a stale one counts by its lag and by how much it differs (REFL)",
    ),
    "secant": (
        "safa.aggregation.secant:Secant",
        "what training changed, moved to the latest model; the latest of everybody corrects it",
    ),
    "scaffold": (
        "safa.aggregation.scaffold:Scaffold",
        "the mean of updates whose gradients are corrected by control variates (SCAFFOLD)",
    ),
    "median": ("safa.aggregation.robust:CoordinateMedian", "the median of each coordinate"),
    "trimmed_mean": ("safa.aggregation.robust:TrimmedMean", "the mean of each coordinate without its extremes"),
    "krum": (
        "safa.aggregation.robust:MultiKrum",
        "the mean of the updates that are closest to each other (multi-Krum)",
    ),
    "geometric_median": (
        "safa.aggregation.robust:GeometricMedian",
        "the point whose distances to the updates sum to the least",
    ),
}
_OPTIMISERS: dict[str, tuple[str, str]] = {
    "momentum": ("safa.aggregation.optimisers:Momentum", "the change of the global model with momentum (FedAvgM)"),
    "adagrad": ("safa.aggregation.optimisers:Adagrad", "Adagrad on the change of the global model (FedAdagrad)"),
    "adam": ("safa.aggregation.optimisers:Adam", "Adam on the change of the global model (FedAdam)"),
    "yogi": ("safa.aggregation.optimisers:Yogi", "Yogi on the change of the global model (FedYogi)"),
}
"""By name: where the class is, as module:Class, and what it does, in a line."""


def available() -> dict[str, str]:
    """Every aggregator there is, by name, with a line on what it does; the package's own first."""
    own = {name: summary for name, (_, summary) in _AGGREGATORS.items()}
    return own | {name: _first_line(_loaded(point)) for name, point in _foreign().items()}


def optimisers() -> dict[str, str]:
    """Every server optimiser there is, by name, with a line on what it does."""
    return {name: summary for name, (_, summary) in _OPTIMISERS.items()}


def find(name: str) -> type[Aggregator]:
    """The aggregator of that name."""
    if name in _AGGREGATORS:
        return _load(_AGGREGATORS[name][0])
    foreign = _foreign()
    if name not in foreign:
        known = [*_AGGREGATORS, *foreign]
        raise SafaError(f"there is no aggregator {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return _loaded(foreign[name])


def find_optimiser(name: str) -> type[Aggregator]:
    """The server optimiser of that name; one that is not in the list is named as module:Class of this package."""
    if name.startswith(_OF_THIS_PACKAGE) and ":" in name:
        return _load(name)
    if name not in _OPTIMISERS:
        close = did_you_mean(name, _OPTIMISERS)
        raise SafaError(f"there is no server optimiser {name!r}{close}; there are {', '.join(_OPTIMISERS)}")
    return _load(_OPTIMISERS[name][0])


@functools.cache
def parameters(cls: type[Aggregator]) -> dict[str, inspect.Parameter]:
    """The settings that an aggregator or an optimiser takes, by name."""
    return {
        name: parameter
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def is_own(cls: type[Aggregator]) -> bool:
    """Whether a class is one of this package."""
    return cls.__module__.partition(".")[0] == "safa"


@functools.cache
def shared(cls: type[Aggregator]) -> frozenset[str]:
    """The parameters that are filled from the run's settings of the same name."""
    bases = (base for base in cls.__mro__ if issubclass(base, Aggregator) and is_own(base))
    inherited = {name for base in bases for name in parameters(base)}
    return frozenset(name for name in parameters(cls) if name in inherited or name in cls.run_settings)


def build(name: str, settings: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Aggregator:
    """An aggregator of that name.

    It is given the run's `settings` that it shares (see `shared`), and `options`, which are its own, by the names of
    its parameters.
    """
    cls = find(name)
    given = _given(name, cls, settings, options or {})
    if is_own(cls):
        _check_numbers(cls, options or {})
    try:
        return cls(**given)
    except (TypeError, ValueError) as wrong:
        if is_own(cls) or isinstance(wrong, SafaError):
            raise
        raise SafaError(f"{name} refuses its settings: {wrong}") from wrong


def build_optimiser(
    name: str, inner: Aggregator, settings: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> Aggregator:
    """A server optimiser of that name around the aggregator `inner`, with settings as for `build`."""
    cls: Any = find_optimiser(name)
    built: Aggregator = cls(inner, **_given(name, cls, settings, options or {}))
    return built


def check(cls: type[Aggregator], rule: Rule, *, protocol: str, several: bool, from_latest: bool = True) -> None:
    """Refuse an aggregator that makes no sense with a protocol.

    `rule` is what the protocol's weights mean, `several` whether it makes a version of several updates, and
    `from_latest` whether these may all have started from the version before.
    """
    if rule not in cls.rules:
        needed = " or ".join(_DOES[one] for one in Rule if one in cls.rules)
        raise SafaError(f"the aggregator {cls.name} needs a protocol that {needed}; {protocol} {_DOES[rule]}")
    if cls.compares and not several:
        raise SafaError(
            f"the aggregator {cls.name} compares the updates of a version with each other; "
            f"{protocol} makes every version of a single update"
        )
    if cls.corrects and not from_latest:
        raise SafaError(
            f"the aggregator {cls.name} needs a protocol that averages updates of the latest version; "
            f"{protocol} makes versions while clients are at work"
        )


_DOES = {
    Rule.CACHE: "gives every client a share of a cache",
    Rule.AVERAGE: "averages updates",
    Rule.DELTA: "adds up deltas",
    Rule.OWN: "lets every client train its own model",
}


def _given(name: str, cls: type[Aggregator], settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: settings[key] for key in shared(cls) if key in settings} | dict(options)
    known = parameters(cls)
    for key in given:
        if key not in known:
            close = did_you_mean(key, known)
            raise SafaError(f"{name} has no setting {key!r}{close}; it has {', '.join(known) or 'none'}")
    for key, parameter in known.items():
        if key not in given and parameter.default is inspect.Parameter.empty:
            how = f"give it with --set aggregator.{key}=VALUE"
            raise SafaError(f"{name} needs its setting {key!r}, which has no default; {how}")
    return given


def _check_numbers(cls: type[Aggregator], options: Mapping[str, Any]) -> None:
    """Complain about anything else: parameters of this package's aggregators are numbers, or true or false."""
    for key, value in options.items():
        if isinstance(parameters(cls)[key].default, bool):
            if not isinstance(value, bool):
                raise SafaError(f"{key} must be true or false, not {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise SafaError(f"{key} must be a number, not {value!r}")


def _load(where: str) -> type[Aggregator]:
    module, _, attribute = where.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        cls = None
    if not (isinstance(cls, type) and issubclass(cls, Aggregator)):
        raise SafaError(f"there is no aggregator {where}")
    return cls


def _foreign() -> dict[str, EntryPoint]:
    """The aggregators of other packages, by name, not loaded yet."""
    return {point.name: point for point in entry_points(group=_GROUP) if point.name not in _AGGREGATORS}


def _loaded(point: EntryPoint) -> type[Aggregator]:
    try:
        cls = point.load()
    except (ImportError, AttributeError) as error:
        raise SafaError(f"the entry point {point.name!r} of {_GROUP} cannot be loaded: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Aggregator)):
        raise SafaError(f"the entry point {point.name!r} of {_GROUP} does not name an Aggregator: {point.value}")
    return cls


def _first_line(cls: type[Aggregator]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]
