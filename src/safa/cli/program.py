"""The `safa` program: its parser, its exit codes, and what Ctrl-C does.

Exit codes: 0 done, 2 bad input (one sentence on stderr says what is wrong), 130 stopped by Ctrl-C, 141 closed pipe.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import safa
from safa.cluster import disconnect
from safa.errors import SafaError, did_you_mean

__all__ = ["entry", "main"]

_COMMANDS = (
    "run", "sweep", "best", "arena", "report", "serve", "replay", "reproduce", "bias", "deploy", "bench", "protocols",
    "aggregators", "partitions", "tasks", "trackers",
)  # fmt: skip
"""Modules of `safa.cli`, each with the command of its name."""
_BAD_INPUT, _STOPPED, _CLOSED_PIPE = 2, 130, 141
_STOP_LIMIT_S = 8.0
"""How long a program that was stopped may take to end in the ordinary way."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, and say what was probably meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Take in what is known; here, everything must be."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            close = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{close}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        known = list(map(str, action.choices or ()))
        if known and value not in known:
            what = str(action.metavar or action.dest).lower()
            raise SafaError(f"there is no {what} {value!r}{did_you_mean(value, known)}; there are {', '.join(known)}")

    def error(self, message: str) -> NoReturn:
        raise SafaError(f"{message} (see {self.prog} --help)")


def _parser(named: str = "") -> argparse.ArgumentParser:
    """The parser of the command that is named, or of all: loading the others would take time."""
    parser = _Parser(prog="safa", description=safa.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"safa {safa.__version__}")
    parser.set_defaults(command=lambda _: parser.print_help())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    for name in [named] if named in _COMMANDS else _COMMANDS:
        import_module(f"safa.cli.{name}").add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        _perform(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt as stop:
        _say(f"stopped{f'; {stop}' if str(stop) else ''}")
        return _STOPPED
    except BrokenPipeError:
        return _CLOSED_PIPE
    except (SafaError, MemoryError, OSError) as error:
        _say(_sentence(error))
        return _BAD_INPUT
    return 0


def _perform(given: Sequence[str]) -> None:
    """Run a command; that its output cannot be written shows now, and not when nobody can handle it."""
    try:
        arguments = _parser(given[0] if given else "").parse_args(given)
        command: Callable[[argparse.Namespace], None] = arguments.command
        command(arguments)
    except SystemExit:  # of --help and --version
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def _say(sentence: str) -> None:
    with suppress(OSError):  # who would have read it may be gone, as tee is after Ctrl-C
        print(f"safa: {sentence}", file=sys.stderr, flush=True)


def _sentence(error: Exception) -> str:
    """An error in one sentence."""
    if isinstance(error, MemoryError):
        return f"not enough memory{f': {error}' if str(error) else ''}"
    if not isinstance(error, OSError):
        return str(error)
    verb = "write" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG) else "use"
    return f"cannot {verb} {error.filename or 'the output'}: {error.strerror or error}"


def entry() -> NoReturn:
    """The `safa` command."""
    # When the program is stopped, Python's resource tracker removes what is left; its warning is of no use to people.
    filters = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, filters))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if the shell has it ignored
        signal.signal(signal.SIGINT, _first_interrupt)
    code = main()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # has been reported, where anybody listens
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code == _STOPPED:
        # All results are on the disk already. The ordinary exit waits for worker processes; they end by themselves.
        disconnect()
        os._exit(code)
    sys.exit(code)


def _first_interrupt(*_: Any) -> None:
    """Ctrl-C ends the program in the ordinary way, within a few seconds; a second Ctrl-C ends it at once."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(_STOPPED))
    watchdog = threading.Timer(_STOP_LIMIT_S, _exit_now)
    watchdog.daemon = True
    watchdog.start()
    raise KeyboardInterrupt


def _exit_now() -> None:
    """End the program from another thread: the main thread may be inside a library that ignores Ctrl-C."""
    _say("stopped")
    os._exit(_STOPPED)
