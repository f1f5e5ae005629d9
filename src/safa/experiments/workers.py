"""Processes that share out many runs between the cores."""

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
    """A pool of processes; when its block is left by an error or by Ctrl-C, nobody is waited for.

    Workers are started afresh, because a process that has used torch cannot be forked safely.
    """
    processes = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker)
    try:
        yield processes
    except BaseException:
        processes.shutdown(wait=False, cancel_futures=True)
        raise
    processes.shutdown()


def _begin_worker() -> None:
    """Ctrl-C is for the parent to see; a worker finishes what it is at, but does not outlive its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()


def _follow(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
