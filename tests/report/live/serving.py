"""Runs that are being written, and a server that shows them, for the tests of this package."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from safa.analysis import measure
from safa.protocol.records import RoundRecord
from safa.report.live import LiveServer
from safa.runs import RunWriter
from safa.runs.settings import Settings
from tests.report.making import learnt, simulated


def records(rounds: int = 12, protocol: str = "safa") -> list[RoundRecord]:
    return list(learnt(simulated(rounds=rounds, protocol=protocol)).held_records)


class Written:
    """A run of which a test writes one round after the other."""

    def __init__(self, folder: Path, done: int, protocol: str) -> None:
        self._all, self.settings = records(12, protocol), Settings.of("digits", rounds=12, protocol=protocol)
        self._left = iter(self._all)
        self.writer = RunWriter.begin(folder, self.settings)
        self.add(done)

    def add(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.writer.add(next(self._left))

    def finish(self) -> None:
        for record in self._left:
            self.writer.add(record)
        self.writer.close(measure(self._all, self.settings.metrics))


@contextmanager
def written(folder: Path, done: int = 0, protocol: str = "safa") -> Iterator[Written]:
    """A run that is being written until the block is left."""
    run = Written(folder, done, protocol)
    try:
        yield run
    finally:
        run.writer.close()


@contextmanager
def serving(folder: Path, *, token: str | None = None, host: str = "127.0.0.1") -> Iterator[str]:
    """A server of what is under a folder; its address."""
    server = LiveServer(folder, host=host, token=token, reproduction=lambda _: "<p>reproduced</p>")
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.address
    finally:
        server.stop()
        thread.join()


class Answer:
    """What a server said."""

    def __init__(self, found: http.client.HTTPResponse) -> None:
        self.status, self.headers = found.status, found.headers
        self.text = found.read().decode()


def ask(address: str, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
    """Ask for a path just as it is: no library tidies it up. The host is 127.0.0.1 unless a header says otherwise."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(address).port or 0, timeout=20)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in ({"Host": f"127.0.0.1:{urlsplit(address).port}"} | dict(headers or {})).items():
            if value:
                connection.putheader(name, value)
        connection.endheaders()
        return Answer(connection.getresponse())
    finally:
        connection.close()
