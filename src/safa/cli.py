"""The command line: commands, progress, exit codes.

Exit codes: 0 done, 2 something that was given cannot be used (one sentence on stderr says what), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import safa
from safa.analysis import METRICS
from safa.errors import SafaError
from safa.experiment import CLIENT_METRICS, Experiment, play, take_up
from safa.paper import PRESETS
from safa.protocol import available
from safa.runs import RunWriter, new_folder, plain
from safa.settings import Settings
from safa.sweep import combinations, run_sweep
from safa.tasks import TASKS

__all__ = ["entry", "main"]

_PROGRESS_AFTER_S = 2.0
_MOST_ROWS = 40
_TABLE_WIDTH = 110
_T = TypeVar("_T")


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one sentence."""

    def error(self, message: str) -> NoReturn:
        raise SafaError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        arguments = _parser().parse_args(argv)
        command: Callable[[argparse.Namespace], None] = arguments.command
        command(arguments)
    except SafaError as problem:
        print(f"safa: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"safa: stopped{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def entry() -> NoReturn:
    """The `safa` command."""
    sys.exit(main())


# -- options ---------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="safa", description=safa.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"safa {safa.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    run = commands.add_parser(
        "run",
        help="simulate one run",
        usage="safa run TASK [options]",
        description="Simulate one run of a protocol on a fleet.",
        allow_abbrev=False,
    )
    run.add_argument("task", metavar="TASK", nargs="?", help=f"one of {', '.join(TASKS)}; not needed with --config")
    _add_settings(run, lists=False)
    run.add_argument("--config", metavar="FILE", help="settings from a config.toml; options given here go before it")
    run.add_argument("--resume", metavar="DIR", help="go on with the run in this folder where it was stopped")
    run.add_argument("--json", action="store_true", help="print settings and metrics as one JSON object, nothing else")
    run.add_argument(
        "--out",
        metavar="DIR",
        help="write the run into this folder (default: a new one in runs/ for a run that trains, else none)",
    )
    run.set_defaults(command=_run)

    sweep = commands.add_parser(
        "sweep",
        help="simulate every combination of settings",
        usage="safa sweep TASK[,TASK...] [options]",
        description="Simulate every combination of settings: any option takes a list, separated by commas.",
        allow_abbrev=False,
    )
    sweep.add_argument("task", metavar="TASK", help=f"one or more of {', '.join(TASKS)}")
    _add_settings(sweep, lists=True)
    sweep.add_argument("--out", metavar="DIR", help="write DIR/results.csv (default: a new folder in runs/)")
    sweep.add_argument(
        "--workers", metavar="N", type=int, default=os.cpu_count() or 1, help="processes to use (default: all cores)"
    )
    sweep.set_defaults(command=_sweep)

    protocols = commands.add_parser("protocols", help="list the protocols", allow_abbrev=False)
    protocols.set_defaults(command=_protocols)
    tasks = commands.add_parser("tasks", help="list the tasks and their settings", allow_abbrev=False)
    tasks.set_defaults(command=_tasks)
    return parser


def _add_settings(parser: argparse.ArgumentParser, *, lists: bool) -> None:
    """An option for every setting; one that was not given leaves no trace, so that defaults stay in one place."""
    groups: dict[str, Any] = {}
    for item in fields(Settings):
        if not item.metadata:
            continue
        title = item.metadata["group"]
        group = groups.setdefault(title, parser.add_argument_group(title))
        flag = item.metadata["flag"] or f"--{item.name.replace('_', '-')}"
        default = "the task's" if item.default is MISSING else item.default
        default = {True: "yes", False: "no"}.get(default, default) if isinstance(default, bool) else default
        group.add_argument(
            flag,
            dest=item.name,
            type=(lambda text: text.split(",")) if lists else (lambda text: [text]),
            default=argparse.SUPPRESS,
            metavar="FILE" if item.metadata["is_file"] else _metavar(item.metadata["choices"], str(item.type)),
            help=item.metadata["help"] + ("" if default is None else f" (default: {default})"),
        )
    parser.add_argument("--preset", choices=list(PRESETS), help="settings of the paper's experiments")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="a setting of a protocol from another package"
    )
    parser.add_argument("--no-train", action="store_true", help="simulate the rounds only, train no model")
    parser.add_argument("--force", action="store_true", help="replace an output folder that already holds a run")
    parser.add_argument("--quiet", action="store_true", help="no progress and no table")


def _metavar(choices: tuple[str, ...] | None, kind: str) -> str:
    return "|".join(choices) if choices else {"int": "N", "float": "X", "bool": "yes|no"}.get(kind, "NAME")


def _convert(text: str, name: str, kind: str) -> Any:
    """The value of a setting from its text; what is allowed is checked by `Settings`."""
    if kind == "bool":
        words = {"yes": True, "true": True, "no": False, "false": False}
        if text.lower() not in words:
            raise SafaError(f"{name} must be yes or no, not {text!r}")
        return words[text.lower()]
    if kind not in ("int", "float"):
        return text
    try:
        return int(text) if kind == "int" and text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise SafaError(f"{name} must be a number, not {text!r}") from None


def _given(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """The settings that were given on the command line, each as a list of values."""
    return {
        item.name: [_convert(part.strip(), item.name, str(item.type)) for part in getattr(arguments, item.name)]
        for item in fields(Settings)
        if item.metadata and hasattr(arguments, item.name)
    } | ({"train": [False]} if arguments.no_train else {})


def _foreign(arguments: argparse.Namespace) -> dict[str, Any]:
    """What --set gives, each value a number, true, false or text."""
    options = {}
    for text in arguments.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise SafaError(f"--set needs NAME=VALUE, not {text!r}")
        try:
            options[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            options[name] = value
    return options


# -- commands --------------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> None:
    start = time.perf_counter()
    if arguments.resume:
        experiment, writer = _resumed(arguments)
    else:
        experiment, writer = _begun(arguments)
    settings = experiment.settings
    if settings.train and settings.keep_best and not arguments.quiet:
        print("safa: keep_best peeks at the test set; use it for reproduction only", file=sys.stderr)
    finished = experiment.finished
    try:
        rounds = play(experiment, writer)
        for record in _with_progress(rounds, settings.rounds, "rounds", quiet=arguments.quiet, done=finished):
            finished = record.round
    except KeyboardInterrupt:
        kept = f"{finished} of {settings.rounds} rounds are finished"
        later = f" and can be read in {writer.folder}; go on with --resume {writer.folder}" if writer else ""
        raise KeyboardInterrupt(kept + later) from None
    result = experiment.summary() | {"wall_time_s": time.perf_counter() - start}
    if arguments.json:
        print(json.dumps({"settings": plain(settings.values()), "metrics": plain(result)}))
    elif not arguments.quiet:
        _print_summary(settings, result, writer)


def _begun(arguments: argparse.Namespace) -> tuple[Experiment, RunWriter | None]:
    """A new run, from the command line and a config file."""
    config = Settings.read_toml(arguments.config) if arguments.config else {}
    named = config.pop("task", None)
    task = arguments.task or named
    if task is None:
        raise SafaError(f"name a task, one of {', '.join(TASKS)}")
    options = dict(config.pop("protocol_options", {})) | _foreign(arguments)
    given = {name: value for name, (value,) in _given(arguments).items()}
    settings = Settings.of(task, base=config, preset=arguments.preset, **given, protocol_options=options)
    experiment = Experiment(settings)
    folder = Path(arguments.out) if arguments.out else None
    if folder is None and settings.train and not arguments.json:
        folder = _numbered(f"{settings.task}-{settings.protocol}")
    return experiment, RunWriter.begin(folder, settings, force=arguments.force) if folder else None


def _resumed(arguments: argparse.Namespace) -> tuple[Experiment, RunWriter | None]:
    """A run that was stopped; all of its settings are in its folder."""
    if arguments.task or arguments.config or arguments.out or _given(arguments):
        raise SafaError("--resume takes everything from its folder; give no task and no settings with it")
    return take_up(arguments.resume)


def _sweep(arguments: argparse.Namespace) -> None:
    if arguments.workers < 1:
        raise SafaError(f"workers must be at least 1, not {arguments.workers}")
    given: dict[str, Any] = _given(arguments)
    options = _foreign(arguments)
    if options:
        given["protocol_options"] = [options]
    tasks = [name.strip() for name in arguments.task.split(",")]
    runs = combinations(tasks, given, preset=arguments.preset)
    folder = Path(arguments.out) if arguments.out else _numbered(f"sweep-{'-'.join(tasks)}")
    table = new_folder(folder, force=arguments.force) / "results.csv"
    rows: list[dict[str, Any]] = []
    try:
        results = run_sweep(runs, table, workers=min(arguments.workers, len(runs)))
        rows.extend(_with_progress(results, len(runs), "runs", quiet=arguments.quiet))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(rows)} of {len(runs)} runs are finished and can be read in {table}") from None
    if not arguments.quiet:
        _print_rows(rows, [name for name, values in given.items() if len(values) > 1], len(tasks) > 1)
        Console(stderr=True).print(f"{len(rows)} runs in {table}", highlight=False, soft_wrap=True)


def _numbered(name: str) -> Path:
    """The first folder runs/name-1, runs/name-2, ... that does not exist."""
    plain_name = name.replace(":", ".")
    return next(path for n in itertools.count(1) if not (path := Path("runs", f"{plain_name}-{n}")).exists())


def _protocols(_: argparse.Namespace) -> None:
    table = Table("name", "what it does", box=None, pad_edge=False)
    for name, cls in available().items():
        table.add_row(name, (cls.__doc__ or "").strip().splitlines()[0] if cls.__doc__ else "")
    Console().print(table)


def _tasks(_: argparse.Namespace) -> None:
    console = Console(highlight=False)
    for task in TASKS.values():
        console.print(f"[bold]{task.name}[/bold]  {task.about}")
        console.print(
            f"  {task.samples:,} samples, {task.clients} clients, {task.rounds} rounds, {task.epochs} epochs, "
            f"batches of {task.batch_size}, learning rate {task.lr:g}, at most {task.round_limit_s:g} s a round"
        )


# -- what a person sees ----------------------------------------------------------------------------------------------


def _with_progress(items: Iterable[_T], total: int, unit: str, *, quiet: bool, done: int = 0) -> Iterator[_T]:
    """The items, `done` of which came earlier, with a progress bar on stderr if they take more than two seconds."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    start = time.perf_counter()
    job = bar.add_task(unit, total=total, completed=done)
    try:
        for number, item in enumerate(items, start=done):
            if not quiet and not bar.live.is_started and time.perf_counter() - start > _PROGRESS_AFTER_S:
                bar.start()
            bar.update(job, completed=number)
            yield item
    finally:
        if bar.live.is_started:
            bar.stop()


def _print_summary(settings: Settings, values: dict[str, Any], writer: RunWriter | None) -> None:
    """What was run, in words, and what came out."""
    console = Console(highlight=False)
    console.print(
        f"[bold]{settings.protocol}[/bold] on {settings.task}: {settings.clients:,} clients, {settings.rounds} rounds, "
        f"C = {settings.fraction:g}, crash rate {settings.crash_rate:g}, tau = {settings.lag_tolerance}, "
        f"{settings.clock} clock, seed {settings.seed}.",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, meaning in (METRICS | CLIENT_METRICS).items():
        if values.get(name) is not None and (settings.clock == "paper" or not name.endswith("_as_printed")):
            table.add_row(name, _number(values[name]), meaning)
    console.print(table)
    hours = values["virtual_time_s"] / 3600
    learnt = ""
    if values["last_accuracy"] is not None:
        learnt = f" The model has an accuracy of {values['last_accuracy']:.3f} on data that it was not trained on."
    console.print(
        f"Such devices would have taken {hours:,.1f} hours; here it took {values['wall_time_s']:.1f} s.{learnt}",
        soft_wrap=True,
    )
    console.print(
        f"Written to {writer.folder}" if writer else "Nothing was written; --out DIR keeps the run.", soft_wrap=True
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _print_rows(rows: Sequence[dict[str, Any]], varied: Sequence[str], several_tasks: bool) -> None:
    """The runs of a sweep as a table: what was varied, and the metrics that matter most."""
    names = [*(["task"] if several_tasks else []), *varied]
    shown = {
        "round_length_s": "round, s",
        "virtual_time_s": "total, s",
        "sync_ratio": "SR",
        "effective_update_ratio": "EUR",
        "futility": "futility",
        "starved": "starved",
        "fairness": "fairness",
        "best_accuracy": "accuracy",
    }
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, style="cyan")
    shown = {name: title for name, title in shown.items() if rows and rows[0][name] is not None}
    for title in shown.values():
        table.add_column(title, justify="right")
    for row in rows[:_MOST_ROWS]:
        table.add_row(*(str(row[name]) for name in names), *(_number(row[name]) for name in shown))
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)  # a figure that is cut off is worse than a line that wraps
    console.print(table)
    if len(rows) > _MOST_ROWS:
        console.print(f"... and {len(rows) - _MOST_ROWS} more", highlight=False)
