"""Errors, split by who is to blame.

`SafaError` is the user's: a wrong setting, a file that does not fit. It carries one clear sentence, and the command
line prints that sentence and ends with exit code 2. `MisuseError` is the programmer's: a protocol was driven in an
order that makes no sense. What comes from a client is never an exception: a protocol *refuses* it by name (see
`safa.protocol.records.Refusal`), because a server must outlive its clients.
"""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["MisuseError", "SafaError", "did_you_mean"]


_SHORT = 4  # letters


class SafaError(ValueError):
    """Something the user gave cannot be used; the message says what, what was given and what is allowed."""


class MisuseError(RuntimeError):
    """A protocol was driven out of order by the code around it."""


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """What to say behind a name that there is not, if one that there is looks like it; nothing otherwise."""
    alike = 0.65 if len(str(given)) <= _SHORT else 0.75  # one wrong letter of three is more than one of six
    close = get_close_matches(str(given), list(known), n=1, cutoff=alike)
    return f" (did you mean {close[0]}?)" if close else ""
