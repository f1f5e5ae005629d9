"""Settings and options of a new run, and whether a folder holds a run that can be resumed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safa.cli.arguments import foreign_settings, given_options, given_settings, settings_of
from safa.deploy.exchange.files import finished_rounds
from safa.deploy.exchange.options import FILE as OPTIONS_FILE
from safa.deploy.exchange.options import Options
from safa.deploy.launcher.link import Link
from safa.errors import SafaError, did_you_mean
from safa.experiments.simulate import with_learning_rate
from safa.runs import has_checkpoint, load_run, presets
from safa.runs.settings import Settings
from safa.runs.values import COLUMNS, file_or_values, shown
from safa.tasks import find_task

__all__ = ["check_same", "is_finished", "new_run", "resumed"]

_SAME = "a resumed run keeps its settings: give the same or none, or begin another run with a new --out"
_OPEN = {"threads": 0, "lr": "auto"}
"""Values that mean: decided when the run begins."""


def new_run(arguments: argparse.Namespace) -> tuple[Settings, dict[str, Any]]:
    """The settings of a new run and the options that were given; those on the command line go before the file."""
    if arguments.named_task and arguments.task not in (None, arguments.named_task):
        raise SafaError(f"two tasks are named, {arguments.task} and {arguments.named_task}")
    arguments.task = arguments.task or arguments.named_task
    settings, found = with_learning_rate(settings_of(arguments))
    if found and not arguments.quiet:
        print(f"safa: {found}", file=sys.stderr)
    table = Settings.read_toml(arguments.config).get("deploy", {}) if arguments.config else {}
    if not isinstance(table, dict):
        raise SafaError(f"deploy in {arguments.config} must be a table")
    return settings, table | {name: value for name, (value,) in given_options(arguments, Options).items()}


def resumed(arguments: argparse.Namespace, kind: str) -> Path:
    """The folder of a run that was stopped; it holds all settings."""
    given = given_settings(arguments) | given_options(arguments, Options)
    if arguments.task or arguments.named_task or arguments.config or arguments.out or arguments.insecure or given:
        raise SafaError("--resume takes everything from its folder; give no task and no settings with it")
    folder = Path(arguments.resume)
    if is_finished(folder, kind):
        raise SafaError(f"the run in {folder} is finished; there is nothing to resume")
    return folder


def is_finished(folder: Path, kind: str) -> bool:
    """Whether a run of this kind of deployment is finished; one of another kind is an error."""

    run = load_run(folder)
    begun_with = "local" if Link.read(folder).local else "server"
    Options.read(folder / OPTIONS_FILE)  # fails now if it is damaged
    rounds = finished_rounds(folder)
    if run.summary is None and rounds and not has_checkpoint(folder):
        raise SafaError(
            f"{folder} holds {rounds} rounds and no checkpoint: restore its folder checkpoint from a backup, or begin "
            "in another folder, or here with --force"
        )
    if begun_with != kind:
        raise SafaError(f"the run in {folder} was begun with safa deploy {begun_with}; resume it with that")
    return run.summary is not None


def check_same(arguments: argparse.Namespace, folder: Path) -> None:
    """Raise an error if something was given that differs from what the run in a folder was begun with."""

    config = Settings.read_toml(arguments.config) if arguments.config else {}
    table = config.pop("deploy", {})
    if not isinstance(table, dict):
        raise SafaError(f"deploy in {arguments.config} must be a table")
    if arguments.named_task and arguments.task not in (None, arguments.named_task):
        raise SafaError(f"two tasks are named, {arguments.task} and {arguments.named_task}")
    foreign = _named_options(config, foreign_settings(arguments), load_run(folder).settings)
    given = config | dict(presets.read(arguments.preset) if arguments.preset is not None else {})
    given |= {name: value for name, (value,) in given_settings(arguments).items()} | foreign
    task = arguments.task or arguments.named_task or given.get("task")
    given |= {"task": find_task(task).name} if task else {}
    _compare(given, load_run(folder).settings.values(), folder)
    options = table | {name: value for name, (value,) in given_options(arguments, Options).items()}
    held = Options.read(folder / OPTIONS_FILE)
    _compare(options, {item.name: getattr(held, item.name) for item in fields(Options)}, folder)
    link = Link.read(folder)
    if arguments.insecure and link.keys:
        raise SafaError(f"{folder} was begun with the keys in {link.keys}, and --insecure is given; {_SAME}")
    keys = str(Path(arguments.keys).resolve()) if arguments.keys else None
    named = {"host": arguments.host, "port": arguments.port, "keys": keys}
    _compare({name: value for name, value in named.items() if value is not None}, asdict(link), folder)


def _named_options(config: dict[str, Any], given: Mapping[str, Any], held: Settings) -> dict[str, Any]:
    """The own settings of protocol and aggregator, by the names that `Settings.values` has for them."""
    known = held.values()
    given = {**config.pop("protocol_options", {}), **given}
    own: dict[str, str] = {name: f"protocol.{name}" for name in given if f"protocol.{name}" in known}
    of_aggregator = config.pop("aggregator_options", {})
    return {own.get(name, name): value for name, value in given.items()} | {
        f"aggregator.{name}": value for name, value in of_aggregator.items()
    }


def _compare(given: Mapping[str, Any], held: Mapping[str, Any], folder: Path) -> None:
    for name, value in given.items():
        if name not in held:
            raise SafaError(f"there is no setting {name!r}{did_you_mean(name, held)}")
        value = file_or_values(name, value) if name in COLUMNS else value
        if value != held[name] and _OPEN.get(name, held[name]) != value:
            raise SafaError(f"{name} is {shown(held[name])} in {folder}, and {shown(value)} is given; {_SAME}")
