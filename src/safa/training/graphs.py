"""Gradients on a GPU as a recorded program, which is started as a whole instead of kernel by kernel.

A step of many small models is hundreds of kernels, each shorter than the time that Python takes to start it. A CUDA
graph records them once and starts them together. It works on fixed places in memory and for fixed shapes: models and
mini-batches are copied to these places, and the number of clients is rounded up to one of few sizes.

With `compile`, the operations are put together by torch's compiler before they are recorded. That takes seconds to a
minute for every size, less when it has been done before: torch keeps what it has compiled on the disk.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from safa.training.kernels import General, Kernel, Step

__all__ = ["Recorded", "rounded_up"]

_log = logging.getLogger(__name__)

Program = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def rounded_up(count: int) -> int:
    """The next of few sizes, eight between a power of two and the next."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit


@dataclass(frozen=True, eq=False)
class _Recording:
    """A program for one size and shape, and where it finds its mini-batches."""

    graph: torch.cuda.CUDAGraph
    step: Step

    def replay(self, step: Step) -> None:
        """Run it on other mini-batches; what is left over of the size is padding."""
        count = len(step[0])
        for place, values in zip(self.step, step, strict=True):
            place[:count].copy_(values)
        self.step[2][count:].zero_()
        self.graph.replay()


class Recorded(Kernel):
    """The gradients of another kernel, recorded for every size and shape when they are first asked for."""

    def __init__(self, kernel: General, capacity: int, *, compile_: bool = False) -> None:
        """`capacity` is the most clients that are trained at a time."""
        self._kernel, self._capacity, self._compile = kernel, rounded_up(capacity), compile_
        self.needs_whole_batches = kernel.needs_whole_batches
        self._rows = self._gradients = torch.empty(0)
        self._recordings: dict[tuple[object, ...], _Recording] = {}
        self._pool: Any = None
        self._largest = 0
        self._can_record = True

    def bytes_per_sample(self, inputs: Tensor) -> int:
        """As much as the kernel that is recorded."""
        return self._kernel.bytes_per_sample(inputs)

    def hold(self, rows: Tensor) -> Tensor:
        """The rows where recorded programs expect them; what was there is lost."""
        if not len(self._rows):
            self._rows = rows.new_zeros(self._capacity, rows.shape[1])
            self._gradients = torch.zeros_like(self._rows)
        place = self._rows[: len(rows)]
        return place if place.data_ptr() == rows.data_ptr() else place.copy_(rows)

    def gradients(self, rows: Tensor, step: Step) -> Tensor:
        """The gradients, which the next call overwrites."""
        if not self._can_record:
            return self._kernel.gradients(rows, step)
        held = self.hold(rows)
        recording = self._recording(rounded_up(len(rows)), step)
        if recording is None:
            return self._kernel.gradients(rows, step)
        recording.replay(step)
        if held.data_ptr() != rows.data_ptr():
            trained = self._kernel.layout.trained
            rows[:, trained:] = held[:, trained:]
        return self._gradients[: len(rows)]

    def _recording(self, size: int, step: Step) -> _Recording | None:
        """The program for so many clients; None where it cannot be recorded."""
        key = (size, *((part.shape[1:], part.dtype) for part in step))
        if key not in self._recordings:
            try:
                with torch.cuda.stream(torch.cuda.current_stream()):  # which a failure would leave another
                    self._recordings[key] = self._record(size, step)
            except RuntimeError as wrong:
                self._can_record = False
                torch.cuda.synchronize()
                _log.warning("steps are not recorded as a CUDA graph: %s", str(wrong).splitlines()[0][:200])
        return self._recordings.get(key)

    def _record(self, size: int, step: Step) -> _Recording:
        """Record the program for so many clients, with mini-batches like these."""
        x, y, weight = (part.new_zeros(size, *part.shape[1:]) for part in step)
        for place, values in zip((x, y), step, strict=False):
            place[: len(values)].copy_(values)
        arguments = self._rows[:size], x, y, weight, self._gradients[:size]
        buffers = self._rows[:size, self._kernel.layout.trained :].clone()
        program = self._program(arguments)
        stream = torch.cuda.Stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            program(*arguments)  # what is set up by a first call cannot be recorded
        torch.cuda.current_stream(x.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool):
            program(*arguments)
        self._pool = self._pool or graph.pool()
        self._rows[:size, self._kernel.layout.trained :] = buffers
        return _Recording(graph, (x, y, weight))

    def _program(self, arguments: tuple[Tensor, ...]) -> Program:
        """The gradients as a function of tensors, compiled where that is asked for and the mini-batch is a full one."""
        width = arguments[1].shape[1]
        self._largest = max(self._largest, width)
        if not self._compile or width < self._largest:
            return self._kernel.write_gradients
        start = time.perf_counter()
        self._kernel.is_compiled = True
        try:
            found = _compiled(self._kernel.write_gradients, arguments)
        except Exception as wrong:
            self._compile = self._kernel.is_compiled = False
            _log.warning("the model could not be compiled and is trained without: %s", str(wrong).splitlines()[0][:200])
            return self._kernel.write_gradients
        _log.warning("compiled for %d clients in %.1f s", len(arguments[0]), time.perf_counter() - start)
        return found


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from freeing what is in cycles: a recording fails when the memory of another one is freed in it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compiled(program: Program, arguments: tuple[Tensor, ...]) -> Program:
    """A program compiled for arguments of these shapes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    kept = arguments[0].clone()
    compiled: Program = torch.compile(make_fx(lambda *given: program(*given))(*arguments))
    compiled(*arguments)
    arguments[0].copy_(kept)
    return compiled
