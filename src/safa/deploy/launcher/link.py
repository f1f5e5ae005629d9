"""The folder of a deployment, and how its server is reached."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from safa.deploy.exchange.device import check_schedule
from safa.deploy.exchange.options import FILE as OPTIONS_FILE
from safa.deploy.exchange.options import Options
from safa.deploy.flower.ports import LOOPBACK
from safa.deploy.launcher.checks import check_keys, check_port
from safa.deploy.launcher.processes import private_files
from safa.errors import SafaError
from safa.protocol import build
from safa.runs import new_folder, write_atomically, write_config
from safa.runs.lock import in_use, is_launched
from safa.runs.settings import Settings
from safa.tasks import find_task

__all__ = ["FLOWER", "OWNER_ONLY", "Link", "begin", "begin_local", "local_names"]

FLOWER = "flower"
"""The folder of everything that belongs to Flower, in the folder of a run."""
OWNER_ONLY = 0o700

_LINK = "link.json"
_LARGE_BYTES = 100_000_000  # less than what fits into the parts that any reply may have


@dataclass(frozen=True, kw_only=True)
class Link:
    """Where the server of a run listens, and how it is protected."""

    host: str
    port: int
    """0: any that is free."""
    keys: str | None
    """The folder of keys, relative to that of the run; None: plain text and no authentication."""
    local: bool = False
    """Whether the clients run on this machine, too."""
    pauses: Mapping[str, float] | None = None
    """By client, how many seconds to add to each of its requests (local only)."""

    def write(self, folder: Path) -> None:
        """Write it to the folder of a run."""
        write_atomically(folder / FLOWER / _LINK, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Link:
        """Read it from the folder of a run."""
        file = folder / FLOWER / _LINK
        try:
            link = cls(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise SafaError(f"{folder} is not the folder of a deployment: there is no {FLOWER}/{_LINK} in it") from None
        except OSError as error:
            raise SafaError(f"cannot read {file}: {error.strerror}") from None
        except (ValueError, TypeError):
            raise SafaError(f"{file} is damaged; restore it from a backup") from None
        if not link._is_valid():
            raise SafaError(f"{file} is damaged; restore it from a backup")
        return link

    def _is_valid(self) -> bool:
        """Whether everything has the right type."""
        pauses = {} if self.pauses is None else self.pauses
        return (
            isinstance(self.host, str)
            and type(self.port) is int
            and 0 <= self.port < 65536
            and isinstance(self.keys, str | None)
            and isinstance(self.local, bool)
            and isinstance(pauses, dict)
            and all(isinstance(seconds, int | float) for seconds in pauses.values())
        )


def begin(folder: Path, settings: Settings, options: Options, link: Link, *, force: bool = False) -> None:
    """Create the folder of a run that is to be deployed."""
    from safa.server.setup import make_aggregator

    if not settings.train:
        raise SafaError("a deployment trains a model; rounds without training can only be simulated")
    protocol = build(settings.protocol, [1.0], settings.values(), settings.protocol_options)
    aggregator = make_aggregator(settings, protocol)
    if aggregator.not_deployed:
        raise SafaError(aggregator.not_deployed)
    check_schedule(settings)
    if link.keys and not link.local:
        check_keys(folder / link.keys)
    if link.port:
        check_port(link.host, link.port)
    if is_launched(folder):
        raise SafaError(in_use(folder))
    problem = find_task(settings.task).load()  # fails now if data are missing
    model_bytes = sum(tensor.nbytes for tensor in problem.start_model(settings.seed).state_dict().values())
    if model_bytes > _LARGE_BYTES:  # then the request filter must know how many parts an update has
        options = replace(options, max_mb=options.screen(model_bytes).max_bytes / 1e6)
    if (folder / FLOWER).exists() and not (folder / FLOWER / _LINK).is_file():
        raise SafaError(f"{folder / FLOWER} exists and was not written by safa; choose another folder")
    new_folder(folder, force=force)
    folder.chmod(OWNER_ONLY)
    with private_files():
        (folder / FLOWER).mkdir()
        link.write(folder)
        write_atomically(folder / OPTIONS_FILE, options.to_toml().encode())
        write_config(folder, settings)


def begin_local(
    folder: Path,
    settings: Settings,
    options: Options,
    *,
    insecure: bool = False,
    pauses: Mapping[str, float] | None = None,
    force: bool = False,
) -> None:
    """Create the folder of a trial on one machine, with keys for all clients unless it is `insecure`."""
    from safa.deploy.launcher.keys import make_keys

    names = local_names(settings)
    for name, seconds in (pauses or {}).items():
        if name not in names:
            raise SafaError(f"there is no client {name!r} to pause; there are {names[0]} to {names[-1]}")
        if not 0 <= seconds < math.inf:
            raise SafaError(f"a pause must be a number of seconds, not {seconds}")
    keys = None if insecure else f"{FLOWER}/keys"
    link = Link(host=LOOPBACK, port=0, keys=keys, local=True, pauses=dict(pauses or {}))
    begin(folder, settings, options, link, force=force)
    if keys:
        with private_files():
            make_keys(folder / keys, hosts=[], clients=names)


def local_names(settings: Settings) -> list[str]:
    """The names of the clients of a trial on one machine."""
    return [f"client-{number}" for number in range(settings.clients)]
