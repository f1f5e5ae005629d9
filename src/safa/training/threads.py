"""How many threads torch computes with, and work that is done side by side by threads of one torch thread each.

The order of a sum depends on the number of torch's threads, and with that the last bits of a model.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

import torch

__all__ = ["side_by_side", "torch_threads"]

Item = TypeVar("Item")
Worker = TypeVar("Worker")


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads, and with as many as before afterwards; 0 changes nothing."""
    if not count:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)  # even if it is the same: only then do libraries below torch stick to it
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(
    workers: Sequence[Worker], items: Iterable[Item], work: Callable[[Worker, Item], None], stop: Callable[[], None]
) -> None:
    """Give every item, in this order, to a worker that is free; each works in a thread, and torch with one in each.

    After an error or Ctrl-C, `stop` is called, nothing more is begun, and it is raised once every thread has ended.
    """
    left: SimpleQueue[Item] = SimpleQueue()
    for item in items:
        left.put(item)
    errors: list[BaseException] = []

    def loop(worker: Worker) -> None:
        torch.set_num_threads(1)  # a new thread of Python takes torch's default
        try:
            while not errors:
                work(worker, left.get_nowait())
        except Empty:
            pass
        except BaseException as error:
            errors.append(error)
            stop()

    threads = [Thread(target=loop, args=(worker,), name=f"safa-trainer-{k}") for k, worker in enumerate(workers)]
    with torch_threads(1):  # here, too: some libraries below torch have one number for all threads
        _run(threads, errors, stop)
    for thread in threads:
        _await_end(thread)
    if errors:
        raise errors[0]


def _run(threads: Sequence[Thread], errors: list[BaseException], stop: Callable[[], None]) -> None:
    """Run threads to their end; Ctrl-C becomes an error among theirs."""
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:
        errors.insert(0, error)
        stop()
        for thread in threads:
            if thread.is_alive():
                thread.join()


def _await_end(thread: Thread) -> None:
    """Wait until a joined thread is gone for the system, too: until then it holds locks of libraries below torch.

    A process that is forked at that moment would wait for them forever.
    """
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(1e-5)
