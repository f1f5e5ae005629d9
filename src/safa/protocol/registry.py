"""Protocols by name: those of this package, and those that other packages register.

Another package adds its own through an entry point, without touching this one:

    [project.entry-points."safa.protocols"]
    mine = "my_package:MyProtocol"

Run `safa.testing.check_protocol` on it before you trust it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from numpy.typing import ArrayLike

from safa.errors import SafaError
from safa.protocol.fedasync import FedAsync
from safa.protocol.fedavg import FedAvg
from safa.protocol.fedbuff import FedBuff
from safa.protocol.fedcs import FedCS
from safa.protocol.local import Local
from safa.protocol.machine import Protocol
from safa.protocol.safa import Safa

__all__ = ["available", "build", "find", "parameters"]

_OWN: dict[str, type[Protocol]] = {cls.name: cls for cls in (Safa, FedAvg, FedCS, Local, FedAsync, FedBuff)}


def available() -> dict[str, type[Protocol]]:
    """Every protocol there is, by name, the package's own first."""
    found = dict(_OWN)
    for point in entry_points(group="safa.protocols"):
        cls = point.load()
        if not (isinstance(cls, type) and issubclass(cls, Protocol)):
            raise SafaError(f"the entry point {point.name!r} of safa.protocols does not name a Protocol: {point.value}")
        found.setdefault(point.name, cls)
    return found


def find(name: str) -> type[Protocol]:
    """The protocol of that name."""
    if name in _OWN:
        return _OWN[name]
    known = available()
    if name not in known:
        raise SafaError(f"there is no protocol {name!r}; there are {', '.join(known)}")
    return known[name]


@functools.cache
def parameters(cls: type[Protocol]) -> dict[str, inspect.Parameter]:
    """The settings that a protocol takes, by name."""
    return {
        name: parameter
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def build(name: str, sizes: ArrayLike, settings: Mapping[str, Any]) -> Protocol:
    """A protocol of that name over clients of these sizes; it takes from `settings` what it has a parameter for."""
    cls = find(name)
    return cls(sizes, **{key: settings[key] for key in parameters(cls) if key in settings})
