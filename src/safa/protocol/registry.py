"""Protocols by name: those of this package, and those that other packages register.

Another package adds its own through an entry point, without touching this one:

    [project.entry-points."safa.protocols"]
    mine = "my_package:MyProtocol"

A protocol of this package is given the run's settings that its constructor has parameters for. One of another package
shares with the run only what it has from here: the parameters of `Protocol` and of the protocol that it is derived
from, and those that it names in `run_settings`. All others are its own, whatever they are called.

Run `safa.testing.check_protocol` on it before you trust it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from numpy.typing import ArrayLike

from safa.errors import SafaError, did_you_mean
from safa.protocol.continuous import Continuous
from safa.protocol.fedasync import FedAsync
from safa.protocol.fedavg import FedAvg
from safa.protocol.fedbuff import FedBuff
from safa.protocol.fedcompass import FedCompass
from safa.protocol.fedcs import FedCS
from safa.protocol.fedsecant import FedSecant
from safa.protocol.local import Local
from safa.protocol.machine import Protocol
from safa.protocol.records import Rule
from safa.protocol.safa import Safa
from safa.protocol.timelyfl import TimelyFL

__all__ = ["available", "build", "find", "is_own", "parameters", "shared", "takers"]

_GROUP = "safa.protocols"
_CLASSES = (Safa, FedAvg, FedCS, Local, FedAsync, FedBuff, TimelyFL, FedCompass, FedSecant)
_OWN: dict[str, type[Protocol]] = {cls.name: cls for cls in _CLASSES}
_OF_THIS_PACKAGE = (Protocol, Continuous, *_OWN.values())


def available() -> dict[str, type[Protocol]]:
    """Every protocol there is, by name, the package's own first."""
    return _OWN | {name: _loaded(point) for name, point in _foreign().items()}


def find(name: str) -> type[Protocol]:
    """The protocol of that name."""
    if name in _OWN:
        return _OWN[name]
    foreign = _foreign()
    if name not in foreign:
        known = [*_OWN, *foreign]
        raise SafaError(f"there is no protocol {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return _loaded(foreign[name])


def _foreign() -> dict[str, EntryPoint]:
    """The protocols of other packages, by name, not loaded yet."""
    return {point.name: point for point in entry_points(group=_GROUP) if point.name not in _OWN}


def _loaded(point: EntryPoint) -> type[Protocol]:
    try:
        cls = point.load()
    except (ImportError, AttributeError) as error:
        raise SafaError(f"the entry point {point.name!r} of {_GROUP} cannot be loaded: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Protocol)):
        raise SafaError(f"the entry point {point.name!r} of {_GROUP} does not name a Protocol: {point.value}")
    return cls


@functools.cache
def parameters(cls: type[Protocol]) -> dict[str, inspect.Parameter]:
    """The settings that a protocol takes, by name."""
    return {
        name: parameter
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def is_own(cls: type[Protocol]) -> bool:
    """Whether a protocol is one of this package."""
    return cls in _OWN.values()


@functools.cache
def shared(cls: type[Protocol]) -> frozenset[str]:
    """The parameters of a protocol that are filled from the run's settings of the same name."""
    inherited = {name for base in cls.__mro__ if base in _OF_THIS_PACKAGE for name in parameters(base)}
    return frozenset(name for name in parameters(cls) if name in inherited or name in cls.run_settings)


@functools.cache
def takers(name: str) -> tuple[str, ...]:
    """The protocols of this package that have a parameter of that name."""
    return tuple(own for own, cls in _OWN.items() if name in parameters(cls))


def build(
    name: str, sizes: ArrayLike, settings: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> Protocol:
    """A protocol of that name over clients of these sizes.

    It is given the run's `settings` that it shares (see `shared`), and `options`, which are its own, by the names of
    its parameters.
    """
    cls = find(name)
    given = {key: settings[key] for key in shared(cls) if key in settings} | dict(options or {})
    for key, parameter in parameters(cls).items():
        if key not in given and parameter.default is inspect.Parameter.empty:
            raise SafaError(f"{name} needs its setting {key!r}, which has no default; give it with --set {key}=VALUE")
    try:
        return _with_work(cls(sizes, **given), settings)
    except (TypeError, ValueError) as wrong:
        if is_own(cls) or isinstance(wrong, SafaError):
            raise
        raise SafaError(f"{name} refuses its settings: {wrong}") from wrong


def _with_work(protocol: Protocol, settings: Mapping[str, Any]) -> Protocol:
    """The protocol with the run's settings about partial work, which any protocol takes."""
    if settings.get("work_cap", "auto") != "auto":
        protocol.work_cap = float(settings["work_cap"])
    protocol.normalise_work = bool(settings.get("normalise_work", False))
    if protocol.normalise_work and protocol.rule is not Rule.DELTA:
        raise SafaError(f"normalise_work is for protocols that add up changes (fedbuff), not for {protocol.name}")
    if protocol.normalise_work and not protocol.asks_for_parts:
        raise SafaError(f"normalise_work has no effect with {protocol.name} where work_cap is 0: all do all their work")
    return protocol
