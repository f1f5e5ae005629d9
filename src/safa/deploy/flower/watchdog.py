"""A watchdog for apps: Flower leaves them running when a SuperLink or a SuperNode is killed."""

from __future__ import annotations

import os
import threading
import time

__all__ = ["end_with_parent"]

_LOOK_EVERY_S = 1.0


def end_with_parent() -> None:
    """End this process at once when its parent has ended; its state is on the disk by then."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)
