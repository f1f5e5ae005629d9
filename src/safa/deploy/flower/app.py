"""The Flower app of a deployment, and how a device recognises it.

Flower sends devices an app (a FAB) with every run, installs it and executes its code. Ours contains no code: it names
`server_app` and `client_app` beside this module, which are installed where they run. So a device accepts this app, with
any run config, and no other (see `supernode`): nobody who starts a run or controls the server can execute code of their
own on a device.
"""

from __future__ import annotations

import io
import json
import tomllib
import zipfile
from pathlib import Path
from typing import Any

__all__ = ["APP_ID", "APP_VERSION", "app_fault", "write_app"]

APP_ID, APP_VERSION = "safa/safa-deployment", "1.0.0"

# Devices compare all of it but the run config. After a change here, devices of older versions reject it.
_APP = """[project]
name = "safa-deployment"
version = "1.0.0"
description = "A run of safa deploy."
license = {file = "LICENSE"}
dependencies = ["flwr>=1.41,<1.42"]

[tool.flwr.app]
publisher = "safa"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "safa.deploy.flower.server_app:app"
clientapp = "safa.deploy.flower.client_app:app"
"""
_PROJECT, _LICENSE = "pyproject.toml", "LICENSE"
_FILES = sorted([".info/CONTENT", _LICENSE, _PROJECT])
_MOST_BYTES = 100_000


def write_app(folder: Path, *, run: Path) -> None:
    """Write the app that `flwr run` submits for the run in a folder."""
    folder.mkdir(exist_ok=True)
    name = json.dumps(str(run), ensure_ascii=False)  # as in TOML; JSON's escapes of rare characters are not
    (folder / _LICENSE).write_text("Apache-2.0\n", encoding="utf-8")
    (folder / _PROJECT).write_text(f"{_APP}\n[tool.flwr.app.config]\nfolder = {name}\n", encoding="utf-8")


def app_fault(fab: bytes) -> str:
    """Why an app, as Flower sends it, is not that of `safa deploy`, or ""."""
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as archive:
            files = archive.infolist()
            if sorted(file.filename for file in files) != _FILES:
                return "it contains other files than ours"
            if any(file.file_size > _MOST_BYTES for file in files):
                return "it is larger than ours"
            found = tomllib.loads(archive.read(_PROJECT).decode())
        found["tool"]["flwr"]["app"].pop("config", None)
    except Exception as error:  # the app may come from anyone
        return f"it cannot be read ({type(error).__name__})"
    ours: dict[str, Any] = tomllib.loads(_APP)
    return "" if found == ours else "its description differs from ours"
