"""The callback that tells trackers what happens in a run, and keeps their failures away from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from safa.analysis import Metrics
from safa.errors import SafaError
from safa.protocol.records import RoundRecord
from safa.runs import Run, Settings, load_run
from safa.runs.frames import round_row
from safa.runs.values import shown
from safa.trackers.place import Place
from safa.trackers.tracker import TrackedRun, Tracker

if TYPE_CHECKING:
    from safa.server import Server

__all__ = ["Tracking", "track_folder"]

_TIME = "virtual_time_s"
_ELSEWHERE = ("round", "opened_s", "closed_s")
"""Of the numbers of a round: those that are logged as its number and its time."""

Tell = Callable[[str], object]


class Tracking:
    """Follows one run with any number of trackers. A context manager: what is not ended in it is stopped.

    No round is logged twice. `tell` is given a sentence if a tracker fails, which is then left out.
    """

    def __init__(self, trackers: Sequence[Tracker] = (), *, tell: Tell = warnings.warn) -> None:
        self._logged: dict[Tracker, int] = dict.fromkeys(trackers, 0)
        """The trackers at work, each with the last round that it has logged."""
        self._tell, self._last, self._metrics = tell, 0, Metrics()

    def begin(self, place: Place, settings: Settings, earlier: Iterable[RoundRecord] = ()) -> Self:
        """Begin to track a run, or continue to: trackers log those `earlier` rounds that they do not have yet."""
        self._metrics = Metrics(settings.metrics, settings.target)
        run = TrackedRun(place=place, settings=_plain(settings))
        self._each(lambda tracker: self._begin(tracker, run))
        for record in earlier if self._logged else ():
            self.add(record)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._each(lambda tracker: tracker.stop())

    def on_round(self, record: RoundRecord, server: Server) -> None:
        """Log a round of a simulation."""
        self.add(record)

    def add(self, record: RoundRecord) -> None:
        """Log a round, unless it was logged before."""
        if not self._logged or record.round <= self._last:
            return
        self._last = record.round
        self._metrics.add(record)
        values = _values(record, self._metrics)
        self._each(lambda tracker: self._log(tracker, record, values))

    def before(self, show: Callable[[RoundRecord | str], object]) -> Callable[[RoundRecord | str], None]:
        """What follows a deployment: it logs each round, and then shows it; what is no round is shown only."""

        def follow(event: RoundRecord | str) -> None:
            if isinstance(event, RoundRecord):
                self.add(event)
            show(event)

        return follow

    def on_end(self, run: Run) -> None:
        """Log the summary of a run that is finished, and its page."""
        if not self._logged:
            return
        with TemporaryDirectory(prefix="safa-page-") as folder:
            page = self._page(run, Path(folder, "report.html"))
            self._each(lambda tracker: tracker.end(_numbers(run.summary or {}), page))
        self._logged.clear()

    def _page(self, run: Run, path: Path) -> Path | None:
        """The page of a run; None where its records are not there."""
        from safa.report import write_report

        if run.folder is None and not run.held_records:
            return None
        try:
            return write_report(run, path)
        except Exception as error:
            self._tell(f"trackers are given no page of the run: {_sentence(error)}")
            return None

    def _begin(self, tracker: Tracker, run: TrackedRun) -> None:
        self._logged[tracker] = tracker.begin(run)

    def _log(self, tracker: Tracker, record: RoundRecord, values: Mapping[str, float]) -> None:
        if record.round > self._logged[tracker]:
            tracker.log(record.round, record.closed_s, values)
            self._logged[tracker] = record.round

    def _each(self, call: Callable[[Tracker], object]) -> None:
        for tracker in list(self._logged):
            self._try(tracker, call)

    def _try(self, tracker: Tracker, call: Callable[[Tracker], object]) -> None:
        """Call a tracker; one that fails is told of once, and left out from then on."""
        try:
            call(tracker)
        except Exception as error:
            del self._logged[tracker]
            self._tell(f"the tracker {tracker.name} failed and is given up for this run: {_sentence(error)}")


def track_folder(trackers: Sequence[Tracker], folder: Path | None, *, tell: Tell = warnings.warn) -> Tracking:
    """Follow the run in a folder, from its first round or from where it is resumed."""
    if not trackers or folder is None:
        return Tracking()
    run = load_run(folder)
    try:
        place = Place.of(folder)
    except (SafaError, OSError) as error:
        tell(f"the run is not tracked: {_sentence(error)}")
        return Tracking()
    return Tracking(trackers, tell=tell).begin(place, run.settings, run.records() if run.has_rounds() else ())


def _values(record: RoundRecord, metrics: Metrics) -> dict[str, float]:
    """The values of a round: the loss and the metrics of the model, its own numbers, and the run's metrics so far."""
    learnt = {} if record.loss is None else {"loss": record.loss, **record.metrics}
    own = {name: value for name, value in round_row(record).items() if name not in (*_ELSEWHERE, "loss", *learnt)}
    so_far = {name: value for name, value in metrics.values().items() if name != _TIME and not name.startswith("last_")}
    return {
        **learnt,
        _TIME: record.closed_s,
        **{f"round/{name}": value for name, value in _numbers(own).items()},
        **{f"run/{name}": value for name, value in _numbers(so_far).items()},
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Those of the values that are numbers; counts by name are `NAME.COUNTED`."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{counted}": float(count) for counted, count in value.items()}
        elif isinstance(value, int | float) or value in ("inf", "-inf", "nan"):
            found[name] = float(value)
    return found


def _plain(settings: Settings) -> dict[str, bool | int | float | str]:
    """All settings by name, as tables show them."""
    values = {name: shown(value) for name, value in settings.values().items()}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in values.items()
    }


def _sentence(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
