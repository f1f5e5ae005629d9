"""Who is let in, and who is not: real SuperLinks and SuperNodes, TLS and keys, all on the loopback interface."""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from safa import Settings
from safa.deploy.exchange.files import finished_rounds
from safa.deploy.exchange.options import Options
from safa.deploy.flower.internals import environment
from safa.deploy.flower.ports import LOOPBACK, free_port
from safa.deploy.launcher.checks import check_keys, unreachable
from safa.deploy.launcher.keys import make_keys
from safa.deploy.launcher.link import FLOWER, Link, begin
from safa.deploy.launcher.node import Node
from safa.deploy.launcher.processes import Processes, process_tree
from safa.deploy.launcher.superlink import SuperLink
from safa.errors import SafaError

_CONNECTED, _RETRIES, _VERIFY = "SuperNode ID:", "Connection attempt failed", "certificate verify failed"


def wait_for(what: Callable[[], object], *logs: Path, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            pytest.fail("\n".join(f"{log}:\n{text(log)}" for log in logs))
        time.sleep(0.1)


def text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def answer(port: int, path: str, ca: Path) -> int:
    """The status that a listener answers a request with."""
    try:
        request = urllib.request.Request(f"https://{LOOPBACK}:{port}{path}", method="POST", data=b"")
        with urllib.request.urlopen(request, context=ssl.create_default_context(cafile=str(ca))) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as problem:
        return problem.code


class Trial:
    """A server with keys, on a port of its own, and SuperNodes that come to it."""

    def __init__(self, processes: Processes, folder: Path, keys: Path) -> None:
        settings = Settings.of("boston", clients=2, rounds=1000, epochs=1, fraction=0.5)
        link = Link(host=LOOPBACK, port=free_port(), keys=str(keys))
        begin(folder, settings, Options(), link)
        self.processes, self.folder, self.keys = processes, folder, keys
        self.server = SuperLink(processes, folder, link)
        self.server.open()

    def node(self, name: str, *, as_: str = "", ca: Path | None = None, key: Path | None = None) -> Node:
        folder = self.folder / FLOWER / (as_ or name)
        server = f"{LOOPBACK}:{self.server.port}"
        return Node(name=name, server=server, state=folder / "state", folder=folder, ca=ca, key=key, partition=0)

    def refused(self, node: Node, why: str) -> None:
        """It ends by itself, and says why."""
        process = node.start(self.processes)
        wait_for(lambda: process.poll() is not None, node.log)
        assert process.returncode != 0
        assert why in text(node.log)
        assert _CONNECTED not in text(node.log).rpartition("Starting Flower SuperNode")[2]


@pytest.mark.slow
def test_only_a_known_key_over_a_trusted_line_gets_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, strange, expired = (tmp_path / name for name in ("keys", "strange", "expired"))
    make_keys(keys, hosts=[], clients=["ann", "bob"])
    make_keys(strange, hosts=[], clients=["eve"])
    make_keys(expired, hosts=[], clients=["ann"], days=-1)
    ca = keys / "ca.crt"
    with Processes(environment(tmp_path / "run" / FLOWER / "home")) as processes:
        trial = Trial(processes, tmp_path / "run", keys)
        register = trial.server.register
        assert register is not None
        assert register.look() == []
        trial.server.submit()

        ann, bob = (trial.node(name, ca=ca, key=keys / "clients" / f"{name}.key") for name in ("ann", "bob"))
        honest = [node.start(processes) for node in (ann, bob)]
        plain = trial.node("ann", as_="plain")
        retrying = plain.start(processes)
        trial.refused(trial.node("ann", as_="keyless", ca=ca), "[code: 2001]")
        trial.refused(trial.node("ann", as_="unknown", ca=ca, key=strange / "clients" / "eve.key"), "[code: 2004]")
        trial.refused(trial.node("bob", as_="distrusting", ca=strange / "ca.crt", key=bob.key), _VERIFY)
        assert "certificate is not trusted" in unreachable(plain.server, strange / "ca.crt")
        assert unreachable(plain.server, ca) == ""
        wait_for(lambda: text(plain.log).count(_RETRIES) > 1, plain.log)
        assert _CONNECTED not in text(plain.log)
        processes.stop([retrying], timeout_s=5)

        log = trial.folder / "server.log"
        wait_for(lambda: finished_rounds(trial.folder) > 0 and "bob is new" in text(log), log, ann.log, bob.log)
        assert _CONNECTED in text(ann.log)
        assert {line.split()[2] for line in text(log).splitlines() if " is new" in line} == {"ann", "bob"}

        # The public port serves nothing else: no registering of keys, no starting of runs, no list of nodes.
        for path in ("/v1/control/register-node", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs"):
            assert answer(trial.server.port, path, ca) == 404
        assert answer(trial.server.inner_port, "/v1/control/register-node", ca) != 404
        assert answer(trial.server.port, "/v1/fleet/pull-messages", ca) != 404

        (keys / "clients" / "bob.pub").unlink()
        assert register.look() == []  # it may be on the way to be replaced
        assert register.look() == ["the key of bob is revoked"]
        wait_for(lambda: honest[1].poll() is not None, bob.log)
        trial.refused(bob, "[code: 2004]")
        before = finished_rounds(trial.folder)
        wait_for(lambda: finished_rounds(trial.folder) > before, log, ann.log)  # the others continue
        assert honest[0].poll() is None

        with pytest.raises(SafaError, match="expired on"):
            check_keys(expired)
        for module in ("link", "superlink"):  # a server that does not care
            monkeypatch.setattr(f"safa.deploy.launcher.{module}.check_keys", lambda _: None)
        other = Trial(processes, tmp_path / "other", expired)
        assert "certificate has expired" in unreachable(f"{LOOPBACK}:{other.server.port}", expired / "ca.crt")
        late = other.node("ann", ca=expired / "ca.crt", key=expired / "clients" / "ann.key")
        other.refused(late, "certificate has expired")
    assert process_tree(processes.token) == set()
