"""Text from others, made fit for a log or a terminal."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """The text on one line, with every character that is not plainly visible written as an escape.

    That is control characters (a newline would forge a line, ESC would command the terminal), characters that turn the
    direction of writing around or are invisible, and what no encoding can write.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
