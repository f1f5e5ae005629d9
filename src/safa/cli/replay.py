"""`safa replay`: train the model of a run again from its records."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safa.cli.console import Terminal
from safa.experiments.replay import replay
from safa.runs import load_run, write_atomically
from safa.runs.storage import writing

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add `safa replay` to the commands."""
    parser = commands.add_parser(
        "replay",
        help="train the model of a run again from its records",
        description="Train the model of a run again, from its records alone, and compare it with the run's own.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="the folder of a run")
    parser.add_argument(
        "--task", metavar="NAME", help="the task, package.module:attribute, of a run whose task is not built in"
    )
    parser.add_argument("--schedule", metavar="NAME", help="the schedule of a run whose schedule is a function")
    parser.add_argument("--out", metavar="FILE", help="write the model to this .safetensors file")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> None:
    """Replay a run, and print how far its model is from the run's own."""
    replayed = load_run(arguments.folder)
    own = replayed.model() if replayed.summary is not None and replayed.has_model() else None
    model = replay(
        replayed,
        arguments.task,
        schedule=arguments.schedule,
        how=lambda task: f"safa replay {arguments.folder} --task {task}",
    )
    if arguments.out:
        _save(model, Path(arguments.out))
    outcome = _outcome(model, own, is_finished=replayed.summary is not None)
    Terminal().print(outcome, soft_wrap=True)


def _save(model: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save

    with writing(file):
        write_atomically(file, save(model))


def _outcome(model: Mapping[str, Tensor], own: Mapping[str, Tensor] | None, *, is_finished: bool) -> str:
    if own is None and is_finished:
        return "The model was trained again from the records; that of the run itself was not kept."
    if own is None:
        return "The run is not finished; its records were replayed as far as they go."
    apart = max(float((model[name].double() - own[name].double()).abs().max()) for name in own)
    same = "equal to" if apart == 0 else f"at most {apart:.2g} away from"
    return f"The model trained again from the records is {same} the run's own."
