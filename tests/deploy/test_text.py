"""Text from others in the log: one printable line, whatever they wrote."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, RecordDict

from safa.deploy.exchange.messages import Failure
from safa.deploy.exchange.text import printable
from safa.deploy.flower.records import read_join_reply, read_train_reply
from safa.deploy.flower.server_app import _logged

NASTY = "no\n2026-01-01T00:00:00Z INFO all is well\r\x1b[2J\x1b]0;title\x07 \u202eevil\u2066 \u200b\ud800\x85\u2028\x00"


def test_what_is_not_plainly_visible_is_written_as_an_escape() -> None:
    said = printable(NASTY)
    assert said.isprintable()
    assert len(said.splitlines()) == 1
    assert said.startswith("no\\n2026")
    assert "\\x1b[2J" in said
    assert "\\u202eevil\\u2066" in said
    assert printable(said) == said
    assert printable("Zoë, 機器一: n_k = 3") == "Zoë, 機器一: n_k = 3"


@pytest.mark.parametrize("read", [read_train_reply, read_join_reply])
def test_why_a_device_failed_is_one_printable_line_of_bounded_length(read: object) -> None:
    why = (NASTY.replace("\ud800", "") * 100)[:20_000]
    content = RecordDict({"safa": ConfigRecord({"message": "Failure", "why": why})})
    failure = read(content)  # type: ignore[operator]
    assert isinstance(failure, Failure)
    assert failure.why.isprintable()
    assert len(failure.why) <= 500
    assert Failure(why=NASTY).why == printable(NASTY)


def test_the_servers_log_has_one_line_for_every_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("safa.deploy")
    monkeypatch.setattr(log, "propagate", False)  # not every reporter of tests can write what no encoding can
    with _logged(tmp_path):
        log.warning("lost: %s, code %d: %s", "ann", 3, NASTY)
        log.info("all is well")
        try:
            raise RuntimeError(NASTY)
        except RuntimeError:
            log.exception("the server stopped")
    lines = (tmp_path / "server.log").read_text(encoding="utf-8").split("\n")
    assert lines[0].endswith("Z WARNING lost: ann, code 3: " + printable(NASTY))
    assert lines[1].endswith("Z INFO all is well")
    assert lines[2].endswith("Z ERROR the server stopped")
    assert lines[3] == "Traceback (most recent call last):"
    assert all(line.isprintable() for line in lines)
