"""What the operator asks of a running server: names of clients in files of its folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from safa.deploy.exchange.files import EXPEL, UNBLOCK

__all__ = ["OperatorRequests"]

_APPLYING = "expel.applying.json"  # the content of EXPEL, until a checkpoint holds it
_log = logging.getLogger("safa.deploy")


class OperatorRequests:
    """Clients to be expelled or unblocked.

    A file is removed once a checkpoint holds what it asks for, so that nothing is lost.
    """

    def __init__(
        self,
        folder: Path,
        *,
        expel: Callable[[str], None],
        unblock: Callable[[str], None],
        checkpoint: Callable[[], None],
    ) -> None:
        self._expel, self._applying, self._unblock = (folder / name for name in (EXPEL, _APPLYING, UNBLOCK))
        self._on_expel, self._on_unblock, self._checkpoint = expel, unblock, checkpoint

    def apply(self) -> None:
        """Do what is asked for."""
        if self._applying.exists():  # a server was killed at this point
            self._apply(self._applying, self._on_expel)
        if self._expel.exists():
            self._expel.replace(self._applying)  # another may be written from now on
            self._apply(self._applying, self._on_expel)
        if self._unblock.exists():
            self._apply(self._unblock, self._on_unblock)

    def _apply(self, file: Path, act: Callable[[str], None]) -> None:
        """Call `act` with every name in a file."""
        try:
            names = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            names = None
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            for name in names:
                act(name)
        else:
            _log.warning("%s is not a list of names; ignored", file.name)
        self._checkpoint()
        file.unlink()
