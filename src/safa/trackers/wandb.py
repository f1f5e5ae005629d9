"""Weights & Biases: offline, in files beside the run's folder, unless the environment says otherwise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safa.trackers.tracker import TrackedRun, Tracker, library

__all__ = ["WeightsAndBiases"]

_FOLDER, _PROJECT, _LAST = "wandb", "safa", "last_round"


class WeightsAndBiases(Tracker):
    """Weights & Biases: files in wandb/ beside the run, or online.

    WANDB_MODE, WANDB_DIR and WANDB_PROJECT (`safa`) are heeded; without, it is offline, and `wandb sync` sends what was
    written. A resumed run has the same id, so that it is one run when it is sent.
    """

    name = "wandb"

    def __init__(self) -> None:
        self._wandb = library("wandb", needs="wandb", extra="wandb")
        self._run: Any = None
        self._folder = Path()

    def begin(self, run: TrackedRun) -> int:
        """Begin a run with the settings as its config, or continue the one of the same id."""
        place = Path(os.environ.get("WANDB_DIR") or run.place.beside)
        (place / _FOLDER).mkdir(parents=True, exist_ok=True)
        last = max(map(self._last_round, (place / _FOLDER).glob(f"*run-*-{run.place.key}/*.wandb")), default=0)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            id=run.place.key,
            name=run.place.name,
            group=run.place.sweep or None,
            config=dict(run.settings),
            dir=str(place),
            mode=os.environ.get("WANDB_MODE") or "offline",
            resume="allow",
            reinit="create_new",
            settings=self._wandb.Settings(console="off", silent=True),
        )
        self._folder = Path(self._run.dir)
        return last

    def _last_round(self, file: Path) -> int:
        """The last round in a file of wandb's, which may lack what was logged before it was killed.

        Where this version of wandb cannot read its files, it is the last one that was logged.
        """
        read = [self._wandb.util.get_core_path(), "leet", "inspect", "--no-observability", "--summary", "--json"]
        done = subprocess.run([*read, "--run-file", str(file), str(file.parent)], capture_output=True)
        noted = file.with_name(_LAST)
        if done.returncode == 0:
            return int(json.loads(done.stdout)["step"] or 0)
        return int(noted.read_text()) if noted.exists() else 0

    def log(self, round_number: int, time_s: float, values: Mapping[str, float]) -> None:
        """Log the values as those of a step."""
        self._run.log(dict(values), step=round_number, commit=True)
        (self._folder.parent / _LAST).write_text(str(round_number))

    def end(self, summary: Mapping[str, float], page: Path | None) -> None:
        """Add the summary to that of the run, and the page as an artifact."""
        self._run.summary.update(dict(summary))
        if page is not None:
            kept = shutil.copyfile(page, self._folder / page.name)
            artifact = self._wandb.Artifact(f"report-{self._run.id}", type="report")
            artifact.add_file(str(kept), policy="immutable")  # without a copy in another place
            self._run.log_artifact(artifact)
        self._run.finish()

    def stop(self) -> None:
        """End the process that writes; the run counts as failed until it is resumed."""
        self._run.finish(exit_code=1)
