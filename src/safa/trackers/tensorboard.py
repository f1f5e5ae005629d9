"""TensorBoard: event files beside the run's folder, written without TensorFlow."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from safa.runs.storage import append
from safa.trackers.tracker import TrackedRun, Tracker, library

__all__ = ["TensorBoard"]

_FOLDER = "tensorboard"
_EVENTS = "events.out.tfevents."
_OURS = re.compile(re.escape(_EVENTS) + r"\d+\.safa-[\w-]+")
_LAST = "virtual_time_s"  # is logged in every round


class TensorBoard(Tracker):
    """TensorBoard: files in tensorboard/ beside the run.

    The time of an event is the virtual time, so that the axis "relative" shows it.
    """

    name = "tensorboard"

    def __init__(self) -> None:
        self._events = _library("compat.proto.event_pb2")
        self._summaries = _library("compat.proto.summary_pb2")
        self._folder = Path()
        self._file: BinaryIO = BytesIO()
        self._round, self._time_s = 0, 0.0

    def begin(self, run: TrackedRun) -> int:
        """Write the settings, as hyperparameters, or continue behind the rounds that are in the folder."""
        self._folder = run.place.beside / _FOLDER / run.place.name
        self._folder.mkdir(parents=True, exist_ok=True)
        end = f".safa-{run.place.key}"
        there = [file for file in self._folder.iterdir() if _OURS.fullmatch(file.name)]
        for file in there:
            if not file.name.endswith(end):  # of a run that this one replaces
                file.unlink()
        last = self._last_round() if any(file.name.endswith(end) for file in there) else 0
        self._file = (self._folder / f"{_EVENTS}{time.time_ns()}{end}").open("wb", buffering=0)
        self._write(self._events.Event(wall_time=0.0, file_version="brain.Event:2"))
        if not last:
            hparams = _library("plugins.hparams.summary_v2")
            summary = hparams.hparams_pb(dict(run.settings), trial_id=run.place.key, start_time_secs=0.0)
            self._write(self._events.Event(wall_time=0.0, step=0, summary=summary))
        return last

    def _last_round(self) -> int:
        """The last round in the event files."""
        found = _library("backend.event_processing.event_accumulator").EventAccumulator(
            str(self._folder), size_guidance={"scalars": 0}
        )
        found.Reload()
        return max((event.step for event in found.Scalars(_LAST)), default=0) if _LAST in found.scalars.Keys() else 0

    def log(self, round_number: int, time_s: float, values: Mapping[str, float]) -> None:
        """Write the values as scalars, in one event."""
        self._round, self._time_s = round_number, time_s
        made = [self._summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        summary = self._summaries.Summary(value=made)
        self._write(self._events.Event(wall_time=time_s, step=round_number, summary=summary))

    def end(self, summary: Mapping[str, float], page: Path | None) -> None:
        """Write the summary as scalars `summary/NAME`, and copy the page to the event files."""
        self.log(self._round, self._time_s, {f"summary/{name}": value for name, value in summary.items()})
        if page is not None:
            shutil.copyfile(page, self._folder / page.name)
        self.stop()

    def stop(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        """Append an event to the file."""
        record = BytesIO()
        _library("summary.writer.record_writer").RecordWriter(record).write(event.SerializeToString())
        append(self._file, record.getvalue())


def _library(module: str) -> Any:
    return library(f"tensorboard.{module}", needs="TensorBoard", extra="tensorboard")
