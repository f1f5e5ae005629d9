"""Python objects by name, as `package.module:attribute`: how a problem or a function is named in settings."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from safa.errors import SafaError

__all__ = ["is_reference", "load_reference", "reference_of"]

_given: dict[str, Any] = {}
"""Objects that were given in Python, by name: these need not be imported."""


def is_reference(text: str) -> bool:
    """Whether a text has the form `package.module:attribute`; the attribute may be one of a class."""
    module, colon, attribute = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def load_reference(text: str) -> Any:
    """The object of that name. The module may lie in the current folder."""
    if text in _given:
        return _given[text]
    if not is_reference(text):
        raise SafaError(f"something of your own is named package.module:attribute, not {text!r}")
    module_name, _, attribute = text.partition(":")
    found: Any = _module(module_name)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise SafaError(f"the module {module_name} has no attribute {attribute!r}")
        found = getattr(found, name)
    return found


def reference_of(thing: Any) -> str:
    """The name of a function or class by which another process can import it."""
    name = getattr(thing, "__qualname__", "")
    module = getattr(thing, "__module__", None) or ""
    if not name or "<" in name:
        what = "a lambda or a local function" if name else f"a {type(thing).__name__}"
        raise SafaError(f"{what} has no name that can be imported; give a function defined at the top of a module")
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", "")).stem
    text = f"{module}:{name}"
    if not is_reference(text):
        raise SafaError(f"{name} cannot be imported by another process; define it in a module of its own")
    _given[text] = thing
    return text


def _module(name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            raise SafaError(f"there is no module {name}, neither in the current folder nor installed") from None
        raise SafaError(f"cannot import {name}: {type(error).__name__}: {error}") from error
