"""Partitions by name: those of this package, and those that other packages register.

Another package adds its own through an entry point, without touching this one:

    [project.entry-points."safa.partitions"]
    mine = "my_package:my_partition"

It names a function as `safa.tasks.dealing` describes it. What it returns is checked: each sample at most once, and
nobody without.
"""

from __future__ import annotations

import inspect
from importlib.metadata import EntryPoint, entry_points

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError, did_you_mean
from safa.tasks.dealing import (
    PARAMETERS,
    Partition,
    Samples,
    checked_parts,
    column,
    contiguous,
    dirichlet,
    iid,
    natural,
    quantity,
    rare,
    shards,
)

__all__ = ["available", "check_partition", "partition", "sizes_decided"]

_GROUP = "safa.partitions"
_OWN: dict[str, Partition] = {
    "contiguous": contiguous,
    "iid": iid,
    "dirichlet": dirichlet,
    "quantity": quantity,
    "shards": shards,
    "rare": rare,
    "column": column,
    "natural": natural,
}


def available() -> dict[str, str]:
    """Every partition there is, as it is written, with a line on what it does; the package's own first."""
    everything = _OWN | {name: _loaded(point) for name, point in _foreign().items()}
    return {_form(name, function): _first_line(function) for name, function in everything.items()}


def check_partition(kind: str) -> None:
    """Refuse a kind of partition that does not exist, or that is written with wrong parameters."""
    function, given = _parsed(kind)
    if function in _OWN.values():
        for name, text in zip(_parameters(function), given, strict=False):
            PARAMETERS[name](text)


def sizes_decided(kind: str) -> bool:
    """Whether this partition decides itself how many samples every client holds."""
    return bool(getattr(_parsed(kind)[0], "decides_sizes", False))


def partition(kind: str, samples: Samples, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """For every client the indices of its training samples."""
    function, given = _parsed(kind)
    count = len(samples.targets)
    if samples.clients > count:
        raise SafaError(f"{count} training samples cannot be dealt to {samples.clients} clients, one at least to each")
    try:
        parts = list(function(samples, rng, *given))
    except Exception as wrong:
        if function in _OWN.values() or isinstance(wrong, SafaError):
            raise
        raise SafaError(f"the partition {kind} failed: {type(wrong).__name__}: {wrong}") from wrong
    if len(parts) != samples.clients:
        raise SafaError(f"the partition {kind} made {len(parts)} parts for {samples.clients} clients")
    return checked_parts(parts, count, what="part")


def _parsed(kind: str) -> tuple[Partition, list[str]]:
    """The function that a partition names, and the texts for its parameters."""
    name, *given = str(kind).split(":")
    function = _find(name)
    parameters = _parameters(function).values()
    needed = sum(parameter.default is parameter.empty for parameter in parameters)
    if not needed <= len(given) <= len(parameters):
        raise SafaError(f"the partition {name} is written {_form(name, function)}, not {kind!r}")
    return function, given


def _find(name: str) -> Partition:
    if name in _OWN:
        return _OWN[name]
    foreign = _foreign()
    if name not in foreign:
        there = [*(_form(own, function) for own, function in _OWN.items()), *foreign]
        raise SafaError(
            f"there is no partition {name!r}{did_you_mean(name, [*_OWN, *foreign])}; there are {', '.join(there)}"
        )
    return _loaded(foreign[name])


def _foreign() -> dict[str, EntryPoint]:
    """The partitions of other packages, by name, not loaded yet."""
    return {point.name: point for point in entry_points(group=_GROUP) if point.name not in _OWN}


def _loaded(point: EntryPoint) -> Partition:
    try:
        function: Partition = point.load()
    except (ImportError, AttributeError) as error:
        raise SafaError(f"the entry point {point.name!r} of {_GROUP} cannot be loaded: {error}") from error
    if not callable(function):
        raise SafaError(f"the entry point {point.name!r} of {_GROUP} does not name a function: {point.value}")
    return function


def _parameters(function: Partition) -> dict[str, inspect.Parameter]:
    """Its parameters by name, behind the samples and the random numbers."""
    return dict(list(inspect.signature(function).parameters.items())[2:])


def _form(name: str, function: Partition) -> str:
    """How a partition is written, such as dirichlet:ALPHA; what may be left out is in brackets."""
    parts = [
        f":{parameter.name.upper()}" if parameter.default is parameter.empty else f"[:{parameter.name.upper()}]"
        for parameter in _parameters(function).values()
    ]
    return "".join([name, *parts])


def _first_line(function: Partition) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]
