"""Options for settings: one option for every setting, made from the metadata of its field."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from safa.errors import SafaError
from safa.experiments.engines import ENGINES, Engine, make_engine
from safa.runs import presets
from safa.runs.settings import Settings
from safa.tasks import TASKS
from safa.trackers import find_trackers

__all__ = [
    "add_address",
    "add_engine",
    "add_options",
    "add_settings",
    "add_track",
    "engine_of",
    "foreign_settings",
    "given_options",
    "given_settings",
    "settings_of",
]


def add_settings(parser: argparse.ArgumentParser, *, lists: bool) -> None:
    """An option for every setting of a run, and the options that all commands with settings share."""
    add_options(parser, Settings, lists=lists)
    parser.add_argument(
        "--preset",
        metavar="NAME|FILE",
        help=f"settings that go together: {', '.join(presets.names())}, or a file of your own, FILE.toml",
    )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a setting of a protocol from another package; aggregator.NAME=VALUE for an aggregator",
    )
    parser.add_argument("--no-train", action="store_true", help="simulate the rounds only, train no model")
    parser.add_argument("--force", action="store_true", help="replace the run in the output folder")
    parser.add_argument("--quiet", action="store_true", help="no progress and no table")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Options that say where many runs are made."""
    parser.add_argument(
        "--engine",
        metavar="|".join(ENGINES),
        default="local",
        help="where to run: local (processes of this machine) or ray (a Ray cluster) (default: local)",
    )
    add_address(parser)
    parser.add_argument(
        "--workers", metavar="N", type=int, help="runs at a time (default: one for every core, here or in the cluster)"
    )


def add_address(parser: argparse.ArgumentParser) -> None:
    """An option that says where a Ray cluster is."""
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="the address of a Ray cluster (default: that in RAY_ADDRESS; without, Ray is started on this machine)",
    )


class _Track(argparse.Action):
    """Takes the names of trackers, and refuses what cannot be used before anything is begun."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        find_trackers(values)
        namespace.track = [*namespace.track, values]


def add_track(parser: argparse.ArgumentParser) -> None:
    """The option that names trackers."""
    parser.add_argument(
        "--track",
        metavar="NAME[,NAME]",
        action=_Track,
        default=[],
        help="follow the run in tensorboard, mlflow or wandb (safa trackers lists what there is); their files go into "
        "tensorboard, mlruns and wandb beside the run's folder",
    )


def engine_of(arguments: argparse.Namespace, runs: Iterable[Settings]) -> Engine:
    """The engine that was chosen, for runs with these settings."""
    if arguments.workers is None and arguments.engine == "local":
        arguments.workers = os.cpu_count() or 1
    return make_engine(arguments.engine, runs, workers=arguments.workers, address=arguments.address)


def add_options(parser: argparse.ArgumentParser, kind: type[Any], *, lists: bool = False) -> None:
    """An option for every field of a dataclass that was made with `safa.runs.fields.option`.

    An option that is not given is not set, so that defaults are in the dataclass only.
    """
    groups: dict[str, Any] = {}
    for item in fields(kind):
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
            type=(lambda text: text.split(",")) if lists and item.metadata["is_list"] else (lambda text: [text]),
            default=argparse.SUPPRESS,
            metavar="FILE" if item.metadata["is_file"] else _metavar(item),
            help=item.metadata["help"] + ("" if default is None else f" (default: {default})"),
        )


def _metavar(item: Any) -> str:
    kind = {"int": "N", "float": "X", "bool": "yes|no"}.get(_kind(item), "NAME")
    return "|".join(item.metadata["choices"] or [kind, *item.metadata["words"]])


def _kind(item: Any) -> str:
    """The type of a setting, by the name of the first that it may have."""
    return str(item.type).partition(" ")[0]


def _convert(text: str, item: Any) -> Any:
    """The value of a setting from its text; what is allowed is checked by `Settings`."""
    name, kind = item.name, _kind(item)
    if text in item.metadata["words"]:
        return text
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
        others = "".join(f"{word} or " for word in item.metadata["words"])
        raise SafaError(f"{name} must be {others}a number, not {text!r}") from None


def given_settings(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """The settings that were given on the command line, each as a list of values."""
    return given_options(arguments, Settings) | ({"train": [False]} if arguments.no_train else {})


def given_options(arguments: argparse.Namespace, kind: type[Any]) -> dict[str, list[Any]]:
    """The fields of such a dataclass that were given on the command line, each as a list of values."""
    return {
        item.name: [_convert(part.strip(), item) for part in getattr(arguments, item.name)]
        for item in fields(kind)
        if item.metadata and hasattr(arguments, item.name)
    }


def foreign_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings given with --set; each value is a number, true, false or text."""
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


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings of a new run, from the command line and its config file."""
    config = Settings.read_toml(arguments.config) if arguments.config else {}
    config.pop("deploy", None)  # options of deployments have no meaning in a simulated run
    named = config.pop("task", None)
    task = arguments.task or named
    if task is None:
        raise SafaError(f"name a task, one of {', '.join(TASKS)}")
    options = config.pop("protocol_options", {})
    if not isinstance(options, dict):
        raise SafaError(f"protocol_options in {arguments.config} must be a table")
    options |= foreign_settings(arguments)
    given = {name: value for name, (value,) in given_settings(arguments).items()}
    return Settings.of(task, base=config, preset=arguments.preset, **given, protocol_options=options)
