"""A pool of worker processes for many runs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import connection

__all__ = ["pool"]


@contextmanager
def pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes; an error or Ctrl-C in its block ends it without waiting for the workers.

    Workers are new processes, because a process that has used torch cannot be forked safely.
    """
    processes = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker)
    try:
        yield processes
    except BaseException:
        processes.shutdown(wait=False, cancel_futures=True)
        raise
    processes.shutdown()


def _begin_worker() -> None:
    """A worker ignores Ctrl-C, which its parent handles, and ends when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()


def _follow(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
