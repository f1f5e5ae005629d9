"""The console of all commands: Rich's, with other rules for NO_COLOR, closed pipes and the cursor."""

from __future__ import annotations

import os
from typing import NoReturn, TextIO

from rich.console import Console

__all__ = ["Terminal"]


class Terminal(Console):
    """A console for stdout or stderr.

    With NO_COLOR it writes no escape code of any kind. A pipe that was closed is a `BrokenPipeError`. The cursor is
    never hidden, so that nothing is to be restored, in whatever way the program ends.
    """

    def __init__(self, *, stderr: bool = False, file: TextIO | None = None) -> None:
        plain = bool(os.environ.get("NO_COLOR"))
        super().__init__(stderr=stderr, file=file, highlight=False, color_system=None if plain else "auto")

    def on_broken_pipe(self) -> NoReturn:
        """Rich would end the program here, with exit code 1."""
        raise BrokenPipeError

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing: the cursor is always shown."""
        return False
