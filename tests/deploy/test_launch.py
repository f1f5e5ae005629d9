"""Flower's programs: started, followed and stopped. Real processes where it matters, as few as possible."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, cast

import pytest

from safa import Settings, load_run, run_rounds
from safa.cli.deploy import output
from safa.cli.program import main
from safa.deploy.exchange.files import EXPEL, LOG, finished_rounds
from safa.deploy.exchange.options import Options
from safa.deploy.flower.internals import environment
from safa.deploy.flower.ports import LOOPBACK, bound_socket, free_port
from safa.deploy.launcher import processes
from safa.deploy.launcher.checks import clock_fault, is_loopback, unreachable, write_fault
from safa.deploy.launcher.follow import ClientErrors, exit_reason, follow_run, last_line, run_events
from safa.deploy.launcher.keys import add_client, make_keys
from safa.deploy.launcher.link import FLOWER, Link, begin, begin_local
from safa.deploy.launcher.processes import STARTED, Processes, Supervised, process_tree
from safa.deploy.launcher.register import Register
from safa.deploy.launcher.superlink import SuperLink
from safa.errors import SafaError
from safa.experiments.replay import replay
from safa.protocol.records import RoundRecord
from safa.runs import write_config
from safa.runs.lock import alone, hold_launcher, is_launched
from tests.programs import MARK, left_behind

Capture = pytest.CaptureFixture[str]

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({!r}, 'w').close(); time.sleep(600)"
)
PARENT = "import subprocess, sys, time; subprocess.Popen({!r}, start_new_session=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def wait_for(what: Callable[[], object], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def with_grandchild(sign: Path) -> list[str]:
    """A program that starts another in a session of its own, which does not heed SIGTERM."""
    return [sys.executable, "-c", PARENT.format([sys.executable, "-c", STUBBORN.format(str(sign))])]


def at_work_in(folder: Path) -> list[str]:
    """The programs that Flower's home in a folder is the home of."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"FLWR_HOME={folder}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_everything_that_was_started_is_stopped_also_after_an_error(tmp_path: Path) -> None:
    starter = Processes()
    began = time.monotonic()

    def fail() -> None:
        nonlocal began
        with starter:
            starter.start(with_grandchild(tmp_path / "up"), log=tmp_path / "log")
            wait_for((tmp_path / "up").exists)
            assert len(starter.alive()) == 2
            began = time.monotonic()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert process_tree(starter.token) == set()
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_nothing_outlives_the_one_that_started_it_and_was_killed(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from safa.deploy.launcher.processes import Processes
with Processes() as processes:
    processes.start({with_grandchild(tmp_path / "up")!r}, log=Path("log"))
    print(processes.token, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        token = starter.stdout.readline().strip()
        try:
            wait_for((tmp_path / "up").exists)
            assert len(process_tree(token)) == 2
        finally:
            starter.kill()
    wait_for(lambda: not process_tree(token), seconds=6)
    wait_for(lambda: not any(token in line for line in left_behind(os.environ[MARK]).values()))  # who saw to that


def test_a_process_is_found_by_its_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)", "a mark", "another"]
    with Processes() as processes:
        assert not processes.is_running("a mark")
        processes.start(command, log=tmp_path / "log")
        wait_for(lambda: processes.is_running("a mark", "another"))
        assert not processes.is_running("a mark", "a third")
        with monkeypatch.context() as without:
            without.setattr("safa.deploy.launcher.processes._PROC", tmp_path / "none")
            assert processes.is_running("a third"), "it is not known"


def test_a_process_whose_environment_cannot_be_read_is_found_by_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Processes() as starter:
        parent = starter.start(with_grandchild(tmp_path / "up"), log=tmp_path / "log")
        wait_for((tmp_path / "up").exists)
        everything = process_tree(starter.token)
        readable = processes._environment
        monkeypatch.setattr(processes, "_environment", lambda pid: readable(pid) if pid == parent.pid else [])
        assert process_tree(starter.token) == everything
        assert len(everything) == 2
        for pid in everything:
            os.kill(pid, signal.SIGKILL)


def test_programs_are_started_inside_of_the_context_only(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="inside of"):
        Processes().start(["true"], log=tmp_path / "log")


def test_the_environment_keeps_flower_off_the_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    found = environment(tmp_path)
    assert found["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)
    assert {name: value for name, value in found.items() if name.startswith("FLWR_")} == {
        "FLWR_HOME": str(tmp_path),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


class Program:
    """Stands for a process that ends when the test says so."""

    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


def test_a_program_is_started_again_after_pauses_that_double_up_to_a_minute() -> None:
    now = [0.0]
    told: list[str] = []
    kept = Supervised(
        lambda: cast("subprocess.Popen[bytes]", Program()), told.append, lambda: "no key", clock=lambda: now[0]
    )
    kept.tick()
    kept.tick()
    assert told == [STARTED]
    starts = []
    for _ in range(7):
        cast(Any, kept.process).returncode = 1
        kept.tick()
        begin_s = now[0]
        while kept.process is None:
            now[0] += 1
            kept.tick()
        starts.append(now[0] - begin_s)
    assert starts == [2, 4, 8, 16, 32, 60, 60]
    assert told[1] == "ended with exit code 1 (no key); restarting in 2 s"
    now[0] += 61  # it has been well for a while
    cast(Any, kept.process).returncode = 0
    kept.tick()
    assert told[-1].endswith("restarting in 2 s")


# -- following a run -------------------------------------------------------------------------------------------------


def lines(count: int) -> list[bytes]:
    return [record.to_json().encode() + b"\n" for record in run_rounds(Settings.of("boston", rounds=count))]


def test_a_run_is_followed_line_by_whole_line(tmp_path: Path) -> None:
    written = lines(4)
    rounds, log = tmp_path / "rounds.jsonl", tmp_path / LOG
    rounds.write_bytes(b"".join(written[:2]))
    log.write_text("2026-11-15T14:00:00Z ERROR an old story\n")

    def steps() -> Iterator[None]:
        with log.open("a") as file:
            at = "2026-11-15T14:00:01Z"
            file.write(f"{at} INFO bob is new: client 1\n{at} INFO sent: bob\n{at} WARNING lost: ann\nTraceback\n")
        os.truncate(rounds, len(written[0]))  # it continues after round 1
        yield
        with rounds.open("ab") as file:
            file.write(written[1] + written[2][:9])
        yield
        with rounds.open("ab") as file:
            file.write(written[2][9:])
        yield
        with rounds.open("ab") as file:
            file.write(written[3])
        (tmp_path / "summary.json").write_text("{}")
        yield

    step = steps()
    events = list(run_events(tmp_path, lambda: False, sleep=lambda _: next(step)))
    assert events[:2] == ["bob is new: client 1", "warning: lost: ann"]
    assert [cast(RoundRecord, event).round for event in events[2:]] == [2, 3, 4]
    assert finished_rounds(tmp_path) == 4


def test_what_a_client_has_written_reaches_the_terminal_as_plain_text(tmp_path: Path) -> None:
    log, at = tmp_path / LOG, "2026-11-15T14:00:01Z"

    def say(_: float) -> None:
        log.write_text(f"{at} INFO \x1b[31mbob is new: client 1\n{at} WARNING lost: ann, \x1b]0;owned\x07\u202e\r!\n")
        (tmp_path / "rounds.jsonl").write_text('{"round": 1}\n[]\nnonsense\n')
        (tmp_path / "summary.json").write_text("{}")

    assert list(run_events(tmp_path, lambda: False, sleep=say)) == [
        "\\x1b[31mbob is new: client 1",
        "warning: lost: ann, \\x1b]0;owned\\x07\\u202e\\r!",
        *["warning: a line of rounds.jsonl is damaged"] * 3,
    ]


def test_a_line_on_the_terminal_is_one_line_without_escapes(capsys: Capture) -> None:
    output._Show(quiet=False)("ann tells: \x1b[2J\nall is well")
    assert capsys.readouterr().err == "ann tells: \\x1b[2J\\nall is well\n"


class Followed:
    """A server that stops at once."""

    def is_over(self) -> bool:
        return True

    def stop(self) -> None:
        pass

    def why(self, error: str) -> str:
        return error


@pytest.mark.parametrize(
    ("logged", "known", "reason"),
    [
        ("", "", ""),
        ("", "the SuperLink ended with exit code 3", ": the SuperLink ended with exit code 3"),
        ("INFO all is well\nWARNING lost: ann\nERROR no \x1b space\nWARNING x", "it", r": no \x1b space"),
    ],
)
def test_why_a_server_stopped(logged: str, known: str, reason: str, tmp_path: Path) -> None:
    class Stopped(Followed):
        def submit(self) -> None:
            lines = [f"2026-11-15T14:00:01Z {line}\n" for line in logged.splitlines()]
            (tmp_path / LOG).write_text("".join(lines))

        def why(self, error: str) -> str:
            return error or known

    with pytest.raises(SafaError, match=re.escape(f"the server stopped after round 0 of 100{reason} (")):
        follow_run(tmp_path, Settings.of("boston"), lambda _: None, server=Stopped(), also=lambda: None, kind="local")
    noted = [line.partition(" ")[2] for line in (tmp_path / LOG).read_text().splitlines()]
    assert noted == (logged.splitlines() or ([f"ERROR {known}"] if known else [])), "the log says it, too, and once"


def test_the_reason_is_the_last_line_of_the_log(tmp_path: Path) -> None:
    class Stopped(Followed):
        def submit(self) -> None:
            (tmp_path / LOG).touch()

        def stop(self) -> None:
            (tmp_path / LOG).write_text("2026-11-15T14:00:01Z WARNING the SuperLink fails; retrying\n")

        def why(self, error: str) -> str:
            return "the SuperLink was killed"

    with pytest.raises(SafaError, match="the SuperLink was killed"):
        follow_run(tmp_path, Settings.of("boston"), lambda _: None, server=Stopped(), also=lambda: None, kind="local")
    assert (tmp_path / LOG).read_text().endswith(" ERROR the SuperLink was killed\n")


def test_a_server_that_stops_before_the_end_is_an_error(tmp_path: Path) -> None:
    (tmp_path / LOG).touch()
    did: list[str] = []

    class Stopped(Followed):
        def submit(self) -> None:
            did.append("start")
            (tmp_path / "rounds.jsonl").write_bytes(lines(1)[0])

    told: list[RoundRecord | str] = []
    complaint = rf"stopped after round 1 of 9 \(see {tmp_path}/server.log\); resume it with safa deploy local --resume"
    with pytest.raises(SafaError, match=complaint):
        follow_run(
            tmp_path,
            Settings.of("boston", rounds=9),
            told.append,
            server=Stopped(),
            also=lambda: did.append("also"),
            kind="local",
        )
    assert did == ["also", "start", "also"]
    assert [cast(RoundRecord, event).round for event in told] == [1]


def test_why_a_supernode_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert exit_reason(log) == ""
    said = "INFO : Starting Flower SuperNode\nFailed to initialize the connection to the SuperLink.\n"
    log.write_text(f"{said}[code: 2001] SuperNode authentication is enabled.\n")
    assert exit_reason(log) == "the server wants a key"
    log.write_text("INFO : Starting Flower SuperNode\nINFO : SuperNode terminated gracefully.\nINFO: Shutting down\n")
    assert exit_reason(log) == "the server does not accept its signature: is its clock right, and its key not revoked?"
    log.write_text(f"{said}something new\n")
    assert exit_reason(log) == "something new"
    log.write_text(f"{said}[code: 2004] Failed.\nINFO : Starting Flower SuperNode\nINFO : terminated gracefully\n")
    assert exit_reason(log) == ""


def test_what_a_device_tells_the_server_is_found_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    said = ClientErrors(log)
    assert said.look() == []
    warning = "\x1b[93mWARNING \x1b[0m:   To the server: "
    log.write_text(f"INFO : received\n{warning}the disk is \x1b[1mfull\n{warning}the disk is \x1b[1mfull\n{warning}hal")
    assert said.look() == ["the disk is full"]
    with log.open("a") as file:
        file.write("f\x07\n")
    assert said.look() == ["half\\x07"]
    assert last_line(log) == "WARNING :   To the server: half\\x07"
    assert last_line(tmp_path / "none") == ""


@pytest.mark.parametrize(("ahead_s", "said"), [(0, ""), (-300, ""), (600, "600 s ahead of"), (-900, "900 s behind")])
def test_a_device_compares_its_clock_with_the_servers(ahead_s: int, said: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(int(time.time() - ahead_s))

        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer((LOOPBACK, 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        found = clock_fault(f"{LOOPBACK}:{server.server_port}", None)
        thread.join()
    assert bool(found) == bool(said)
    if said:
        off = int(found.partition(" ")[0])
        assert abs(off - abs(ahead_s)) <= 2
        assert found.partition(" ")[2].startswith(said.partition(" ")[2])
        assert found.endswith("up to 5 s ahead or 305 s behind: use NTP")
    assert clock_fault(f"{LOOPBACK}:{free_port()}", None) == ""


# -- keys ------------------------------------------------------------------------------------------------------------


class Flwr:
    """Stands for the `flwr` command and the SuperLink behind it."""

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}
        self.used: list[bytes] = []

    def __call__(self, *asked: Sequence[str]) -> list[dict[str, Any]]:
        return [self._register(*rest) if kind == "register" else self._unregister(*rest) for _, kind, *rest in asked]

    def _register(self, file: str, connection: str, name: str) -> dict[str, Any]:
        key = Path(file).read_bytes()
        if key in self.used:
            return {"success": False, "error-message": "Using SuperLink\n\n[code: 23] Public key already in use."}
        self.used.append(key)
        node = str(10**18 + len(self.used))
        self.nodes[node] = name.removeprefix("--name=")
        return {"success": True, "node-id": int(node)}

    def _unregister(self, node: str, connection: str) -> dict[str, Any]:
        found = self.nodes.pop(node, None)
        return {"success": True} if found else {"success": False, "error-message": "[code: 24] Node ID not found"}


def test_who_may_take_part_is_what_lies_in_the_folder_of_keys(tmp_path: Path) -> None:
    keys, nodes, registered = tmp_path / "keys", tmp_path / "nodes.json", tmp_path / "registered.json"
    make_keys(keys, hosts=[], clients=["ann", "-bob"])
    flwr = Flwr()

    def names() -> set[str]:
        assert json.loads(nodes.read_text()) == flwr.nodes
        return set(flwr.nodes.values())

    register = Register(keys, nodes, registered, flwr, "safa")
    assert register.look() == []
    assert names() == {"ann", "-bob"}
    add_client(keys, "cy")
    (keys / "clients" / "dan.pub").write_text("not a key")
    assert [line[:34] for line in register.look()] == ["the key of dan is not accepted: it"]
    assert names() == {"ann", "-bob", "cy"}
    assert register.look() == []  # told once

    old = (keys / "clients" / "ann.pub").read_bytes()
    (keys / "clients" / "ann.pub").unlink()
    assert register.look() == []
    (keys / "clients" / "ann.pub").write_bytes(old)
    assert register.look() == []  # it was not gone for good
    add_client(keys, "ann", force=True)
    assert register.look() == []
    assert register.look() == ["the key of ann is revoked"]
    assert names() == {"ann", "-bob", "cy"}
    (keys / "clients" / "eve.pub").write_bytes(old)
    assert register.look() == ["the key of eve is not accepted: it was revoked before, or is another client's"]

    (keys / "clients" / "cy.pub").unlink()  # while the server is down
    again = Register(keys, nodes, registered, flwr, "safa")
    assert again.look()[0] == "the key of cy is revoked"
    assert names() == {"ann", "-bob"}
    nodes.write_text("damaged")
    Register(keys, nodes, registered, flwr, "safa").look()
    assert names() == {"ann", "-bob"}
    (keys / "clients").rename(tmp_path / "unplugged")
    assert again.look() == again.look() == []
    assert names() == {"ann", "-bob"}


# -- folders and addresses -------------------------------------------------------------------------------------------


def test_what_is_kept_with_a_run_to_take_it_up_again(tmp_path: Path) -> None:
    settings = Settings.of("boston", clients=2)
    begin_local(tmp_path / "run", settings, Options(start_with=2), pauses={"client-1": 3.0})
    assert Link.read(tmp_path / "run") == Link(
        host=LOOPBACK, port=0, keys=f"{FLOWER}/keys", local=True, pauses={"client-1": 3.0}
    )
    assert load_run(tmp_path / "run").settings == settings
    assert Options.read(tmp_path / "run" / "deploy.toml") == Options(start_with=2)
    assert sorted(file.name for file in (tmp_path / "run" / FLOWER / "keys" / "clients").glob("*.key")) == [
        "client-0.key",
        "client-1.key",
    ]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"train": False}, "a deployment trains a model"), ({"preset": "paper"}, "habits .* cannot be deployed")],
)
def test_what_cannot_be_deployed_leaves_no_folder(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    link = Link(host=LOOPBACK, port=0, keys=None)
    with pytest.raises(SafaError, match=complaint):
        begin(tmp_path / "run", Settings.of("boston", **changes), Options(), link)
    assert not (tmp_path / "run").exists()


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "example.org", "localhost.example.org")))


def test_a_server_that_is_not_there_or_speaks_plain_text(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", hosts=[], clients=[])
    address = f"{LOOPBACK}:{free_port()}"
    assert unreachable(address, None) == "Connection refused"
    with bound_socket(LOOPBACK, int(address.rpartition(":")[2])) as listener:
        listener.listen()
        assert unreachable(address, None) == ""


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trial_is_stopped_by_ctrl_c_and_resumed_to_its_end(capsys: Capture) -> None:
    folder = "Büro \U0001f600 1"  # nothing minds a space, or more than ASCII
    work = ["--local-steps", "5", "--shuffle", "yes", "--schedule", "cosine", "--optimiser", "adamw", "--lr", "0.003"]
    ends = ["--rounds", "20", "--until", "loss=1e9,held=5"]  # at the target all the time: it ends with round 5
    trial = ["deploy", "local", "boston", "--clients", "2", *work, *ends, "--out", folder]
    with subprocess.Popen([sys.executable, "-m", "safa", *trial], stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: process.poll() is not None or finished_rounds(Path(folder)) > 0)
            assert len(at_work_in(Path.cwd())) >= 6  # SuperLink, two SuperNodes, a SuperExec each
            for second in (["deploy", "local", "--resume", folder], [*trial, "--force"]):
                assert main(second) == 2
                assert f"another server works on {folder}" in capsys.readouterr().err
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert time.monotonic() - began < 6
        finally:
            process.kill()
    assert process.returncode == 130
    said = f" of 20 rounds are finished and can be read in {folder}; resume with safa deploy local --resume {folder}"
    assert said in err
    kept = int(err.partition(said)[0].split()[-1])  # two rounds may close at once
    assert at_work_in(Path.cwd()) == []

    assert main(["deploy", "local", "--resume", folder]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["round", "time,", "s", "picked", "undrafted", "refused", "clients", "loss", "accuracy"]
    shown = [int(row.split()[0]) for row in rows]
    assert shown in (list(range(kept + 1, 6)), list(range(kept, 6)))  # what was not whole is done again
    assert "The target loss=1e+09,held=5 was reached in round 1, after" in last
    assert f"safa report {folder} makes a page of it, safa replay {folder} trains its model again" in last
    run = load_run(folder)
    assert run.summary is not None
    assert [record.round for record in run.records()] == [1, 2, 3, 4, 5]
    assert {member["name"] for member in run.roster() or []} == {"client-0", "client-1"}
    own, again = run.model(), replay(run)
    assert max(float((again[name] - own[name]).abs().max()) for name in own) <= 1e-6
    assert at_work_in(Path.cwd()) == []
    assert main(["deploy", "local", "--resume", folder]) == 2
    assert "is finished" in capsys.readouterr().err


def test_the_table_of_a_config_file_and_what_goes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.toml").write_text('task = "boston"\nrounds = 7\n[deploy]\ncodec = "int8"\nttl_s = 5\n')
    monkeypatch.setattr("safa.cli.deploy.local.run_local", lambda *_: None)
    monkeypatch.setattr(output._Show, "end", lambda *_: None)
    assert main(["deploy", "local", "--config", "config.toml", "--ttl", "9", "--clients", "3", "--out", "run"]) == 0
    assert Options.read(Path("run/deploy.toml")) == Options(start_with=3, codec="int8", ttl_s=9)
    assert load_run("run").settings == Settings.of("boston", rounds=7, clients=3)
    assert main(["run", "--config", "config.toml", "--no-train", "--quiet", "--out", "simulated"]) == 0


def test_a_server_resumes_what_was_begun(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    ran: list[Path] = []
    monkeypatch.setattr("safa.cli.deploy.server.run_server", lambda folder, _: ran.append(folder))
    monkeypatch.setattr(output._Show, "end", lambda *_: None)
    make_keys("keys", hosts=[], clients=["ann"])
    port = str(free_port())
    server = ["deploy", "server", "boston", "--keys", "keys", "--host", LOOPBACK, "--port", port, "--out", "run"]
    assert main([*server, "--rounds", "7", "--auto-resume"]) == 0
    assert Link.read(Path("run")) == Link(host=LOOPBACK, port=int(port), keys=str(Path("keys").resolve()))
    assert main([*server, "--rounds", "7", "--auto-resume"]) == 0
    assert main(["deploy", "server", "--auto-resume", "--out", "run"]) == 0
    assert main(server) == 2
    Path("run/roster.json").write_text('[{"name": "ann", "size": 1.0, "details": {}}]')
    assert main(["deploy", "server", "--resume", "run", "--unblock", "eve"]) == 2
    assert "there is no client 'eve' to unblock in run" in capsys.readouterr().err
    assert main(["deploy", "server", "--resume", "run", "--unblock", "ann"]) == 0
    assert json.loads(Path("run/unblock.json").read_text()) == ["ann"]
    assert ran == [Path("run")] * 4
    assert main(["deploy", "local", "--resume", "run"]) == 2
    assert "was begun with safa deploy server; resume it with that" in capsys.readouterr().err
    Path("run/summary.json").write_text("{}")
    assert main([*server, "--auto-resume"]) == 0  # so that a service manager stops starting it
    assert len(ran) == 4


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("boston --rounds 9", "rounds is 7 in run, and 9 is given"),
        ("boston --fraction 0.5", "fraction is 0.3 in run, and 0.5 is given"),
        ("mnist", "task is boston in run, and mnist is given"),
        ("--task digits", "task is boston in run, and digits is given"),
        ("boston --codec int8", "codec is float32 in run, and int8 is given"),
        ("--config other.toml", "lr is 0.0001 in run, and 0.5 is given"),
        ("--config deploy.toml", "ttl_s is 86400.0 in run, and 5 is given"),
        ("boston --port 1", "port is {port} in run, and 1 is given"),
        ("boston --host ::1", "host is 127.0.0.1 in run, and ::1 is given"),
        ("boston --keys other", "keys is {cwd}/keys in run, and {cwd}/other is given"),
        ("boston --insecure", "run was begun with the keys in {cwd}/keys, and --insecure is given"),
        ("boston --set x=1", "there is no setting 'x'"),
        ("boston --force", "--auto-resume resumes the run in --out, and --force replaces it; give one of them"),
    ],
)
def test_a_run_goes_on_as_it_was_begun_or_not_at_all(
    given: str, complaint: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safa.cli.deploy.server.run_server", lambda *_: pytest.fail("it went on"))
    port = free_port()
    link = Link(host=LOOPBACK, port=port, keys=str(Path("keys").resolve()))
    make_keys("keys", hosts=[], clients=["ann"])
    begin(Path("run"), Settings.of("boston", rounds=7), Options(), link)
    Path("other.toml").write_text('task = "boston"\nrounds = 7\nlr = 0.5\n')
    Path("deploy.toml").write_text('task = "boston"\n[deploy]\nttl_s = 5\nwire = "float32"\n')
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert main(["deploy", "server", "--auto-resume", "--out", "run", *given.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("safa: " + complaint.format(port=port, cwd=Path.cwd()))
    assert said.count("\n") == 1
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_a_folder_in_use_is_refused_at_once(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in ("run_local", "run_server"):
        monkeypatch.setattr(
            f"safa.cli.deploy.{run.removeprefix('run_')}.{run}", lambda *_: pytest.fail("it was started")
        )
    begin(Path("server"), Settings.of("boston"), Options(), Link(host=LOOPBACK, port=free_port(), keys=None))
    begin_local(Path("local"), Settings.of("boston", clients=2), Options(), insecure=True)
    for command in (
        "local --resume local",
        "local boston --out local --force",
        "server --resume server",
        "server --auto-resume --out server",
        "server boston --insecure --host 127.0.0.1 --out server --force",
    ):
        folder = Path(command.split()[0])
        with hold_launcher(folder):
            began = time.monotonic()
            assert main(["deploy", *command.split()]) == 2
            assert time.monotonic() - began < 5
        assert capsys.readouterr().err == f"safa: another server works on {folder}; stop that one first\n"
        assert not is_launched(folder)


@pytest.mark.parametrize("kind", ["local", "server"])
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("flower/link.json", "{"),
        ("flower/link.json", "[]"),
        ("flower/link.json", '{"host": 5, "port": "x", "keys": null}'),
        ("flower/link.json", b"\xff\xfe"),
        ("deploy.toml", "codec = "),
        ("deploy.toml", "ttl_s = 'soon'"),
        ("deploy.toml", b"\xff"),
        ("config.toml", "task = "),
        ("config.toml", b"\xff"),
    ],
)
def test_a_damaged_folder_is_one_sentence(kind: str, file: str, content: str | bytes, capsys: Capture) -> None:
    link = Link(host=LOOPBACK, port=free_port(), keys=None, local=kind == "local")
    begin(Path("run"), Settings.of("boston", clients=2), Options(), link)
    Path("run", file).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert main(["deploy", kind, "--resume", "run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("safa: ")
    assert said.count("\n") == 1
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("state.db", b"not a database at all, but long enough to have a header of a hundred bytes" * 4),
        ("state.db", None),
        ("registered.json", b"{"),
        ("registered.json", b'{"ann": {"node": "x", "key": "k"}}'),
        ("registered.json", b'{"ann": 5}'),
        ("registered.json", None),
        ("", b""),
    ],
)
def test_without_its_database_or_its_register_flower_begins_anew(file: str, content: bytes | None) -> None:
    make_keys("keys", hosts=[], clients=["ann"])
    run, link = Path("run"), Link(host=LOOPBACK, port=free_port(), keys=str(Path("keys").resolve()))
    begin(run, Settings.of("boston"), Options(), link)
    with closing(sqlite3.connect(run / FLOWER / "state.db")) as database:
        database.execute("CREATE TABLE node (id)")
    (run / FLOWER / "registered.json").write_text('{"ann": {"node": "1", "key": "k"}}')
    (run / "nodes.json").write_text('{"1": "ann"}')
    server = SuperLink(Processes(), run, link)
    server.resumes = True
    if content is not None and file:
        (run / FLOWER / file).write_bytes(content)
    elif file:
        (run / FLOWER / file).unlink()
    server._remove_damaged()
    there = [
        path.exists() for path in (run / FLOWER / "state.db", run / FLOWER / "registered.json", run / "nodes.json")
    ]
    assert there == [not file] * 3
    assert (run / FLOWER / "link.json").exists()


def test_a_server_app_that_ends_with_its_superlink_is_not_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(host=LOOPBACK, port=free_port(), keys=None)
    begin(Path("run"), Settings.of("boston"), Options(), link)
    server = SuperLink(Processes(), Path("run"), link)
    server._held = True
    with subprocess.Popen(["sleep", "600"]) as process:
        server._process = process

        def killed(_: Path) -> bool:
            """The SuperLink is killed before the lock of the app is looked at, and the app has let go of it."""
            process.kill()
            process.wait()
            return False

        monkeypatch.setattr("safa.deploy.launcher.superlink.is_held", killed)
        assert server.is_over()
    assert server.why("") == "the SuperLink was killed (signal 9)"


@pytest.mark.parametrize("command", ["--resume run", "--auto-resume --out run"])
def test_rounds_without_a_checkpoint_are_not_begun_anew(command: str, capsys: Capture) -> None:
    begin(Path("run"), Settings.of("boston"), Options(), Link(host=LOOPBACK, port=free_port(), keys=None))
    Path("run/rounds.jsonl").write_bytes(b"".join(lines(3)))
    Path("run/flower/state.db").write_text("what Flower knows")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert main(["deploy", "server", *command.split()]) == 2
    assert capsys.readouterr().err.startswith("safa: run holds 3 rounds and no checkpoint: restore its folder")
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_a_disk_that_cannot_be_written_is_one_sentence(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "run/flower/home/config.toml")

    monkeypatch.setattr("safa.cli.deploy.local.run_local", full)
    assert main(["deploy", "local", "boston", "--clients", "2", "--insecure", "--out", "run"]) == 2
    assert "safa: cannot read or write run/flower/home/config.toml: No space left" in capsys.readouterr().err
    assert write_fault(Path("run")) == ""
    assert sorted(path.name for path in Path("run").iterdir()) == ["config.toml", "deploy.toml", "flower"]
    assert write_fault(Path("nowhere")) == "nowhere cannot be written: No such file or directory"


# -- expelling -------------------------------------------------------------------------------------------------------


def deployed(names: Sequence[str]) -> Path:
    link = Link(host=LOOPBACK, port=free_port(), keys="/keys")
    begin(Path("run"), Settings.of("boston"), Options(), replace(link, keys=None))
    link.write(Path("run"))
    Path("run/roster.json").write_text(json.dumps([{"name": name, "size": 1.0, "details": {}} for name in names]))
    return Path("run")


def test_a_client_is_expelled_while_the_server_runs_and_while_it_does_not(capsys: Capture) -> None:
    run = deployed(["ann", "bob", "cy"])
    assert main(["deploy", "expel", "run", "ann"]) == 0
    said = capsys.readouterr().out
    assert "ann: expelled with safa deploy server --resume run" in said
    assert "remove /keys/clients/ann.pub to revoke" in said
    with hold_launcher(run):
        assert main(["deploy", "expel", "run", "cy", "ann"]) == 0
    assert "cy, ann: expelled when the next round opens" in capsys.readouterr().out
    assert json.loads((run / EXPEL).read_text()) == ["ann", "cy"]


@pytest.mark.slow
def test_two_commands_that_expel_at_once_lose_nobody() -> None:
    names = [f"c{number}" for number in range(3)]
    run = deployed(names)
    with hold_launcher(run), alone(run / FLOWER / "expel.lock"):
        command = [sys.executable, "-m", "safa", "deploy", "expel", "run"]
        running = [subprocess.Popen([*command, name], stdout=subprocess.DEVNULL) for name in names]
    assert [process.wait(60) for process in running] == [0] * len(names)
    assert sorted(json.loads((run / EXPEL).read_text())) == names


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("run eve", "there is no client 'eve' in run; there are ann, bob"),
        ("empty ann", "empty holds no run: there is no config.toml in it"),
        ("simulated ann", "simulated is not the folder of a deployment"),
        ("finished ann", "the run in finished is finished"),
    ],
)
def test_who_cannot_be_expelled(command: str, complaint: str, capsys: Capture) -> None:
    run = deployed(["ann", "bob"])
    shutil.copytree(run, "finished")
    Path("finished/summary.json").write_text("{}")
    Path("empty").mkdir()
    Path("simulated").mkdir()
    Path("simulated/config.toml").write_text(Settings.of("boston").to_toml())
    assert main(["deploy", "expel", *command.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"safa: {complaint}")
    assert captured.err.count("\n") == 1
    assert not any(Path().rglob(EXPEL))


def test_keys_are_made_and_added(capsys: Capture) -> None:
    assert main(["deploy", "keys", "keys", "--host", "fl.example.org", "10.0.0.7", "--client", "ann", "bob"]) == 0
    assert "keys/clients/bob.pub" in capsys.readouterr().out
    assert main(["deploy", "keys", "keys", "--add", "cy"]) == 0
    assert sorted(path.stem for path in Path("keys/clients").glob("*.key")) == ["ann", "bob", "cy"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("deploy", "the following arguments are required: COMMAND"),
        ("deploy local", "name a task, one of boston"),
        ("deploy local boston --task mnist", "two tasks are named, boston and mnist"),
        ("deploy local boston --clients 0", "clients must be at least 1, not 0"),
        ("deploy local boston --codec float8", "codec must be one of float32"),
        ("deploy local boston --start-with 6", "start_with is 6, but there are only 5 clients"),
        (
            "deploy local boston --no-train",
            "a deployment trains a model; rounds without training can only be simulated",
        ),
        ("deploy local boston --preset paper", "the paper's habits (safa.paper.habits:AsPrinted) cannot be deployed"),
        ("deploy local boston --pause client-9=3", "there is no client 'client-9' to pause; there are client-0 to"),
        ("deploy local boston --pause client-0", "--pause needs NAME=SECONDS, not 'client-0'"),
        ("deploy local boston --pause client-0=-1", "a pause must be a number of seconds, not -1.0"),
        ("deploy local boston --out used", "used already holds a run"),
        ("deploy local boston --resume used", "--resume takes everything from its folder"),
        ("deploy local --resume other", "other holds no run: there is no config.toml in it"),
        ("deploy local --resume simulated", "simulated is not the folder of a deployment"),
        ("deploy local --config odd.toml", "there is no option 'tll_s' of a deployment"),
        (
            "deploy server boston",
            "a server needs --keys DIR (safa deploy keys makes them), or --insecure, and not both",
        ),
        ("deploy server boston --keys k --insecure", "a server needs --keys DIR"),
        ("deploy server boston --insecure", "--insecure is for trials on one machine: 0.0.0.0 is not a loopback"),
        ("deploy server boston --keys other", "{cwd}/other has no ca.crt; safa deploy keys makes the keys of a server"),
        ("deploy server boston --keys old", "the certificate {cwd}/old/server.pem expired on"),
        ("deploy server boston --keys k --port 0", "a port is a number from 1 to 65535, not 0"),
        ("deploy server boston --keys k --host 192.0.2.1", "cannot listen on 192.0.2.1, port 9092"),
        ("deploy server boston --keys k --auto-resume", "--auto-resume needs --out"),
        ("deploy server boston --keys k --unblock ann", "--unblock goes with --resume"),
        ("deploy server --resume used --port 1", "--resume takes everything from its folder"),
        ("deploy client --server h --name ann --state s --keys k", "--server needs HOST:PORT, not 'h'"),
        ("deploy client --server h:1 --name .x --state s --keys k", "a name starts with no dot"),
        ("deploy client --server h:1 --name ann --state s", "a client needs --keys DIR, or --ca FILE and --key FILE"),
        ("deploy client --server h:1 --name ann --state s --ca k/ca.crt", "--ca and --key go together"),
        ("deploy client --server h:1 --name ann --state s --insecure", "--insecure is for trials on one machine"),
        (
            "deploy client --server h:1 --name ann --state s --keys other",
            "there is no certificate of an authority other",
        ),
        ("deploy client --server h:1 --name eve --state s --keys k", "there is no private key k/clients/eve.key"),
        (
            "deploy client --server h:1 --name ann --state s --ca k/ca.crt --key k/clients/ann.pub",
            "{cwd}/k/clients/ann.pub is not a client's private key",
        ),
        (
            "deploy client --server h:1 --name ann --state s --ca odd.toml --key k/clients/ann.key",
            "{cwd}/odd.toml is not a certificate",
        ),
        ("deploy client --server h:1 --name ann --state odd.toml --keys k", "cannot create the folder {cwd}/odd.toml"),
        ("deploy client --server h:1 --name ann --state s --keys k --pause nan", "a pause must be a number of seconds"),
        ("deploy keys other --client ann", "name the server with --host and its clients with --client"),
        ("deploy keys other --add ann", "other holds no keys of a trial"),
        ("deploy keys k --add ann", "k/clients/ann.key is there already"),
        ("deploy keys new --host h --client ann --days 0", "days must be above 0, not 0"),
        ("deploy keys new --host h:1 --client ann", "a host is a name or an address, without a port"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: str, complaint: str, capsys: Capture) -> None:
    make_keys("k", hosts=[], clients=["ann"])
    make_keys("old", hosts=[], clients=["ann"], days=-1)
    for name in ("used", "other", "simulated"):
        Path(name).mkdir()
    write_config(Path("used"), Settings.of("boston"))
    Path("other/thesis.tex").write_text("precious")
    Path("simulated/config.toml").write_text(Settings.of("boston").to_toml())
    Path("odd.toml").write_text('task = "boston"\n[deploy]\ntll_s = 5\n')
    before = sorted(Path().rglob("*"))
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"safa: {complaint.format(cwd=Path.cwd())}")
    assert captured.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before  # nothing half-written


def test_without_flower_there_is_one_sentence(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert main(["deploy", "local", "boston"]) == 2
    assert "safa deploy needs Flower, which is not installed" in capsys.readouterr().err


def test_the_command_line_does_without_flower_until_it_is_needed() -> None:
    code = (
        "import sys, safa.cli.program; safa.cli.program._parser(); "
        "print({'flwr', 'torch', 'cryptography'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
