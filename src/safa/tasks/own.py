"""Bring your own: a problem by the name of a module and an attribute."""

from __future__ import annotations

import inspect
from typing import Any

from safa.errors import SafaError
from safa.tasks.problem import Problem
from safa.tasks.references import is_reference, load_reference

__all__ = ["find_problem", "make_problem"]


def find_problem(reference: str) -> Problem:
    """The problem that `package.module:attribute` names: a `Problem`, or a callable that takes nothing and makes one.

    The module may lie in the current folder.
    """
    if not is_reference(reference):
        raise SafaError(f"a task of your own is written package.module:attribute, not {reference!r}")
    return make_problem(load_reference(reference), reference)


def make_problem(found: Any, reference: str) -> Problem:
    """The problem itself, whether that is what was found or a function that makes it; errors call it `reference`."""
    if isinstance(found, Problem):
        return found
    if not callable(found) or not _takes_nothing(found):
        kind = type(found).__name__
        raise SafaError(f"{reference} must be a Problem or a callable that takes nothing and makes one, not a {kind}")
    try:
        made = found()
    except SafaError:
        raise
    except Exception as error:
        raise SafaError(f"{reference} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, Problem):
        raise SafaError(f"{reference} must make a Problem, not a {type(made).__name__}")
    return made


def _takes_nothing(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # some built-in functions do not say what they take
        pass
    return True
