"""A pseudo-terminal for programs under test, and the screen that a person would see in it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.programs import started

ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n")


class Terminal:
    """A program in a pseudo-terminal of this size, and all that it has written."""

    def __init__(self, master: int, process: subprocess.Popen[str], columns: int) -> None:
        self._master, self.process, self._columns = master, process, columns
        self.text = ""
        self._bytes = b""

    def read_until(self, met: Callable[[str], object]) -> None:
        """Read until the text meets a condition; an `EOFError` if the program ends before."""
        while not met(self.text):
            self._read()

    def read_all(self) -> int:
        """Read to the end of the program, and return its exit code."""
        try:
            while True:
                self._read()
        except EOFError:
            return self.process.wait()

    def _read(self) -> None:
        try:
            found = os.read(self._master, 65536)
        except OSError:  # Linux says so when the last process has closed its end
            found = b""
        if not found:
            raise EOFError(self.text)
        self._bytes += found
        self.text = self._bytes.decode(errors="replace")

    def press(self, key: str) -> None:
        """Type a character."""
        os.write(self._master, key.encode())

    @property
    def screen(self) -> list[str]:
        """The lines that are seen now, without empty ones at the end."""
        return screen_of(self.text, self._columns)


def screen_of(text: str, columns: int) -> list[str]:
    """What a terminal so wide shows of a text: it wraps, moves up and erases lines as it is told, and knows no more."""
    lines, row, column, at = [""], 0, 0, 0
    for found in [*ESCAPE.finditer(text), None]:
        for character in text[at : found.start() if found else None]:
            if column == columns:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
        if found is None:
            break
        at = found.end()
        if found[0] == "\r":
            column = 0
        elif found[0] == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif found[2] == "A":
            row -= int(found[1] or 1)
        elif found[2] == "K":
            lines[row] = ""
        else:
            assert found[2] == "m", f"{found[0]!r} is not a style"
    return "\n".join(line.rstrip() for line in lines).rstrip("\n").split("\n")


@contextmanager
def in_terminal(command: Sequence[str], *, columns: int, rows: int = 24, **environment: str) -> Iterator[Terminal]:
    """A program with a pseudo-terminal as its stdin, stdout and stderr."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    modes: list[Any] = termios.tcgetattr(slave)
    modes[3] |= termios.NOFLSH  # at Ctrl-C, the kernel would drop what has not been read, and a busy machine reads late
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    kept = {name: value for name, value in os.environ.items() if name not in _OVERRIDES}
    variables = {**kept, "TERM": "xterm-256color", **environment}
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
    try:
        with started([sys.executable, "-c", _CONTROLLING, *command], env=variables, **streams) as process:
            os.close(slave)
            yield Terminal(master, process, columns)
    finally:
        os.close(master)


_OVERRIDES = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
_CONTROLLING = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches the program
os.execv(sys.argv[1], sys.argv[1:])
"""
