"""From `Server.receive` on, a simulated and a deployed update cross the same functions.

The same run is simulated and deployed, and every function of the server, of aggregation and of the protocol is noted
that is entered on behalf of a round, from its first `Server.receive` to the end of its `Server.commit`. The lists are
equal, but for where updates come from (`SOURCES`) and for what is in `ONLY_DEPLOYED`. To see them side by side:

    python -m tests.test_walk [PROTOCOL]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from safa.experiments.simulate import Experiment, run_to_end
from safa.runs import RunWriter, Settings
from safa.server import Server
from safa.server.inbox import Inbox
from safa.training import LocalTraining
from tests.deploy.harness import Harness

ROOMS = ("safa.server", "safa.aggregation", "safa.protocol")
SOURCES = (LocalTraining, Inbox)
"""Where updates come from: simulated clients are trained, deployed ones send theirs. What they call is left out."""
ROUND = ("Server.receive", "Server.close_round", "Server.commit")
ONLY_DEPLOYED = {
    "Receipt.accepted": "which of the updates that came in go into the inbox",
    "Receipt.consumed": "the same",
    "protocol_state": "rounds cannot be simulated again, so a checkpoint holds the state of the protocol",
}
START_MODEL = {"Server.start_model", "Learner.start_of", "Learner.apply_so_far", "Protocol.record_so_far"}
"""What only a deployment needs besides: the model that a device is sent, and that its reply is compared with."""
THE_ROUND = 4  # all clients have joined, and it is not the last: a checkpoint is written
PROTOCOLS: dict[str, dict[str, int]] = {"safa": {"lag_tolerance": 2}, "fedavg": {}, "fedbuff": {"buffer_size": 2}}
COMMON = {"rounds": 6, "clients": 4, "fraction": 0.5, "seed": 1, "round_limit_s": 2000.0, "crash_rate": 0.0}


class Recorder:
    """Notes the functions that are entered inside of those methods of a server that its driver calls in a round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, None]] = []
        """For every round, the functions in order of first entry."""
        self.start_model: set[str] = set()
        """Those that are entered for `Server.start_model` while a round after the first is received."""
        self._is_open = False
        self._root: FrameType | None = None
        self._hidden: FrameType | None = None
        self._inboxes: list[Any] = []

    def note(self, work: Callable[[], object]) -> None:
        """Do some work and note what it enters."""
        sys.setprofile(self._on_event)
        try:
            work()
        finally:
            sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self._hidden is None:
            self._on_call(frame)
        elif event == "return" and frame is self._hidden:
            self._hidden = None
        elif event == "return" and frame is self._root:
            self._root = None
            self._is_open &= frame.f_code.co_qualname != "Server.commit"

    def _on_call(self, frame: FrameType) -> None:
        name, owner = frame.f_code.co_qualname, frame.f_locals.get("self")
        if self._root is None:
            self._begin(frame, name, owner)
        if self._root is None:
            return
        if isinstance(owner, SOURCES) or name in ONLY_DEPLOYED or self._is_table_of_inbox(owner):
            self._hidden = frame
        written_out = "<" not in name  # no comprehension, and nothing that a dataclass has generated
        if written_out and not self._is_table_of_inbox(owner) and _is_of_interest(frame, owner):
            self._add(name)

    def _begin(self, frame: FrameType, name: str, owner: object) -> None:
        """A driver calls the server."""
        if not isinstance(owner, Server) or name not in (*ROUND, "Server.start_model"):
            return
        if name == "Server.receive" and not self._is_open:
            self._is_open = True
            self.rounds.append({})
        if self._is_open:
            self._root = frame

    def _add(self, name: str) -> None:
        assert self._root is not None
        if self._root.f_code.co_qualname in ROUND:
            self.rounds[-1].setdefault(name)
        elif len(self.rounds) > 1:
            self.start_model.add(name)

    def _is_table_of_inbox(self, owner: object) -> bool:
        """Whether it is the table in which an inbox holds its rows, which a checkpoint writes like every other."""
        if isinstance(owner, Inbox) and owner._rows not in self._inboxes:
            self._inboxes.append(owner._rows)
        return any(owner is table for table in self._inboxes)


def _is_of_interest(frame: FrameType, owner: object) -> bool:
    return isinstance(owner, SOURCES) or frame.f_globals.get("__name__", "").startswith(ROOMS)


def simulated(folder: Path, protocol: str, **more: Any) -> Recorder:
    """What a simulation enters."""
    given: dict[str, Any] = {"protocol": protocol, "checkpoint_every": 1, **COMMON, **PROTOCOLS[protocol], **more}
    experiment, recorder = Experiment(Settings.of("boston", **given)), Recorder()
    writer = RunWriter.begin(folder / "simulated", experiment.settings)
    recorder.note(lambda: list(run_to_end(experiment, writer)))
    return recorder


def deployed(folder: Path, protocol: str, **more: Any) -> Recorder:
    """What a deployment enters."""
    given: dict[str, Any] = {"protocol": protocol, **COMMON, **PROTOCOLS[protocol], **more}
    harness, recorder = Harness(folder / "deployed", given), Recorder()
    recorder.note(harness.run)
    return recorder


def walk(recorder: Recorder, number: int = THE_ROUND) -> list[str]:
    """The functions that the updates of a round cross, in order of first entry."""
    return list(recorder.rounds[number - 1])


def shared(names: list[str]) -> list[str]:
    """Without the source of updates and what only a deployment needs."""
    sources = tuple(f"{source.__name__}." for source in SOURCES)
    return [name for name in names if not name.startswith(sources) and name not in ONLY_DEPLOYED]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_simulated_and_deployed_updates_cross_the_same_functions(tmp_path: Path, protocol: str) -> None:
    one, other = simulated(tmp_path, protocol), deployed(tmp_path, protocol)
    assert len(one.rounds) == len(other.rounds) == COMMON["rounds"]
    assert shared(walk(one)) == shared(walk(other))
    trained = {"LocalTraining.updates", "LocalTraining.state", "LocalTraining.tables"}
    assert set(walk(one)) - set(shared(walk(one))) == trained
    sent = {"Inbox.put", "Inbox.updates", "Inbox.state", "Inbox.tables"}
    assert set(walk(other)) - set(shared(walk(other))) == sent | set(ONLY_DEPLOYED)
    ever = [{name for number in range(2, 7) for name in shared(walk(run, number))} for run in (one, other)]
    assert ever[0] == ever[1]  # in no round after the first, in which deployed clients join
    assert not one.start_model
    assert {"Server.start_model", "Learner.start_of"} <= other.start_model
    assert other.start_model - START_MODEL <= ever[1]


@pytest.mark.slow
def test_a_version_that_is_made_in_mid_round_crosses_no_other_functions(tmp_path: Path) -> None:
    """A simulation makes it when the round is committed, a deployment as soon as a device is to be sent it."""
    one = simulated(tmp_path, "fedbuff", buffer_size=1)
    other = deployed(tmp_path, "fedbuff", buffer_size=1)
    assert other.start_model >= START_MODEL | {"Learner._make_versions", "Inbox.updates", "Buffer.step", "Versions.add"}
    made = other.start_model - START_MODEL
    assert set(shared(sorted(made))) <= set(shared(walk(one)))
    assert set(shared(walk(other) + sorted(made))) == set(shared(walk(one)))


@pytest.mark.slow
def test_the_list_names_every_station(tmp_path: Path) -> None:
    """It would be no use if nothing was noted."""
    found = walk(deployed(tmp_path, "safa"))
    stations = [
        "Server.receive", "Protocol.receive", "Protocol._judge", "Safa._enough", "Safa._accept", "Inbox.put",
        "Server.close_round", "Protocol.close_round", "Safa._settle", "Server.commit", "Learner.apply",
        "Learner._make_versions", "Learner._updates", "Inbox.updates", "ModelCache.step", "ModelCache._aggregate",
        "Versions.add", "RoundRecord.to_json", "Server.checkpoint",
    ]  # fmt: skip
    assert [name for name in found if name in stations] == stations


def main(protocols: list[str]) -> None:
    """Print the lists side by side; where they part, a line is marked."""
    for protocol in protocols:
        with tempfile.TemporaryDirectory() as folder:
            one, other = (walk(run(Path(folder), protocol)) for run in (simulated, deployed))
        print(f"\n{protocol}, round {THE_ROUND}\n  {'simulated':40}deployed")
        for line in side_by_side(one, other):
            print(line)


def side_by_side(one: list[str], other: list[str]) -> list[str]:
    """Two lists in columns; what is in one of them only has a line of its own."""
    lines: list[str] = []
    common = [name for name in one if name in other]
    for name in [*common, None]:
        only = [_before(names, name) for names in (one, other)]
        lines += [f"* {left:40}{right}".rstrip() for left, right in zip_longest(*only, fillvalue="")]
        lines += [f"  {name:40}{name}"] if name else []
        one, other = (names[len(skipped) + 1 :] for names, skipped in zip((one, other), only, strict=True))
    return lines


def _before(names: list[str], name: str | None) -> list[str]:
    return names[: names.index(name)] if name in names else names


if __name__ == "__main__":
    main(sys.argv[1:] or list(PROTOCOLS))
