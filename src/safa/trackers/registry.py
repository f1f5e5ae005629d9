"""Trackers by name: those of this package, and those that other packages register (see `safa.trackers.tracker`)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from safa.errors import SafaError, did_you_mean
from safa.trackers.mlflow import MLflow
from safa.trackers.tensorboard import TensorBoard
from safa.trackers.tracker import Tracker
from safa.trackers.wandb import WeightsAndBiases

__all__ = ["available", "find_trackers"]

_GROUP = "safa.trackers"
_CLASSES: tuple[type[Tracker], ...] = (TensorBoard, MLflow, WeightsAndBiases)
_OWN = {cls.name: cls for cls in _CLASSES}


def available() -> dict[str, tuple[bool, str]]:
    """Every tracker by name, the package's own first: whether it can be used, and a line on what it does."""
    found = {name: (_is_installed(name), _first_line(cls)) for name, cls in _OWN.items()}
    return found | {name: (True, _first_line(_loaded(point))) for name, point in _foreign().items()}


def find_trackers(given: str | Tracker | Sequence[str | Tracker]) -> list[Tracker]:
    """The trackers that were asked for: by name, several separated by commas, or as objects.

    One that does not exist, or whose library is not installed, is an error.
    """
    listed = [given] if isinstance(given, str | Tracker) else given
    names = [name.strip() for item in listed if isinstance(item, str) for name in item.split(",")]
    return [*map(_made, dict.fromkeys(names)), *(item for item in listed if isinstance(item, Tracker))]


def _made(name: str) -> Tracker:
    if name in _OWN:
        return _OWN[name]()
    foreign = _foreign()
    if name not in foreign:
        known = [*_OWN, *foreign]
        raise SafaError(f"there is no tracker {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return _loaded(foreign[name])()


def _foreign() -> dict[str, EntryPoint]:
    """The trackers of other packages, by name, not loaded yet."""
    return {point.name: point for point in entry_points(group=_GROUP) if point.name not in _OWN}


def _loaded(point: EntryPoint) -> type[Tracker]:
    try:
        cls = point.load()
    except (ImportError, AttributeError) as error:
        raise SafaError(f"the entry point {point.name!r} of {_GROUP} cannot be loaded: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Tracker)):
        raise SafaError(f"the entry point {point.name!r} of {_GROUP} does not name a Tracker: {point.value}")
    return cls


def _is_installed(package: str) -> bool:
    """Whether a package can be imported; a folder of that name, such as a tracker makes, is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _first_line(cls: type[Tracker]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]
