"""The command line: commands, progress, exit codes.

Exit codes: 0 done, 2 something that was given cannot be used (one sentence on stderr says what), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import safa
from safa.analysis import METRICS
from safa.errors import SafaError
from safa.experiment import CLIENT_METRICS, Experiment, find_device, play, take_up
from safa.paper import PRESETS, grid
from safa.protocol import available
from safa.runs import RunWriter, load_run, new_folder, plain
from safa.settings import Settings
from safa.simulation import make_fleet
from safa.sweep import combinations, run_sweep
from safa.tasks import TASKS, find_task

if TYPE_CHECKING:
    from safa.paper.collect import Results
    from safa.paper.grid import Job
    from safa.paper.reproduction import Reproduction

__all__ = ["entry", "main"]

_STOPPED = 130
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
        return _STOPPED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def entry() -> NoReturn:
    """The `safa` command."""
    # When it is stopped, Python's own helper process clears up behind it; that it had to is nothing to tell people.
    filters = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, filters))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell wants it ignored
        signal.signal(signal.SIGINT, _first_interrupt)
    code = main()
    if code == _STOPPED:
        # What is kept is on the disk already. Leaving in the ordinary way would wait for workers; so they follow.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _first_interrupt(*_: Any) -> None:
    """Ctrl-C stops in good order; a second one, at any moment, at once."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(_STOPPED))
    raise KeyboardInterrupt


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

    report = commands.add_parser(
        "report",
        help="make a page of a run, a sweep or a reproduction",
        description="Write DIR/report.html: one file that opens in any browser, without a network.",
        allow_abbrev=False,
    )
    report.add_argument("folder", metavar="DIR", help="the folder of a run, a sweep or a reproduction")
    report.set_defaults(command=_report)

    _add_reproduce(commands)
    _add_bias(commands)

    protocols = commands.add_parser("protocols", help="list the protocols", allow_abbrev=False)
    protocols.set_defaults(command=_protocols)
    tasks = commands.add_parser("tasks", help="list the tasks and their settings", allow_abbrev=False)
    tasks.set_defaults(command=_tasks)
    return parser


def _add_reproduce(commands: Any) -> None:
    reproduce = commands.add_parser(
        "reproduce",
        help="reproduce the paper's tables and figures, and say what holds",
        description="Run the experiments of the SAFA paper as it did them and with its accounting put right, and write "
        "tables, figures and a page of both. Goes on where it was stopped: give the same folder again.",
        allow_abbrev=False,
    )
    reproduce.add_argument(
        "--task", default="all", metavar=f"{'|'.join(grid.TASKS)}|all", help="which task, or several (default: all)"
    )
    reproduce.add_argument(
        "--what",
        default="all",
        metavar=f"{'|'.join(grid.PARTS)}|all",
        help="timing: Tables IV-IX, XI, XIII, XV; accuracy: Tables X, XII, XIV and Figures 6-8; lag: Figures 3 and 4; "
        "bias: Figure 5; or several (default: all)",
    )
    reproduce.add_argument(
        "--seeds", type=int, default=5, metavar="N", help="worlds in which models are trained (default: 5)"
    )
    reproduce.add_argument(
        "--worlds",
        type=int,
        default=30,
        metavar="N",
        help="worlds in which rounds are timed, which takes little time (default: 30)",
    )
    reproduce.add_argument("--device", default="cpu", help="where to train: cpu or cuda (default: cpu)")
    reproduce.add_argument(
        "--workers", metavar="N", type=int, default=os.cpu_count() or 1, help="processes to use (default: all cores)"
    )
    reproduce.add_argument("--out", metavar="DIR", required=True, help="the folder, new or of a reproduction before")
    reproduce.add_argument("--quiet", action="store_true", help="no progress and no tables")
    reproduce.set_defaults(command=_reproduce)


def _add_bias(commands: Any) -> None:
    bias = commands.add_parser(
        "bias",
        help="the bias between the fastest and the slowest client, by theory and by simulation",
        description="How much likelier the fastest client A is to contribute than the slowest client B: by the paper's "
        "recurrence put right, as printed, and by simulation.",
        allow_abbrev=False,
    )
    for flag, default, meaning in (
        ("--crash-a", 0.3, "crash rate of A"),
        ("--crash-b", 0.3, "crash rate of B"),
        ("--fraction", 0.5, "C: the share of clients whose updates a round wants"),
        ("--crash-rate", 0.3, "R: crash rate of all others"),
    ):
        bias.add_argument(flag, type=float, default=default, metavar="X", help=f"{meaning} (default: {default})")
    for flag, count, meaning in (
        ("--rounds", 12, "rounds"),
        ("--clients", 200, "clients in the simulation"),
        ("--repetitions", 300, "simulated runs"),
        ("--seed", 0, "the seed of the simulation"),
    ):
        bias.add_argument(flag, type=int, default=count, metavar="N", help=f"{meaning} (default: {count})")
    bias.add_argument("--out", metavar="DIR", help="where to put the plot (default: a new folder in runs/)")
    bias.set_defaults(command=_bias)


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


def _report(arguments: argparse.Namespace) -> None:
    from safa.paper import reproduction
    from safa.report import write_report

    folder = Path(arguments.folder)
    if (folder / reproduction.RESULTS).is_file():
        bias = reproduction.bias_of_figure_5() if reproduction.has_figure_5(folder) else ()
        page = reproduction.write_reproduction(folder, bias=bias)
    else:
        page = write_report(folder, speeds=_speeds(folder))
    Console().print(f"Written to {page}", highlight=False, soft_wrap=True)


def _speeds(folder: Path) -> Any:
    """The speeds of the clients of a run, where its world can be built again."""
    try:
        return make_fleet(load_run(folder).settings).speeds
    except SafaError:
        return None


def _reproduce(arguments: argparse.Namespace) -> None:
    from safa.paper import collect, reproduction

    tasks = _chosen("task", arguments.task, grid.TASKS)
    parts = _chosen("what", arguments.what, grid.PARTS)
    for name in ("seeds", "worlds", "workers"):
        if getattr(arguments, name) < 1:
            raise SafaError(f"{name} must be at least 1, not {getattr(arguments, name)}")
    jobs = grid.plan(tasks, parts, seeds=arguments.seeds, worlds=arguments.worlds, device=arguments.device)
    if any(job.settings.train for job in jobs):
        find_device(arguments.device)
        for task in dict.fromkeys(job.settings.task for job in jobs if job.settings.train):
            find_task(task).load()  # data that cannot be had is missed now, not after hours
    if arguments.device == "cpu" and any(job.settings.train and job.settings.task == "mnist" for job in jobs):
        print("safa: training Task 2 (mnist) takes days without a GPU; see --device and --task", file=sys.stderr)
    folder = _reproduction_folder(Path(arguments.out))
    results = collect.Results(folder / reproduction.RESULTS)
    _collect(arguments, folder, results, jobs)
    bias = reproduction.bias_of_figure_5() if "bias" in parts or reproduction.has_figure_5(folder) else ()
    page = reproduction.write_reproduction(folder, bias=bias)
    if not arguments.quiet:
        _print_reproduction(reproduction.Reproduction.read(folder, bias))
        Console(stderr=True).print(f"Written to {page}", highlight=False, soft_wrap=True)


def _collect(arguments: argparse.Namespace, folder: Path, results: Results, jobs: Sequence[Job]) -> None:
    """Do what is missing of a reproduction, and note what it took; a later call goes on where this one is stopped."""
    from safa.paper import collect, reproduction

    missing = results.missing(jobs)
    start = time.perf_counter()
    done = 0
    try:
        finished = collect.collect(missing, results, workers=min(arguments.workers, max(1, len(missing))))
        for _ in _with_progress(finished, sum(j.weight for j in missing), "runs", quiet=arguments.quiet, weigh=_weight):
            done += 1
    except KeyboardInterrupt:
        kept = f"{len(jobs) - len(missing) + done} of {len(jobs)} runs are finished"
        raise KeyboardInterrupt(f"{kept} and kept in {folder}; the same command goes on from there") from None
    finally:
        if done:
            command = f"safa reproduce --task {arguments.task} --what {arguments.what} --seeds {arguments.seeds}"
            places = f" --device {arguments.device}" if arguments.device != "cpu" else ""
            reproduction.note_session(
                folder,
                command=f"{command} --worlds {arguments.worlds} --workers {arguments.workers}{places}",
                machine=reproduction.machine(arguments.device),
                runs=done,
                seconds=round(time.perf_counter() - start, 1),
            )


def _weight(job: Job) -> float:
    return job.weight


def _chosen(name: str, text: str, known: Sequence[str]) -> list[str]:
    """One or several of what there is, or all."""
    chosen = list(known) if text == "all" else [part.strip() for part in text.split(",")]
    for part in chosen:
        if part not in known:
            raise SafaError(f"{name} must be one of {', '.join(known)} or all, not {part!r}")
    return chosen


def _reproduction_folder(path: Path) -> Path:
    """A folder that is new, empty, or holds a reproduction already."""
    if path.is_dir() and any(path.iterdir()) and not (path / "results.jsonl").is_file():
        raise SafaError(f"{path} holds other files; choose a new folder, or that of a reproduction before")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "results.jsonl").touch()
    except OSError as problem:
        raise SafaError(f"cannot make the folder {path}: {problem.strerror}") from None
    return path


def _bias(arguments: argparse.Namespace) -> None:
    from safa.paper.bias import bias_figure, bias_report, describe, table
    from safa.report.figures import save

    values = {name: getattr(arguments, name) for name in ("rounds", "clients", "repetitions", "seed")}
    setting = arguments.crash_a, arguments.crash_b, arguments.fraction, arguments.crash_rate
    report = bias_report(*setting, **values)
    folder = new_folder(Path(arguments.out) if arguments.out else _numbered("bias"), force=False)
    files = save(bias_figure(report).properties(width="container"), folder / "bias")
    console = Console(highlight=False)
    for line in describe(report):
        console.print(line, soft_wrap=True)
    headings, rows = table(report)
    shown = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        shown.add_row(*row)
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(shown)
    console.print(f"Plotted to {files[0]}", soft_wrap=True)


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


def _with_progress(
    items: Iterable[_T],
    total: float,
    unit: str,
    *,
    quiet: bool,
    done: int = 0,
    weigh: Callable[[_T], float] | None = None,
) -> Iterator[_T]:
    """The items, `done` of which came earlier, with a progress bar on stderr if they take more than two seconds.

    Where items take unlike long, `weigh` says how much of the `total` each of them is.
    """
    columns = (MofNCompleteColumn(),) if weigh is None else (TaskProgressColumn(), TextColumn("{task.fields[count]}"))
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    start = time.perf_counter()
    job = bar.add_task(unit, total=total, completed=done, count="")
    completed = float(done)
    try:
        for number, item in enumerate(items, start=done):
            if not quiet and not bar.live.is_started and time.perf_counter() - start > _PROGRESS_AFTER_S:
                bar.start()
            completed = number if weigh is None else completed + weigh(item)
            bar.update(job, completed=completed, count=f"{number + 1} done")
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
        f"Written to {writer.folder}; safa report {writer.folder} makes a page of it."
        if writer
        else "Nothing was written; --out DIR keeps the run.",
        soft_wrap=True,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _print_reproduction(found: Reproduction) -> None:
    """What was met, and what holds."""
    console = Console(highlight=False)
    for head, rows in (found.met(), found.holds()):
        table = Table(*head, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        if rows:
            console.print(table)
            console.print()


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
