"""A deployment as processes: a trial with all clients on this machine, a server, or one client."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Never

from safa.deploy.flower.clock import Steps
from safa.deploy.flower.internals import SERVER_APP_PROCESS, environment
from safa.deploy.flower.ports import LOOPBACK
from safa.deploy.launcher.checks import clock_fault, unreachable
from safa.deploy.launcher.follow import ClientErrors, Notify, exit_reason, follow_run
from safa.deploy.launcher.link import FLOWER, Link, local_names
from safa.deploy.launcher.node import Node
from safa.deploy.launcher.processes import STARTED, Processes, Supervised, private_files
from safa.deploy.launcher.superlink import SuperLink
from safa.runs import load_run
from safa.runs.settings import Settings

__all__ = ["run_client", "run_local", "run_server", "supervised"]

_NODES_STOP_S = 1.5
_KEYS_EVERY_S, _TICK_S = 3.0, 0.25


def run_local(folder: Path, notify: Notify) -> None:
    """Run the trial that `begin_local` has prepared, or resume it, with all of its clients on this machine."""
    settings, link = load_run(folder).settings, Link.read(folder)
    with private_files(), _processes(folder) as processes:
        server = _opened(processes, folder, link, notify)
        nodes = [supervised(node, processes, notify, starts=False) for node in _local_nodes(server, settings, link)]
        notify(f"{len(nodes)} clients started; each needs some seconds, and so does every update")

        def look() -> None:
            for node in nodes:
                node.tick()

        try:
            follow_run(folder, settings, notify, server=server, also=look, kind="local")
        finally:  # the nodes before the SuperLink, so that they sign off and can be resumed at once
            processes.kill()
            processes.stop([node.process for node in nodes if node.process], timeout_s=_NODES_STOP_S)


def run_server(folder: Path, notify: Notify) -> None:
    """Run the server of the run that `begin` has prepared, or resume it; its clients are elsewhere."""
    settings, link = load_run(folder).settings, Link.read(folder)
    with private_files(), _processes(folder) as processes:
        server = _opened(processes, folder, link, notify)
        notify(f"listening on {server.host}, port {server.port}")
        looked, steps = time.monotonic(), Steps()

        def look() -> None:
            nonlocal looked
            step = steps.look()
            if step:
                notify(f"warning: {step}")
            if server.register and time.monotonic() - looked >= _KEYS_EVERY_S:
                for line in server.register.look():
                    notify(line)
                looked = time.monotonic()

        follow_run(folder, settings, notify, server=server, also=look, kind="server")


def _processes(folder: Path) -> Processes:
    return Processes(environment(folder.resolve() / FLOWER / "home"), kill_first=SERVER_APP_PROCESS)


def _opened(processes: Processes, folder: Path, link: Link, notify: Notify) -> SuperLink:
    server = SuperLink(processes, folder, link)
    server.open()
    for line in server.register.look() if server.register else []:
        notify(line)
    return server


def _local_nodes(server: SuperLink, settings: Settings, link: Link) -> list[Node]:
    return [
        Node(
            name=name,
            server=f"{LOOPBACK}:{server.port}",
            state=server.folder / "clients" / name,
            folder=server.folder / FLOWER / name,
            ca=server.keys and server.keys / "ca.crt",
            key=server.keys and server.keys / "clients" / f"{name}.key",
            task=settings.task,
            partition=number,
            pause_s=(link.pauses or {}).get(name, 0.0),
        )
        for number, name in enumerate(local_names(settings))
    ]


def supervised(node: Node, processes: Processes, notify: Callable[[str], object], *, starts: bool = True) -> Supervised:
    """A SuperNode that is restarted whenever it ends: after a SIGKILL, Flower rejects its key for a minute.

    Without `starts`, only its ends are notified.
    """

    def named(line: str) -> None:
        if starts or line != STARTED:
            notify(f"{node.name} {line}")

    return Supervised(lambda: node.start(processes), named, lambda: exit_reason(node.log))


def run_client(node: Node, notify: Callable[[str], object]) -> Never:
    """Keep the SuperNode of a client running until this process is stopped; notify every start, end and fault."""
    with private_files(), Processes(environment(node.folder)) as processes:
        client = supervised(node, processes, notify)
        errors = ClientErrors(node.log)
        seen = None
        try:
            while True:
                client.tick()
                if client.process is not seen:
                    seen = client.process
                    fault = unreachable(node.server, node.ca) if seen else ""
                    if fault:
                        notify(f"{node.name} cannot reach {node.server}: {fault}")
                    elif seen and node.key and (fault := clock_fault(node.server, node.ca)):
                        notify(f"{node.name}'s clock is {fault}")
                for line in errors.look():
                    notify(f"{node.name} tells the server: {line}")
                time.sleep(_TICK_S)
        finally:
            processes.stop([client.process] if client.process else [], timeout_s=_NODES_STOP_S)
