"""What a deployment says of itself in mid-round."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from safa.deploy.exchange.messages import Reply, TrainRequest, Update
from safa.deploy.exchange.status import StatusFile
from safa.runs.folder import STATUS, STATUS_FORMAT
from tests.deploy.harness import Harness


def test_the_status_shows_the_quota_filling_and_every_client(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"fraction": 1.0, "rounds": 3})
    harness.peers[3].delay_s = 30.0
    harness.run(until=lambda: harness.coordinator.protocol.is_open)
    began = harness.coordinator.status()
    harness.run(until=lambda: harness.coordinator.status()["accepted"] == 3)
    status = harness.coordinator.status()
    assert began["accepted"] == 0
    assert (status["format"], status["round"], status["is_open"], status["quota"]) == (STATUS_FORMAT, 1, True, 4)
    assert status["deadline_s"] == status["opened_s"] + 60.0 > status["now_s"]
    assert [client["name"] for client in status["clients"]] == [f"client-{n}" for n in range(4)]
    assert [client["at_work"] for client in status["clients"]] == [False, False, False, True]
    assert [client["lag"] for client in status["clients"]] == [0, 0, 0, 0]  # also of those whose update is in
    assert all(client["online"] and client["last_seen_s"] == status["now_s"] for client in status["clients"])
    harness.peers[3].is_online = False
    harness.step()
    gone = harness.coordinator.status()
    assert [client["online"] for client in gone["clients"]] == [True, True, True, False]
    assert gone["now_s"] - gone["clients"][3]["last_seen_s"] == 1.0
    harness.coordinator.stop()


def test_the_status_counts_what_was_refused_and_who_is_blocked(tmp_path: Path) -> None:
    def bad(_: TrainRequest, reply: Reply) -> Reply:
        return replace(reply, encoded=replace(reply.encoded, tensors={})) if isinstance(reply, Update) else reply

    harness = Harness(tmp_path, {"rounds": 5, "fraction": 1.0}, {"rejections_allowed": 2})
    harness.peers[0].forge = bad
    harness.run(until=lambda: bool(harness.coordinator.screening.blocked))
    status = harness.coordinator.status()
    blocked = [client["name"] for client in status["clients"] if client["blocked"]]
    assert blocked == ["client-0"]
    assert status["clients"][0]["refused"] == sum(status["refusals"].values()) == 2
    harness.coordinator.stop()


def test_the_file_is_written_once_a_second_and_never_fails(tmp_path: Path) -> None:
    file, asked = StatusFile(tmp_path), []

    def status() -> dict[str, int]:
        asked.append(1)
        return {"asked": len(asked)}

    for now in (10.0, 10.5, 10.9, 11.0, 11.5):
        file.write(status, now=now)
    assert json.loads((tmp_path / STATUS).read_text()) == {"asked": 2}
    StatusFile(tmp_path / "nowhere").write(status, now=0.0)
    assert [path.name for path in tmp_path.iterdir()] == [STATUS]
