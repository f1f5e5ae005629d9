"""Settings as fields of a dataclass: a default, a help text and what is allowed, by which a value is checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from safa.errors import SafaError, did_you_mean
from safa.runs.values import file_or_values

__all__ = ["as_toml", "checked", "option"]

_LARGEST_WHOLE = 2**63 - 1


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
    below: float | None = None,
    limit: int = _LARGEST_WHOLE,
    is_file: bool = False,
    words: tuple[str, ...] = (),
    is_list: bool = True,
    needs: Mapping[str, tuple[str | bool | int | None, ...]] | None = None,
) -> Any:
    """A setting with its default, its help text, what is allowed, and what it needs to have an effect.

    `limit` is for sizes that no machine can hold; a message names it only where it is exceeded. `needs` names other
    settings, each with the values that they must have; None means one that is not given. `words` are texts that may
    be given in place of a number. Without `is_list`, a sweep does not part the value at its commas.
    """
    metadata = {
        "help": help_text,
        "group": group,
        "flag": flag,
        "choices": choices,
        "above": above,
        "least": least,
        "most": most,
        "below": below,
        "limit": limit,
        "is_file": is_file,
        "words": words,
        "is_list": is_list,
        "needs": needs or {},
    }
    if default is None and not is_file:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def checked(name: str, value: Any, item: Any) -> Any:
    """The value in its proper type, or an error that says what was wrong, what was given and what is allowed."""
    allowed = item.metadata
    if allowed["is_file"]:
        return file_or_values(name, value)
    if allowed["choices"] is not None and value not in allowed["choices"]:
        meant = did_you_mean(value, allowed["choices"])
        raise SafaError(f"{name} must be one of {', '.join(allowed['choices'])}, not {value!r}{meant}")
    if value in allowed["words"]:
        return value
    kind = str(item.type).partition(" ")[0]
    if kind == "bool" and not isinstance(value, bool):
        raise SafaError(f"{name} must be true or false, not {value!r}")
    if kind == "str" and not isinstance(value, str):
        raise SafaError(f"{name} must be text, not {value!r}")
    return _checked_number(name, value, item) if kind in ("int", "float") else value


def _checked_number(name: str, value: Any, item: Any) -> int | float:
    whole = item.type == "int"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (whole and isinstance(value, float) and not value.is_integer()):
        words = "".join(f"{word} or " for word in item.metadata["words"])
        raise SafaError(f"{name} must be {words}a {'whole ' if whole else ''}number, not {value!r}")
    above, least, most, below, limit = (item.metadata[key] for key in ("above", "least", "most", "below", "limit"))
    if most is None and (whole or isinstance(value, int)) and value > limit:
        most = limit
    fits = (above is None or value > above) and (least is None or value >= least)
    if not (fits and (most is None or value <= most) and (below is None or value < below)):
        lower = f"above {above}" if above is not None else f"at least {least}"
        upper = f" and at most {most}" if most is not None else f" and below {below}" if below is not None else ""
        raise SafaError(f"{name} must be {lower}{upper}, not {value}")
    return int(value) if whole else float(value)


def as_toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
