"""The SuperNode of one client, as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safa.deploy.flower.ports import LOOPBACK, free_port
from safa.deploy.launcher.processes import Processes, private_files

__all__ = ["Node"]


@dataclass(frozen=True, kw_only=True)
class Node:
    """The SuperNode of one client."""

    name: str
    server: str
    """HOST:PORT."""
    state: Path
    """The state folder of the client."""
    folder: Path
    """The folder of Flower: home, node config, log."""
    ca: Path | None = None
    """The certificate of the authority that signed the server's; None: plain text."""
    key: Path | None = None
    """The client's private key."""
    task: str | None = None
    partition: int | None = None
    pause_s: float = 0.0

    @property
    def log(self) -> Path:
        """The log of the SuperNode, and of the client app on it."""
        return self.folder / "supernode.log"

    def start(self, processes: Processes) -> subprocess.Popen[bytes]:
        """Start it."""
        with private_files():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._config.write_text(self._config_text(), encoding="utf-8")
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        own = {"FLWR_HOME": str(self.folder.resolve()), "OMP_NUM_THREADS": threads}
        return processes.start(self._command(), log=self.log, environment=own)

    @property
    def _config(self) -> Path:
        return self.folder / "node.toml"

    def _config_text(self) -> str:
        """The node config, as `client_app` reads it."""
        config: dict[str, Any] = {"name": self.name, "state": str(self.state.resolve()), "pause-s": self.pause_s}
        config |= {"task": self.task} if self.task is not None else {}
        config |= {"partition-id": self.partition} if self.partition is not None else {}
        return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in config.items())

    def _command(self) -> list[str]:
        command = [sys.executable, "-P", "-m", "safa.deploy.flower.supernode", "--superlink", self.server]
        command += ["--node-config", str(self._config), "--host", LOOPBACK, "--port", str(free_port())]
        command += ["--root-certificates", str(self.ca)] if self.ca else ["--insecure"]
        return command + (["--auth-supernode-private-key", str(self.key)] if self.key else [])
