"""Real processes are killed: a SuperNode, the server app, the SuperLink. Nothing is lost and nothing counted twice."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from safa.deploy.flower.ports import free_port
from safa.deploy.launcher.processes import Processes
from safa.experiments.replay import replay
from safa.protocol.records import Refusal, Verdict
from safa.runs import load_run
from tests.deploy.harness import apart, fed_again
from tests.deploy.real import kill, pids, records, running, safa, wait_for

SMALL = ("--insecure", "--quiet", "--fraction", "0.3", "--round-limit", "120", "--seed", "1")


@pytest.mark.slow
def test_a_supernode_that_is_killed_comes_back_tolerable_and_is_deprecated_later(tmp_path: Path) -> None:
    """client-2 is so slow that it never finishes before it lags too far behind; it is killed while it trains."""
    run, log = tmp_path / "run", tmp_path / "log"
    pauses = ("--pause", "client-0=6", "--pause", "client-1=16", "--pause", "client-2=600")
    given = ("--clients", "3", "--rounds", "5", "--lag-tolerance", "3", *pauses)
    state = run / "clients" / "client-2" / "state.safetensors"
    with running() as processes:
        local = safa(processes, log, "deploy", "local", "boston", *SMALL, *given, "--out", str(run))
        wait_for(state.exists, local, log=log)
        killed_in = len(records(run)) + 1
        old = kill(processes, ("flower.supernode", "client-2"))
        wait_for(lambda: len(records(run)) >= killed_in, local, log=log)
        wait_for(lambda: pids(processes, "flower.supernode", "client-2") not in ([], old), local, log=log)
        assert local.wait(150) == 0, log.read_text()
    finished = load_run(run)
    rounds, roster = list(finished.records()), finished.roster()
    assert roster is not None
    slow = [member["name"] for member in roster].index("client-2")
    assert all(slow not in record.client for record in rounds), "no round waited for it"
    assert [record.round for record in rounds if slow in record.deprecated] == [4]
    assert [record.round for record in rounds if slow in record.sent] == [1, 4]
    assert int(rounds[3].sent_version[rounds[3].sent == slow][0]) == 3, "Eq. 3: it is sent the latest model, w(3)"
    story = iter((run / "server.log").read_text().splitlines())
    for event in (
        "sent: client-2, version 0",
        "client-2 is here again",
        "resumes: client-2, version 0",  # tolerable: it is sent nothing, and has its own state
        "deprecated: client-2 starts over from version 3",
        "sent: client-2, version 3",
    ):
        assert any(event in line for line in story), event
    assert apart(fed_again(finished), finished.model()) <= 1e-6


@pytest.mark.slow
def test_a_server_that_is_killed_at_five_points_resumes_from_the_last_closed_round(tmp_path: Path) -> None:
    """Server app and SuperLink, between and inside of rounds; the clients are left alone all the time."""
    run, log, port = tmp_path / "run", tmp_path / "log", str(free_port())
    states = [tmp_path / f"c{part}" / "state.safetensors" for part in range(2)]

    app, link = ("/flwr-serverapp",), ("flower.superlink", "--database", str(run))

    def closed() -> bool:
        """A round was closed since the last look: the next one is about to open."""
        return len(records(run)) > before

    def at_work() -> bool:
        """A client has begun to train since the last look."""
        return any(state.exists() and state.stat().st_mtime_ns > seen for state in states)

    points: list[tuple[Callable[[], bool], list[tuple[str, ...]]]] = [
        (at_work, [app]),
        (closed, [app]),
        (at_work, [link]),
        (closed, [link]),
        (at_work, [app, link]),
    ]
    work = ("--local-steps", "5", "--shuffle", "yes", "--schedule", "cosine", "--optimiser", "adamw", "--lr", "0.003")
    given = ("--clients", "2", "--rounds", "8", *work, "--host", "127.0.0.1", "--port", port, "--start-with", "2")
    with running() as processes:
        server = safa(processes, log, "deploy", "server", "boston", *SMALL, *given, "--out", str(run))
        for part in range(2):
            _client(processes, tmp_path, part, port)
        for moment, whom in points:
            before, seen = len(records(run)), max((s.stat().st_mtime_ns for s in states if s.exists()), default=0)
            wait_for(lambda: moment() and pids(processes, *app), server, log=log)  # noqa: B023
            kill(processes, *whom)
            assert server.wait(60) == 2, "it notices, and says how to resume"
            said = log.read_text().splitlines()[-1]
            assert f"safa deploy server --resume {run}" in said
            why = "the SuperLink was killed (signal 9)" if link in whom else "the server app was killed"
            assert why in said
            assert why in (run / "server.log").read_text().splitlines()[-1]
            server = safa(processes, log, "deploy", "server", "--quiet", "--resume", str(run))
        assert server.wait(150) == 0, log.read_text()
    finished = load_run(run)
    rounds = list(finished.records())
    assert [record.round for record in rounds] == list(range(1, 9))
    taken = sum(int(np.count_nonzero(record.verdict != Verdict.REFUSED)) for record in rounds)
    assert taken >= 8
    assert all(np.all(record.refusal != Refusal.SECOND_COMMIT) for record in rounds)
    assert (run / "server.log").read_text().count("resuming after round") >= 3
    assert apart(fed_again(finished), finished.model()) <= 1e-6
    assert apart(replay(finished), finished.model()) <= 1e-6


HELD_BACK = """
import importlib.abc, importlib.machinery, sys, time
from contextlib import contextmanager
from pathlib import Path

MODULE, HERE = "flwr.supernode.start_client_internal", Path(__file__).parent


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            connect, confirmed = module.http_request_response, []

            @contextmanager
            def held_back(*arguments, **options):
                with connect(*arguments, **options) as (*calls, confirm):

                    def confirm_later(*which):
                        confirmed.append(which)
                        if len(confirmed) == 2:
                            (HERE / "confirming").touch()
                            while not (HERE / "go").exists():
                                time.sleep(0.05)
                        return confirm(*which)

                    yield (*calls, confirm_later)

            module.http_request_response = held_back

        spec.loader.exec_module = exec_module
        return spec


if "safa.deploy.flower.supernode" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())
"""
"""Of Python's sitecustomize: a device holds back that it has received the second message, the first to train, until
it may go on."""


@pytest.mark.slow
def test_a_server_that_is_killed_while_devices_receive_a_message_has_their_replies_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their replies to the run that has ended must not keep those to the new one back: nobody would ask for these."""
    run, log, port, site = tmp_path / "run", tmp_path / "log", str(free_port()), tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(HELD_BACK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    given = ("--clients", "2", "--start-with", "2", "--rounds", "2", "--epochs", "1", "--fraction", "1", "--insecure")
    where = ("--quiet", "--host", "127.0.0.1", "--port", port, "--out", str(run))
    with running() as processes:
        server = safa(processes, log, "deploy", "server", "boston", *given, *where)
        for part in range(2):
            _client(processes, tmp_path, part, port)
        wait_for((site / "confirming").exists, server, log=log)
        kill(processes, ("flower.superlink", "--database", str(run)))
        assert server.wait(60) == 2
        server = safa(processes, log, "deploy", "server", "--quiet", "--resume", str(run))
        wait_for(lambda: "resuming after round 0" in (run / "server.log").read_text(), server, log=log)
        (site / "go").touch()
        assert server.wait(100) == 0, log.read_text()
    assert len(records(run)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mark", "after", "what"),
    [
        ("/flwr-serverapp", 20, "the server app"),  # the launcher has seen it by then
        ("/flower-superexec", 1, "Flower's SuperExec"),  # before it has started the server app
    ],
)
def test_a_server_whose_app_is_killed_before_it_has_begun_says_so(
    tmp_path: Path, mark: str, after: int, what: str
) -> None:
    """Flower would wait for it forever, where it does not start another."""
    run, log = tmp_path / "run", tmp_path / "log"
    with running() as processes:
        where = ("--host", "127.0.0.1", "--port", str(free_port()), "--insecure", "--out", str(run))
        server = safa(processes, log, "deploy", "server", "boston", "--rounds", "2", *where)

        looks = Counter[int]()

        def is_over() -> bool:
            for pid in pids(processes, mark) if server.poll() is None else ():
                looks[pid] += 1
                if looks[pid] == after:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            return server.poll() is not None

        wait_for(is_over, log=log)
        assert server.returncode == 2
    (told,) = [line for line in log.read_text().splitlines() if line.startswith("safa: ")]
    assert what in told
    assert told.endswith(f"resume it with safa deploy server --resume {run}")


@pytest.mark.slow
def test_a_device_on_which_nothing_starts_client_apps_any_more_begins_again(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    given = ("--clients", "2", "--rounds", "3", "--epochs", "1", "--fraction", "1", "--insecure", "--out", str(run))
    with running() as processes:
        local = safa(processes, log, "deploy", "local", "boston", *given)
        wait_for(lambda: len(records(run)) >= 1, local, log=log)
        (node,) = pids(processes, "flower.supernode", "client-1")
        kill(processes, ("/flower-superexec", f"--parent-pid {node} "))
        assert local.wait(150) == 0, log.read_text()
    why = "the process that starts client apps has ended"
    assert f"client-1 ended with exit code 0 ({why}); restarting in 2 s" in log.read_text()
    assert len(records(run)) == 3


def _client(processes: Processes, folder: Path, part: int, port: str) -> None:
    name = f"c{part}"
    where = ("--server", f"127.0.0.1:{port}", "--insecure", "--state", str(folder / name))
    safa(processes, folder / f"{name}.log", "deploy", "client", *where, "--name", name, "--partition", str(part))
