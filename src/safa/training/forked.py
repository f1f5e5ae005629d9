"""Child processes that share the memory of this one as it was when they were made, so that nothing has to be sent."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

__all__ = ["Forked", "GoneError"]

_STANDARD = 2  # the last of the descriptors that every process has
_HELD_BACK = (signal.SIGINT, signal.SIGTERM)


class GoneError(Exception):
    """A child has ended in the middle of a call."""


class Forked:
    """A child that calls a function whenever it is told to. It ends with its parent, or when it is not needed."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.owner = os.getpid()
        """The process whose child it is: not this one, where this one was forked itself since then."""
        self.pipe, theirs = Pipe()
        """Has something to be read once the call has ended."""
        self.pid = _fork(partial(_serve, function, theirs))
        theirs.close()
        self._finalizer = weakref.finalize(self, _end, self.pid, self.owner)

    def end(self) -> int:
        """End it at once, and say how it ended: 0 or more by itself, less than 0 by that signal."""
        return os.waitstatus_to_exitcode(self._finalizer() or 0)

    def call(self, *arguments: Any) -> None:
        """Let it call the function; that it is gone is found out by `wait`."""
        with contextlib.suppress(ConnectionError):
            self.pipe.send_bytes(pickle.dumps(arguments))

    def wait(self) -> None:
        """Wait for the end of the call, and raise the error that it ended with."""
        try:
            answer = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise GoneError from None
        error = pickle.loads(answer)
        if error is not None:
            raise error


def _fork(run: Callable[[], None]) -> int:
    """The number of a child that does this and nothing else."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()  # or the child has in its buffer what is in ours
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)  # no handler of ours may be called in the child
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
            pid = os.fork()
        if not pid:
            _live(run, mask)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _live(run: Callable[[], None], mask: set[Any]) -> NoReturn:
    """What a child does. Ctrl-C is for its parent, whose exit handlers and garbage are none of its business."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gc.freeze()
        run()
    finally:
        os._exit(0)


def _serve(function: Callable[..., None], pipe: Connection) -> None:
    """Call the function until the parent is gone."""
    _close_all_but(pipe.fileno())
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            arguments = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(_error_of(function, arguments)))


def _close_all_but(descriptor: int) -> None:
    """Close what the parent has open: its locks and sockets are to end with it, and so are the pipes of others."""
    for name in os.listdir("/proc/self/fd"):
        if _STANDARD < int(name) != descriptor:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _error_of(function: Callable[..., None], arguments: tuple[Any, ...]) -> BaseException | None:
    """The error that a call ends with, as one of the same kind that can be sent."""
    try:
        function(*arguments)
    except BaseException as error:
        error.add_note(f"In a child process:\n{''.join(traceback.format_exception(error))}")
        return error if _can_be_sent(error) else RuntimeError(f"{type(error).__name__}: {error}")
    return None


def _can_be_sent(error: BaseException) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


def _end(pid: int, owner: int) -> int:
    if os.getpid() == owner:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
    return 0
