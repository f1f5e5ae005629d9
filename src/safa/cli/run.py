"""`safa run`: simulate one run, or resume one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from safa.cli.arguments import add_address, add_settings, add_track, given_settings, settings_of
from safa.cli.live import LiveView
from safa.cli.progress import Progress
from safa.cli.show import print_summary
from safa.cluster import connect
from safa.errors import SafaError
from safa.experiments.callbacks import Callbacks
from safa.experiments.simulate import Experiment, resume_run, run_to_end
from safa.runs import RunWriter, Settings, load_run, next_folder, plain
from safa.tasks import TASKS
from safa.trackers import find_trackers, track_folder

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa run` to the commands."""
    parser = commands.add_parser(
        "run",
        help="simulate one run",
        usage="safa run TASK [options]",
        description="Simulate one run of a protocol on a fleet.",
        allow_abbrev=False,
    )
    parser.add_argument("task", metavar="TASK", nargs="?", help=f"one of {', '.join(TASKS)}; not needed with --config")
    add_settings(parser, lists=False)
    add_address(parser)
    add_track(parser)
    parser.add_argument("--config", metavar="FILE", help="settings from a config.toml; options override it")
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help="resume the stopped run in this folder; name its task, and its schedule, if not built in",
    )
    parser.add_argument("--json", action="store_true", help="print settings and metrics as one JSON object only")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write the run into this folder (default: a new one in runs/ for a run that trains, else none)",
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Simulate a run to its end and print its metrics."""
    start = time.perf_counter()
    experiment, writer = _resumed(arguments) if arguments.resume else _new(arguments)
    settings = experiment.settings
    for words in (experiment.trainer_words, experiment.learning_rate_words, experiment.caution):
        if words and not arguments.quiet:
            print(f"safa: {words}", file=sys.stderr)
    folder = writer.folder if writer else None
    with track_folder(find_trackers(arguments.track), folder, tell=_tell) as tracking:
        _finish(experiment, writer, Callbacks([tracking]), quiet=arguments.quiet)
        if folder is not None:
            tracking.on_end(load_run(folder))
    if experiment.doubt and not arguments.quiet:
        print(f"safa: {experiment.doubt}", file=sys.stderr)
    result = experiment.summary() | {"wall_time_s": time.perf_counter() - start}
    if arguments.json:
        print(json.dumps({"settings": plain(settings.values()), "metrics": plain(result)}))
    elif not arguments.quiet:
        print_summary(settings, result, writer)


def _tell(sentence: str) -> None:
    print(f"safa: {sentence}", file=sys.stderr)


def _finish(experiment: Experiment, writer: RunWriter | None, callbacks: Callbacks, *, quiet: bool) -> None:
    """Run all rounds that are left; Ctrl-C says how many are finished and how to resume."""
    settings = experiment.settings
    progress = Progress(settings.rounds, "round", done=experiment.server.finished, at_most=bool(settings.until))
    try:
        with LiveView(progress, quiet=quiet) as view:
            for record in run_to_end(experiment, writer, callbacks):
                view.round(record)
    except KeyboardInterrupt:
        folder = f" and can be read in {writer.folder}; resume with --resume {writer.folder}" if writer else ""
        raise KeyboardInterrupt(f"{progress.done} of {settings.rounds} rounds are finished{folder}") from None


def _new(arguments: argparse.Namespace) -> tuple[Experiment, RunWriter | None]:
    """A new run, from the command line and a config file."""
    chosen = settings_of(arguments)
    _connect(arguments.address, chosen)
    experiment = Experiment(chosen)
    settings = experiment.settings
    folder = Path(arguments.out) if arguments.out else None
    if folder is None and (arguments.track or (settings.train and not arguments.json)):
        folder = next_folder(f"{settings.task}-{settings.protocol}")
    return experiment, RunWriter.begin(folder, settings, force=arguments.force) if folder else None


def _resumed(arguments: argparse.Namespace) -> tuple[Experiment, RunWriter]:
    """A stopped run; its folder holds all settings. A task or a schedule that is not built in must be named again."""
    own = arguments.task and ":" in arguments.task
    given = given_settings(arguments)
    schedule = given.pop("schedule", [None])[0]
    if (arguments.task and not own) or arguments.config or arguments.out or given:
        raise SafaError("--resume takes everything from its folder; give no task and no settings with it")
    _connect(arguments.address, load_run(arguments.resume).settings)
    return resume_run(
        arguments.resume,
        arguments.task,
        schedule=schedule,
        tell=_tell,
        how=lambda task: f"safa run {task} --resume {arguments.resume}",
    )


def _connect(address: str | None, settings: Settings) -> None:
    """Connect to the Ray cluster that was named, where one is asked for."""
    if address is None:
        return
    if not (settings.train and settings.trainer == "ray"):
        raise SafaError("--address is that of a Ray cluster, and needs --trainer ray")
    connect(address)
