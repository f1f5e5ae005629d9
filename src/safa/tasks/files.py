"""Data files that are too large to ship: found in a folder, or downloaded once and kept.

A folder that the environment variable SAFA_DATA names is looked at first; no library is needed to find a file there.
Everything else is downloaded into the user's cache (`safa.cache`). No file is used unless its checksum is right.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safa.cache import cache_folder
from safa.errors import SafaError

if TYPE_CHECKING:
    import requests

__all__ = ["FILES", "Source", "data_file", "resume_download"]

_CHUNK = 1 << 16
_PATIENCE_S = 30.0
_GOES_ON, _BEYOND_THE_END = 206, 416  # what a server answers when it is asked for the rest of a file


@dataclass(frozen=True)
class Source:
    """Where a file can be had, and how to know it."""

    url: str
    sha256: str


_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist/"
_KDD = "http://kdd.ics.uci.edu/databases/kddcup99/"

FILES: dict[str, Source] = {
    name: Source(folder + name, sha256)
    for folder, name, sha256 in (
        (
            _MNIST,
            "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        (
            _MNIST,
            "train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        (
            _MNIST,
            "t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        (
            _MNIST,
            "t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
        (
            _KDD,
            "kddcup.data_10_percent.gz",
            "8045aca0d84e70e622d1148d7df782496f6333bf6eb979a1b0837c42a9fd9561",
        ),
    )
}


def data_file(name: str) -> Path:
    """Where the data file of that name lies, after it was downloaded if need be."""
    source = FILES[name]
    folder = os.environ.get("SAFA_DATA")
    if folder and not Path(folder).is_dir():
        raise SafaError(f"SAFA_DATA must name a folder, not {folder!r}")
    if folder and (Path(folder) / name).exists():
        return _checked(Path(folder) / name, source)
    return _downloaded(name, source)


def _checked(path: Path, source: Source) -> Path:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SafaError(f"cannot read {path}: {error.strerror}") from None
    if digest != source.sha256:
        raise SafaError(f"{path} is damaged (its sha256 is wrong); download it again from {source.url}")
    return path


def _downloaded(name: str, source: Source) -> Path:
    """The file in the user's cache, where it is downloaded to if it is not there or not whole."""
    try:
        import pooch  # type: ignore[import-untyped]

        pooch.get_logger().setLevel("WARNING")  # the progress bar says the rest
        return Path(
            pooch.retrieve(
                source.url,
                known_hash=f"sha256:{source.sha256}",
                fname=name,
                path=cache_folder(),
                downloader=resume_download,
            )
        )
    except ImportError:
        reason = "pooch, which downloads it, is not installed"
    except OSError as error:
        reason = _reason(error)
    except ValueError:
        reason = "what was downloaded is damaged (its sha256 is wrong)"
    raise SafaError(
        f"cannot get {name}: {reason}; try again later, or download {source.url} yourself, put it into a folder and "
        "set SAFA_DATA to that folder"
    )


def _reason(error: OSError) -> str:
    """Why a download failed; the errors of `requests` are all of this type, and their own words are many."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"the server answered {response.status_code} {response.reason}"
    return error.strerror or "there is no connection, or it was lost"


def resume_download(url: str, output_file: Any, pooch: Any) -> None:
    """A downloader for pooch that continues where the last attempt was cut off.

    What has come is kept beside the output file, under the name of the file and `.part`, until it is whole.
    """
    import requests

    part = Path(output_file).with_name(f"{url.rsplit('/', 1)[-1]}.part")
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=headers, stream=True, timeout=_PATIENCE_S) as response:
        if have and response.status_code == _BEYOND_THE_END:
            part.unlink()
            return resume_download(url, output_file, pooch)
        response.raise_for_status()
        _receive(response, part, have if response.status_code == _GOES_ON else 0)
    part.replace(output_file)
    return None


def _receive(response: requests.Response, part: Path, have: int) -> None:
    """Write what comes behind the first `have` bytes of the part, with a progress bar for whoever sits there."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    # Some servers take the .gz in a name for an encoding of the transfer; the file is wanted as it is.
    response.raw.headers.pop("Content-Encoding", None)
    length = response.headers.get("Content-Length")
    total = have + int(length) if length else None
    with (
        tqdm(desc=part.stem, total=total, initial=have, unit="B", unit_scale=True, leave=False, disable=None) as bar,
        part.open("ab" if have else "wb") as file,
    ):
        for chunk in response.iter_content(_CHUNK):
            file.write(chunk)
            bar.update(len(chunk))
