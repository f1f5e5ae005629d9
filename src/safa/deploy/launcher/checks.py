"""Checks before something is started, each with one sentence: keys, ports, disks, connections, clocks."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import time
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

from safa.deploy.flower.ports import bound_socket
from safa.errors import SafaError

__all__ = [
    "check_certificate",
    "check_keys",
    "check_port",
    "clock_fault",
    "is_loopback",
    "private_key_fault",
    "public_key_fault",
    "unreachable",
    "write_fault",
]

_TRIAL_BYTES = 65_536
_AHEAD_S, _BEHIND_S = 5.0, 305.0  # how far Flower lets a device's clock be off


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_certificate(file: Path) -> None:
    """Raise an error if a file is not the certificate of an authority that a client could trust."""
    from cryptography.x509 import load_pem_x509_certificate

    try:
        load_pem_x509_certificate(file.read_bytes())
    except OSError as error:
        raise SafaError(f"cannot read {file}: {error.strerror}") from None
    except ValueError:
        raise SafaError(f"{file} is not a certificate") from None


def check_keys(folder: Path) -> None:
    """Raise an error if no server can be run with a folder of keys."""
    from cryptography.x509 import load_pem_x509_certificate

    for name in ("ca.crt", "server.pem", "server.key"):
        if not (folder / name).is_file():
            raise SafaError(f"{folder} has no {name}; safa deploy keys makes the keys of a server")
    file = folder / "server.pem"
    try:
        until = load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        raise SafaError(f"{file} is not a readable certificate") from None
    if until < datetime.now(UTC):
        raise SafaError(f"the certificate {file} expired on {until:%Y-%m-%d}; make new ones with safa deploy keys")


def private_key_fault(file: Path) -> str | None:
    """What is wrong with the private key of a client, or None."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        fits = isinstance(load_ssh_private_key(file.read_bytes(), None), EllipticCurvePrivateKey)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        fits = False
    return None if fits else "it is not an elliptic-curve key in OpenSSH format without a password"


def public_key_fault(key: str) -> str | None:
    """What is wrong with a public key, or None. Flower must not be given a wrong one: its program would end."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        fits = isinstance(load_ssh_public_key(key.encode()), EllipticCurvePublicKey)
    except (ValueError, UnsupportedAlgorithm):
        fits = False
    return None if fits else "it is not an elliptic-curve key in OpenSSH format"


def check_port(host: str, port: int) -> None:
    """Raise an error if no server can listen on an address."""
    try:
        bound_socket(host, port).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SafaError(f"cannot listen on {host}, port {port}: {reason}") from None


def write_fault(folder: Path) -> str:
    """Why nothing can be written into a folder, or ""."""
    trial = folder / f".trial-{os.getpid()}"
    try:
        trial.write_bytes(bytes(_TRIAL_BYTES))
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    finally:
        with suppress(OSError):
            trial.unlink(missing_ok=True)
    return ""


def unreachable(server: str, ca: Path | None) -> str:
    """Why a server cannot be reached or trusted, or ""; Flower's log does not say."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as plain:
            if ca:
                ssl.create_default_context(cafile=str(ca)).wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted: {error.verify_message}"
    except ssl.SSLError as error:
        return f"it does not speak TLS: {error.reason}"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def clock_fault(server: str, ca: Path | None) -> str:
    """How far this machine's clock is off, where that is too far for Flower to accept its signatures, or ""."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    context = ssl.create_default_context(cafile=str(ca)) if ca else None
    connection = (
        HTTPSConnection(host, int(port), timeout=5, context=context) if context else HTTPConnection(host, int(port))
    )
    try:
        began = time.time()
        connection.request("HEAD", "/")
        theirs = parsedate_to_datetime(connection.getresponse().headers["Date"]).timestamp()
        ahead_s = (began + time.time()) / 2 - (theirs + 0.5)  # the header has whole seconds
    except (OSError, HTTPException, TypeError, ValueError):
        return ""  # no time was sent
    finally:
        connection.close()
    if -_BEHIND_S <= ahead_s <= _AHEAD_S:
        return ""
    off = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the server's"
    return f"{off}; Flower accepts up to {_AHEAD_S:.0f} s ahead or {_BEHIND_S:.0f} s behind: use NTP"
