"""Attacks on real SuperLinks and SuperNodes, by whoever has a key or reaches a port; the honest continue meanwhile."""

from __future__ import annotations

import json
import socket
import ssl
import stat
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from safa import Settings, simulate
from safa.deploy.exchange.files import finished_rounds
from safa.deploy.exchange.options import Options
from safa.deploy.flower.internals import environment
from safa.deploy.flower.ports import LOOPBACK, free_port
from safa.deploy.launcher import superlink
from safa.deploy.launcher.keys import make_keys
from safa.deploy.launcher.link import FLOWER, Link, begin
from safa.deploy.launcher.node import Node
from safa.deploy.launcher.processes import Processes
from safa.protocol.records import Verdict
from safa.runs import load_run, write_atomically
from tests.deploy.real import listens, records, running, safa, wait_for
from tests.deploy.sender import Peer, Sender, request_in, serve

SETTINGS = Settings.of("boston", clients=2, rounds=1000, epochs=1, fraction=0.5)


def open_to_others(folder: Path) -> list[str]:
    """The files and folders, this one included, that other users can read."""
    found = [folder, *folder.rglob("*")]
    return [str(path) for path in found if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_the_folder_of_a_run_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    begin(folder, SETTINGS, Options(), Link(host=LOOPBACK, port=0, keys=None))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert open_to_others(folder) == []
    assert {path.name for path in folder.iterdir()} == {FLOWER, "config.toml", "deploy.toml"}


def test_a_large_model_gets_the_room_that_its_parts_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safa.deploy.launcher.link._LARGE_BYTES", 40)  # the model of boston has 13 numbers
    link = Link(host=LOOPBACK, port=0, keys=None)
    begin(tmp_path / "run", SETTINGS, Options(), link)
    assert Options.read(tmp_path / "run" / "deploy.toml").max_mb == 1.000104  # what 0 stands for
    begin(tmp_path / "other", SETTINGS, Options(max_mb=7.0), link)
    assert Options.read(tmp_path / "other" / "deploy.toml").max_mb == 7.0


# -- replies ---------------------------------------------------------------------------------------------------------


@contextmanager
def attackers(address: str, behaviours: Sequence[str]) -> Iterator[dict[str, list[int]]]:
    """Clients that answer every request over and over again, each called by what it does; what the SuperLink says."""
    over = threading.Event()
    said: dict[str, list[int]] = {behaviour: [] for behaviour in behaviours}

    def live(behaviour: str) -> None:
        with suppress(httpx.TransportError), Sender(address, poll_s=0.5) as sender:  # the server ends before they do
            peer = Peer(sender, behaviour, behaviour)
            while not over.is_set():
                message = sender.receive(1.0)
                if message is None:
                    continue
                for _ in range(1 if request_in(message) is None else 50):
                    try:
                        peer.answer(message)
                    except httpx.HTTPStatusError as problem:
                        said[behaviour].append(problem.response.status_code)
                    if over.wait(0.1):
                        break

    threads = [threading.Thread(target=live, args=(behaviour,)) for behaviour in behaviours]
    for thread in threads:
        thread.start()
    try:
        yield said
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _wait_for_rounds(run: Path, count: int, server: subprocess.Popen[bytes]) -> None:
    """Wait for rounds one after the other: how long all of them take together is not what is tested."""
    log = run / "server.log"
    wait_for(lambda: log.exists() and "sent: " in log.read_text(), server, log=run.parent / "log")
    for number in range(1, count + 1):
        wait_for(partial(_has_rounds, run, number), server, log=log)


def _has_rounds(run: Path, number: int) -> bool:
    return len(records(run)) >= number


@pytest.mark.slow
def test_a_reply_of_19000_parts_and_one_that_flower_cannot_read_stop_nobody(tmp_path: Path) -> None:
    run, log, port = tmp_path / "run", tmp_path / "log", str(free_port())
    settings = ("--clients", "2", "--rounds", "3", "--fraction", "0.5", "--protocol", "fedasync", "--seed", "1")
    server_log = run / "server.log"
    with running() as processes:
        link = ("--host", "127.0.0.1", "--port", port, "--insecure", "--quiet", "--out", str(run), "--start-with", "4")
        server = safa(processes, log, "deploy", "server", "boston", *settings, *link)
        for part in range(2):
            where = ("--server", f"127.0.0.1:{port}", "--insecure", "--state", str(tmp_path / f"honest-{part}"))
            named = ("--name", f"honest-{part}", "--partition", str(part))
            safa(processes, tmp_path / f"honest-{part}.log", "deploy", "client", *where, *named)
        wait_for(lambda: listens(int(port)), server, log=log)
        with attackers(f"127.0.0.1:{port}", ("parts", "timeless")) as said:
            _wait_for_rounds(run, 3, server)
            assert server.wait(60) == 0, log.read_text()
    assert len(said["parts"]) > 10
    assert set(said["parts"]) <= {413, 403}  # 403: the run has ended
    assert set(said["timeless"]) <= {400, 403}
    assert "SuperLink fails" not in server_log.read_text()
    finished = load_run(run)
    roster = finished.roster()
    assert roster is not None
    names = [member["name"] for member in roster]
    assert sorted(names) == ["honest-0", "honest-1", "parts", "timeless"]
    for record in finished.records():
        taken = record.client[record.verdict != Verdict.REFUSED].tolist()
        assert {names[client] for client in taken} <= {"honest-0", "honest-1"}
    assert len(list(finished.records())[-1].picked) > 0
    for folder in (run, tmp_path / "honest-0", tmp_path / "honest-1"):
        assert open_to_others(folder) == []


@pytest.mark.slow
def test_a_client_that_declares_a_million_samples_does_not_take_the_model_over_and_can_be_expelled(
    tmp_path: Path,
) -> None:
    run, log, port = tmp_path / "run", tmp_path / "log", str(free_port())
    settings = ("--clients", "2", "--rounds", "4", "--fraction", "1", "--round-limit", "60", "--seed", "1")
    server_log, over = run / "server.log", threading.Event()

    def live() -> None:
        with suppress(httpx.TransportError), Sender(f"127.0.0.1:{port}", poll_s=0.5) as sender:
            serve(Peer(sender, "eve", "harmful", size=1e6), is_over=over.is_set)

    with running() as processes:
        link = ("--host", "127.0.0.1", "--port", port, "--insecure", "--quiet", "--out", str(run), "--start-with", "3")
        server = safa(processes, log, "deploy", "server", "boston", *settings, *link, "--rejections-allowed", "1000")
        for part in range(2):
            where = ("--server", f"127.0.0.1:{port}", "--insecure", "--state", str(tmp_path / f"honest-{part}"))
            named = ("--name", f"honest-{part}", "--partition", str(part))
            safa(processes, tmp_path / f"honest-{part}.log", "deploy", "client", *where, *named)
        wait_for(lambda: listens(int(port)), server, log=log)
        eve = threading.Thread(target=live)
        eve.start()
        try:
            _wait_for_rounds(run, 2, server)
            write_atomically(run / "expel.json", b'["eve"]')
            wait_for(lambda: "expelled: eve" in server_log.read_text(), server, log=server_log)
            _wait_for_rounds(run, 4, server)
            assert server.wait(60) == 0, log.read_text()
        finally:
            over.set()
            eve.join()
    assert "eve declared n_k = 1e+06, which counts as" in server_log.read_text()
    rounds = records(run)
    sizes = {client: size for record in rounds for client, size in zip(record.joined, record.joined_size, strict=True)}
    number = max(sizes, key=lambda client: sizes[client])
    assert [number in record.left for record in rounds].count(True) == 1
    assert not any(number in record.picked for record in rounds)
    without = simulate("boston", clients=2, rounds=4, fraction=1.0, crash_rate=0.0, seed=1)
    reference, found = (
        [record.loss for record in given if record.loss is not None] for given in (without.records(), rounds)
    )
    assert len(reference) == len(found) == 4
    assert max(found) < 2 * reference[0]
    assert found[-1] < 2 * reference[-1]


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_200_slow_connections_are_closed_and_others_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        superlink, "PROGRAM", ("-c", f"from {superlink.PROGRAM[1]} import superlink; superlink(request_s=4.0)")
    )
    keys = tmp_path / "keys"
    make_keys(keys, hosts=[], clients=["ann"])
    trust = ssl.create_default_context(cafile=str(keys / "ca.crt"))
    link = Link(host=LOOPBACK, port=free_port(), keys=str(keys))
    begin(tmp_path / "run", SETTINGS, Options(), link)
    half = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\nx: "
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(environment(tmp_path / "run" / FLOWER / "home")))
        superlink.SuperLink(processes, tmp_path / "run", link).open()
        plain = [stack.enter_context(socket.create_connection((LOOPBACK, link.port))) for _ in range(200)]
        lines = plain[:100]  # which do not even say hello
        for line in plain[100:]:
            spoken = stack.enter_context(trust.wrap_socket(line, server_hostname=LOOPBACK))
            spoken.sendall(half)
            lines.append(spoken)
        honest = stack.enter_context(httpx.Client(verify=trust))
        still, until = set(lines), time.monotonic() + 60
        for line in lines:
            line.settimeout(0.001)
        while still and time.monotonic() < until:
            assert honest.post(f"https://{LOOPBACK}:{link.port}/v1/fleet/pull-messages", content=b"").status_code == 415
            for line in list(still):
                with suppress(OSError):
                    line.sendall(b"x")  # a byte now and then
                try:
                    if line.recv(1000) == b"":
                        still.discard(line)
                except TimeoutError:
                    pass
                except OSError:
                    still.discard(line)
        assert not still


# -- apps ------------------------------------------------------------------------------------------------------------

_FOREIGN = """[project]
name = "foreign"
version = "1.0.0"
description = "Somebody else's."
license = {file = "LICENSE"}
dependencies = ["flwr>=1.41,<2"]

[tool.flwr.app]
publisher = "eve"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "foreign.server:app"
clientapp = "foreign.client:app"
"""
_FOREIGN_SERVER = """
import json, pathlib, time
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=nodes[0], message_type="train")], timeout=120)
    told = [reply.error.code, reply.error.reason] if reply.has_error() else ["executed", ""]
    part = pathlib.Path(FOLDER, "told.part")
    part.write_text(json.dumps(told))
    part.rename(part.with_name("told"))
"""
_FOREIGN_CLIENT = """
import pathlib
from flwr.clientapp import ClientApp
from flwr.app import Message, RecordDict
pathlib.Path(FOLDER, "executed").write_text("here")
app = ClientApp()

@app.train()
def train(message, context):
    return Message(RecordDict(), reply_to=message)
"""


@pytest.mark.slow
def test_a_device_executes_nothing_of_another_app_and_serves_ours_afterwards(tmp_path: Path) -> None:
    keys, run, app = tmp_path / "keys", tmp_path / "run", tmp_path / "eve"
    make_keys(keys, hosts=[], clients=["ann"])
    (app / "foreign").mkdir(parents=True)
    (app / "LICENSE").write_text("none\n")
    (app / "pyproject.toml").write_text(_FOREIGN)
    (app / "foreign" / "__init__.py").touch()
    place = f"FOLDER = {str(tmp_path)!r}\n"
    (app / "foreign" / "server.py").write_text(place + _FOREIGN_SERVER)
    (app / "foreign" / "client.py").write_text(place + _FOREIGN_CLIENT)
    link = Link(host=LOOPBACK, port=free_port(), keys=str(keys))
    begin(run, SETTINGS, Options(), link)
    with Processes(environment(run / FLOWER / "home")) as processes:
        server = superlink.SuperLink(processes, run, link)
        server.open()
        assert server.register is not None
        server.register.look()
        folder = tmp_path / "ann"
        ann = Node(
            name="ann",
            server=f"{LOOPBACK}:{link.port}",
            state=folder / "state",
            folder=folder,
            ca=keys / "ca.crt",
            key=keys / "clients" / "ann.key",
            partition=0,
        )
        device = ann.start(processes)
        (answer,) = server.flwr(["run", str(app), "safa"])
        assert answer.get("run-id"), answer
        wait_for((tmp_path / "told").exists, device, log=ann.log)
        code, reason = json.loads((tmp_path / "told").read_text())
        assert (code, reason) == (7, "The FAB could not be verified."), reason
        assert "Rejected the app of a run: it contains other files than ours" in ann.log.read_text()
        server.submit()
        wait_for(lambda: finished_rounds(run) > 0, device, log=run / "server.log")
        assert not (tmp_path / "executed").exists()
        assert {path.name.rpartition(".")[0] for path in (folder / "apps").iterdir()} == {"safa.safa-deployment.1.0.0"}
        assert open_to_others(folder) == []
