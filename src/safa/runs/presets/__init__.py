"""Presets: settings that go together, in a TOML file. Some come with the package, by name; others are anybody's files.

A preset holds settings of a run by name, and no tables. It is for any task, so it names none.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from safa.errors import SafaError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["names", "read", "values_of_all"]

_ENDING = ".toml"


@cache
def names() -> tuple[str, ...]:
    """The presets that come with the package."""
    found = (file.name for file in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(_ENDING) for name in found if name.endswith(_ENDING)))


def read(preset: str | Path) -> Mapping[str, Any]:
    """The settings of a preset: one that comes with the package, by name, or a file whose name ends in .toml."""
    if str(preset).endswith(_ENDING):
        return _settings(_text(Path(preset)), str(preset))
    if preset not in names():
        close = did_you_mean(preset, names())
        others = f"there is {', '.join(names())}, or give a file, FILE.toml"
        raise SafaError(f"there is no preset {str(preset)!r}{close}; {others}")
    return _own(str(preset))


def values_of_all(setting: str) -> list[Any]:
    """The values that the presets of the package give to a setting."""
    return [_own(name)[setting] for name in names() if setting in _own(name)]


@cache
def _own(name: str) -> Mapping[str, Any]:
    text = (files(__name__) / (name + _ENDING)).read_text(encoding="utf-8")
    return MappingProxyType(_settings(text, name))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SafaError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SafaError(f"cannot read {path}: it is not text") from None


def _settings(text: str, preset: str) -> dict[str, Any]:
    """The settings in a preset's text."""
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits, tables too deep
        raise SafaError(f"{preset} is not a preset: {error}") from None
    for name, value in found.items():
        if name in ("task", "format") or isinstance(value, dict):
            raise SafaError(f"{preset} is not a preset: it must hold settings alone, and no {name}")
    return found
