"""MLflow: a server, or files beside the run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from safa.runs.lock import alone
from safa.trackers.tracker import TrackedRun, Tracker, library

__all__ = ["MLflow"]

_FOLDER, _LOCK, _EXPERIMENT, _KEY = "mlruns", ".mlruns.lock", "safa", "safa.key"
_DEFAULTS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow prefers a database, which needs more than mlflow-skinny
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # the run waits for it
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Variables of the environment that are set unless the user has set them."""
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # that MLflow takes at a time
_EVERY_S = 1.0
_LAST = "virtual_time_s"  # is logged in every round


class MLflow(Tracker):
    """MLflow: files in mlruns/ beside the run, or MLFLOW_TRACKING_URI.

    The experiment is that in MLFLOW_EXPERIMENT_NAME, or `safa`. Rounds are sent at most once a second.
    """

    name = "mlflow"

    def __init__(self) -> None:
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        self._tracking, self._entities = _library("mlflow.tracking"), _library("mlflow.entities")
        self._client: Any = None
        self._run = ""
        self._waiting: list[Any] = []
        self._sent_s, self._round = time.monotonic(), 0

    def begin(self, run: TrackedRun) -> int:
        """Create a run with the settings as parameters, or find it again by its key."""
        beside, elsewhere = run.place.beside, self._tracking.is_tracking_uri_set()
        with nullcontext() if elsewhere else alone(beside / _LOCK):  # runs of a sweep begin side by side
            self._client = self._tracking.MlflowClient(None if elsewhere else (beside / _FOLDER).as_uri())
            experiment = self._experiment()
        found = self._client.search_runs([experiment], f"tags.`{_KEY}` = '{run.place.key}'", max_results=1)
        if not found:
            self._create(experiment, run)
            return 0
        self._run = found[0].info.run_id
        self._client.update_run(self._run, status="RUNNING")
        return max((metric.step for metric in self._client.get_metric_history(self._run, _LAST)), default=0)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _create(self, experiment: str, run: TrackedRun) -> None:
        tags = {_KEY: run.place.key} | ({"safa.sweep": run.place.sweep} if run.place.sweep else {})
        self._run = self._client.create_run(experiment, run_name=run.place.name, tags=tags).info.run_id
        parameters = [self._entities.Param(name, str(value)) for name, value in run.settings.items()]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + _MOST_PARAMETERS])

    def log(self, round_number: int, time_s: float, values: Mapping[str, float]) -> None:
        """Log the values as metrics of a step; they are sent together with those of other rounds."""
        now_ms = int(time.time() * 1000)
        self._round = round_number
        self._waiting += [self._entities.Metric(name, value, now_ms, round_number) for name, value in values.items()]
        if time.monotonic() - self._sent_s >= _EVERY_S or len(self._waiting) >= _MOST_METRICS:
            self._send()

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self._run, metrics=self._waiting[:_MOST_METRICS])
            del self._waiting[:_MOST_METRICS]
        self._sent_s = time.monotonic()

    def end(self, summary: Mapping[str, float], page: Path | None) -> None:
        """Log the summary as metrics `summary/NAME`, and the page as an artifact."""
        self.log(self._round, 0.0, {f"summary/{name}": value for name, value in summary.items()})
        self._send()
        if page is not None:
            self._client.log_artifact(self._run, str(page))
        self._client.set_terminated(self._run)

    def stop(self) -> None:
        """Send what waits; the run is marked as stopped."""
        self._send()
        self._client.set_terminated(self._run, status="KILLED")


def _library(module: str) -> Any:
    return library(module, needs="MLflow", extra="mlflow")
