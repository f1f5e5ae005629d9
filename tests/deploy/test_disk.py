"""Disks that are full and folders that cannot be written: no round is lost, and a sentence says why it stopped."""

from __future__ import annotations

import errno
import logging
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from safa.deploy.exchange.coordinator import Coordinator
from safa.deploy.exchange.files import LOG
from safa.deploy.flower import server_app
from safa.deploy.flower.ports import free_port
from safa.deploy.launcher.processes import Processes
from safa.errors import SafaError
from safa.runs import load_run
from tests.deploy.harness import Harness, apart, fed_again
from tests.deploy.real import records, running, safa, wait_for

FULL = "No space left on device"


class Disk:
    """A small disk that can be filled to the last byte.

    Where nothing may be mounted it is an ordinary folder. Filling it then puts folders in the place of files, and files
    in the place of folders, so that nothing can be written there either.
    """

    def __init__(self, folder: Path, *, is_real: bool) -> None:
        self.folder, self._is_real = folder, is_real
        self.complaint = FULL if is_real else "Is a directory|Not a directory|File exists|no checkpoint"
        self._obstacles: list[Path] = []

    def fill(self, *places: Path) -> None:
        """Let nothing be written; where the disk is not real, at these places."""
        if not self._is_real:
            for place in places:
                was_folder = place.is_dir()
                if place.exists():
                    place.rename(place.with_name(f"{place.name}.away"))
                place.touch() if was_folder else place.mkdir()
                self._obstacles.append(place)
            return
        with (self.folder / "ballast").open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass

    def free(self) -> None:
        """Make room."""
        for place in self._obstacles:
            place.rmdir() if place.is_dir() else place.unlink()
            if place.with_name(f"{place.name}.away").exists():
                place.with_name(f"{place.name}.away").rename(place)
        if self._is_real:
            (self.folder / "ballast").unlink()


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Disk]:
    """A tmpfs of its own where one may be mounted: that takes root."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    is_real = shutil.which("mount") is not None and not subprocess.run(mount, capture_output=True).returncode
    try:
        yield Disk(folder, is_real=is_real)
    finally:
        if is_real:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_full_disks_of_devices_and_of_the_server_cost_no_round(tmp_path: Path) -> None:
    log, port = tmp_path / "log", str(free_port())
    with small_disk(tmp_path / "devices", 1) as devices, small_disk(tmp_path / "server", 32) as server_disk:
        run = server_disk.folder / "run"
        given = ("--clients", "2", "--rounds", "4", "--epochs", "1", "--fraction", "1", "--start-with", "2")
        where = ("--insecure", "--host", "127.0.0.1", "--port", port, "--out", str(run))
        with running() as processes:
            server = safa(processes, log, "deploy", "server", "boston", *given, *where)
            terminals = [_client(processes, tmp_path, devices.folder, part, port) for part in range(2)]
            wait_for(lambda: len(records(run)) >= 1, server, log=log)

            devices.fill(*(devices.folder / f"c{part}" / "state.safetensors.part" for part in range(2)))
            wait_for(lambda: (run / LOG).read_text().count("no update (") >= 1, server, log=log)
            done = len(records(run))
            assert done < 4, "the round that was open, and perhaps the one after it"
            wait_for(lambda: (run / LOG).read_text().count("no update (") >= 2, server, log=log)
            assert len(records(run)) == done, "a round that picks nobody is not a round"
            for terminal in terminals:
                wait_for(lambda: f"cannot write {devices.folder}" in terminal.read_text(), log=terminal)  # noqa: B023
            devices.free()
            wait_for(lambda: len(records(run)) > done, server, log=log)

            server_disk.fill(run / "checkpoint")
            wait_for(lambda: server.poll() is not None, log=log)
            assert server.returncode == 2
            told = log.read_text().splitlines()[-1]
            assert told.startswith("safa: the server stopped after round ")
            assert re.search(server_disk.complaint, told)
            assert told.endswith(f"; resume it with safa deploy server --resume {run}")
            server_disk.free()
            server = safa(processes, log, "deploy", "server", "--resume", str(run))
            wait_for(lambda: server.poll() is not None, log=log)
            assert server.returncode == 0, log.read_text()
        assert "Traceback" not in log.read_text() + (run / LOG).read_text()
        finished = load_run(run)
        rounds = list(finished.records())
        assert [record.round for record in rounds] == list(range(1, 5))
        assert all(len(record.picked) for record in rounds)
        assert apart(fed_again(finished), finished.model()) <= 1e-6


def _client(processes: Processes, folder: Path, disk: Path, part: int, port: str) -> Path:
    """Its state is on the disk, and all that Flower writes is elsewhere; where it is told what happens."""
    name, terminal = f"c{part}", folder / f"c{part}.log"
    (disk / name).mkdir()
    (folder / f"{name}-flower").mkdir()
    (disk / name / "flower").symlink_to(folder / f"{name}-flower")
    where = ("--server", f"127.0.0.1:{port}", "--insecure", "--state", str(disk / name))
    safa(processes, terminal, "deploy", "client", *where, "--name", name, "--partition", str(part))
    return terminal


@pytest.mark.slow
def test_a_checkpoint_folder_that_cannot_be_written_stops_the_server_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server app as it is, without Flower: its messages go to real devices in virtual time."""
    harness = Harness(tmp_path)
    run, kept = tmp_path / "run", tmp_path / "run" / "checkpoint"
    harness.run(until=harness.in_round(2))
    harness.coordinator.stop()

    def carry(coordinator: Coordinator, _: Any) -> None:
        harness.coordinator, harness._mail = coordinator, []
        try:
            harness.run()
        finally:
            coordinator.stop()

    def carry_without_the_folder(coordinator: Coordinator, grid: Any) -> None:
        kept.rename(run / "away")
        kept.write_text("not a folder")
        carry(coordinator, grid)

    clock = SimpleNamespace(time=lambda: harness.now, monotonic=lambda: harness.now, gmtime=time.gmtime)
    monkeypatch.setattr(server_app, "time", clock)
    monkeypatch.setattr(server_app, "coordinate", carry_without_the_folder)
    with pytest.raises(SafaError, match="checkpoint"):
        server_app.serve(run, cast(Any, None))
    told = (run / LOG).read_text().splitlines()[-1]
    assert re.fullmatch(rf"\S+ ERROR cannot write {kept}\S*: (Not a directory|File exists)", told)
    kept.unlink()
    (run / "away").rename(kept)
    monkeypatch.setattr(server_app, "coordinate", carry)
    server_app.serve(run, cast(Any, None))
    finished = load_run(run)
    assert [record.round for record in finished.records()] == list(range(1, 7))
    assert apart(fed_again(finished), finished.model()) <= 1e-6


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (OSError(errno.ENOSPC, FULL, "run/rounds.jsonl"), f"cannot read or write run/rounds.jsonl: {FULL}"),
        (OSError(errno.EROFS, "Read-only file system"), "cannot read or write the folder of the run: Read-only file"),
        (SafaError("the checkpoint is damaged"), "the checkpoint is damaged"),
        (SystemExit(1), "Flower stopped the server app: the run was stopped, or its SuperLink considered it dead"),
        (RuntimeError("\x1b[31mred\nand more"), r"the server app failed with a RuntimeError: \x1b[31mred"),
        (KeyError(), "the server app failed with a KeyError"),
    ],
)
def test_why_the_server_app_stops_is_one_line_of_its_log(
    problem: BaseException, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(server_app, "Coordinator", fail)
    with pytest.raises(type(problem)):
        server_app.serve(tmp_path, cast(Any, None))
    (line,) = (tmp_path / LOG).read_text().splitlines()
    assert line.partition(" ERROR ")[2].startswith(sentence)


def test_a_log_that_cannot_be_written_prints_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / LOG).symlink_to("/dev/full")
    with server_app._logged(tmp_path):
        logging.getLogger("safa.deploy").error("no room for this")
    assert capfd.readouterr() == ("", "")
