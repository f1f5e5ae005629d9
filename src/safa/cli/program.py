"""The command line: commands, progress, exit codes.

Exit codes: 0 done, 2 something that was given cannot be used (one sentence on stderr says what), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

import safa
from safa.cli.arguments import add_settings, foreign_settings, given_settings, settings_of
from safa.cli.deploy import add_deploy
from safa.cli.reproduce import add_bias, add_reproduce
from safa.cli.show import print_rows, print_summary, with_progress
from safa.errors import SafaError
from safa.experiments.simulate import Experiment, resume_run, run_to_end
from safa.experiments.sweep import combinations, run_sweep
from safa.fleet import make_fleet
from safa.paper.collect import RESULTS
from safa.protocol import available
from safa.runs import RunWriter, load_run, new_folder, next_folder, plain, write_atomically
from safa.runs.storage import writing
from safa.tasks import TASKS

__all__ = ["entry", "main"]

_STOPPED = 130
_GOOD_ORDER_S = 8.0


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
    except MemoryError as problem:
        print(f"safa: not enough memory{f': {problem}' if str(problem) else ''}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"safa: stopped{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        return _STOPPED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as problem:
        print(f"safa: {_sentence(problem)}", file=sys.stderr)
        return 2
    return 0


def _sentence(problem: OSError) -> str:
    """What the system refused, and why."""
    verb = "write" if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG) else "use"
    return f"cannot {verb} {problem.filename or 'the output'}: {problem.strerror or problem}"


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
    """Ctrl-C stops in good order, if that takes no longer than a few seconds; a second one, at any moment, at once."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(_STOPPED))
    watchdog = threading.Timer(_GOOD_ORDER_S, _leave)
    watchdog.daemon = True
    watchdog.start()
    raise KeyboardInterrupt


def _leave() -> None:
    """Stop from outside of the main thread, which may be lost in somebody else's code; what is kept is on the disk."""
    print("safa: stopped", file=sys.stderr, flush=True)
    os._exit(_STOPPED)


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
    add_settings(run, lists=False)
    run.add_argument("--config", metavar="FILE", help="settings from a config.toml; options given here go before it")
    run.add_argument(
        "--resume",
        metavar="DIR",
        help="go on with the run in this folder where it was stopped; name the task if it is not built in",
    )
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
    add_settings(sweep, lists=True)
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

    replay = commands.add_parser(
        "replay",
        help="train the model of a run anew from its records",
        description="Train the model of a run anew, from its records alone, and hold it against the run's own.",
        allow_abbrev=False,
    )
    replay.add_argument("folder", metavar="DIR", help="the folder of a run")
    replay.add_argument(
        "--task", metavar="NAME", help="the task, package.module:attribute, of a run whose task is not built in"
    )
    replay.add_argument("--out", metavar="FILE", help="write the model to this .safetensors file")
    replay.set_defaults(command=_replay)

    add_reproduce(commands)
    add_bias(commands)
    add_deploy(commands)

    protocols = commands.add_parser("protocols", help="list the protocols", allow_abbrev=False)
    protocols.set_defaults(command=_protocols)
    tasks = commands.add_parser("tasks", help="list the tasks and their settings", allow_abbrev=False)
    tasks.set_defaults(command=_tasks)
    return parser


# -- commands --------------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> None:
    start = time.perf_counter()
    if arguments.resume:
        experiment, writer = _resumed(arguments)
    else:
        experiment, writer = _begun(arguments)
    settings = experiment.settings
    finished = experiment.server.finished
    try:
        rounds = run_to_end(experiment, writer)
        for record in with_progress(rounds, settings.rounds, "rounds", quiet=arguments.quiet, done=finished):
            finished = record.round
    except KeyboardInterrupt:
        kept = f"{finished} of {settings.rounds} rounds are finished"
        later = f" and can be read in {writer.folder}; go on with --resume {writer.folder}" if writer else ""
        raise KeyboardInterrupt(kept + later) from None
    result = experiment.summary() | {"wall_time_s": time.perf_counter() - start}
    if arguments.json:
        print(json.dumps({"settings": plain(settings.values()), "metrics": plain(result)}))
    elif not arguments.quiet:
        print_summary(settings, result, writer)


def _begun(arguments: argparse.Namespace) -> tuple[Experiment, RunWriter | None]:
    """A new run, from the command line and a config file."""
    settings = settings_of(arguments)
    experiment = Experiment(settings)
    settings = experiment.settings
    folder = Path(arguments.out) if arguments.out else None
    if folder is None and settings.train and not arguments.json:
        folder = next_folder(f"{settings.task}-{settings.protocol}")
    return experiment, RunWriter.begin(folder, settings, force=arguments.force) if folder else None


def _resumed(arguments: argparse.Namespace) -> tuple[Experiment, RunWriter | None]:
    """A run that was stopped; all of its settings are in its folder. A task of one's own is named again."""
    named = arguments.task and ":" in arguments.task
    if (arguments.task and not named) or arguments.config or arguments.out or given_settings(arguments):
        raise SafaError("--resume takes everything from its folder; give no task and no settings with it")

    def tell(sentence: str) -> None:
        print(f"safa: {sentence}", file=sys.stderr)

    return resume_run(
        arguments.resume, arguments.task, tell=tell, how=lambda task: f"safa run {task} --resume {arguments.resume}"
    )


def _sweep(arguments: argparse.Namespace) -> None:
    if arguments.workers < 1:
        raise SafaError(f"workers must be at least 1, not {arguments.workers}")
    given: dict[str, Any] = given_settings(arguments)
    options = foreign_settings(arguments)
    if options:
        given["protocol_options"] = [options]
    tasks = [name.strip() for name in arguments.task.split(",")]
    runs = combinations(tasks, given, preset=arguments.preset)
    folder = Path(arguments.out) if arguments.out else next_folder(f"sweep-{'-'.join(tasks)}")
    table = new_folder(folder, force=arguments.force) / "results.csv"
    rows: list[dict[str, Any]] = []
    try:
        results = run_sweep(runs, table, workers=min(arguments.workers, len(runs)))
        rows.extend(with_progress(results, len(runs), "runs", quiet=arguments.quiet))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(rows)} of {len(runs)} runs are finished and can be read in {table}") from None
    if not arguments.quiet:
        print_rows(rows, [name for name, values in given.items() if len(values) > 1], len(tasks) > 1)
        Console(stderr=True).print(f"{len(rows)} runs in {table}", highlight=False, soft_wrap=True)


def _report(arguments: argparse.Namespace) -> None:
    from safa.paper import reproduction
    from safa.report import write_report

    folder = Path(arguments.folder)
    if (folder / RESULTS).exists():
        bias = reproduction.bias_of_figure_5() if reproduction.has_figure_5(folder) else ()
        page = reproduction.write_reproduction(folder, bias=bias)
    else:
        page = write_report(folder, speeds=_speeds(folder))
    Console().print(f"Written to {page}", highlight=False, soft_wrap=True)


def _replay(arguments: argparse.Namespace) -> None:
    from safetensors.torch import save

    from safa.experiments.replay import replay

    run = load_run(arguments.folder)
    own = run.model() if run.summary is not None and run.settings.train else {}
    model = replay(run, arguments.task, how=lambda task: f"safa replay {arguments.folder} --task {task}")
    if arguments.out:
        with writing(Path(arguments.out)):
            write_atomically(Path(arguments.out), save(model))
    console = Console(highlight=False)
    if run.summary is None:
        console.print("The run did not come to its end; its records were replayed as far as they go.", soft_wrap=True)
        return
    apart = max(float((model[name].double() - own[name].double()).abs().max()) for name in own)
    same = "equal to" if apart == 0 else f"at most {apart:.2g} away from"
    console.print(f"The model made anew from the records is {same} the run's own.", soft_wrap=True)


def _speeds(folder: Path) -> Any:
    """The speeds of the clients of a run, where its world was simulated and can be built again."""
    try:
        run = load_run(folder)
        as_simulated = run.roster() is None and run.clients_at_start() == run.settings.clients
        return make_fleet(run.settings).speeds if as_simulated else None
    except SafaError:
        return None


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
