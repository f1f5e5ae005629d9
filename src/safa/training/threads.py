"""How many threads torch computes with, and work that is done side by side by threads of one torch thread each.

The order of a sum depends on the number of torch's threads, and with that the last bits of a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
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
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def one(item: Item) -> None:
        worker = free.get()
        try:
            work(worker, item)
        finally:
            free.put(worker)

    # A new thread of Python takes torch's default, and some libraries below torch have one number for all threads.
    with torch_threads(1), ThreadPoolExecutor(len(workers), "safa-trainer", torch.set_num_threads, (1,)) as pool:
        try:
            for _ in pool.map(one, items):
                pass
        except BaseException:
            stop()
            raise
