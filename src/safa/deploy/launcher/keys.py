"""Keys for a trial: a certificate authority, a server certificate, and one key pair per client.

    ca.crt, ca.key            SuperLink --ssl-ca-certfile, SuperNode --root-certificates; the key is the operator's
    server.pem, server.key    SuperLink --ssl-certfile and --ssl-keyfile
    clients/NAME.key          SuperNode --auth-supernode-private-key
    clients/NAME.pub          flwr supernode register

All keys are ECDSA P-384. Certificates and the keys of the CA and the server are PEM (PKCS8). A client's pair is in the
format of OpenSSH, the only one that Flower reads there. Private keys are not encrypted; they are created for their
owner alone (mode 0600) and are never replaced unless that is asked for.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from safa.deploy.exchange.roster import name_fault
from safa.errors import SafaError

__all__ = ["add_client", "make_keys"]

_OWN_HOSTS = ("localhost", "127.0.0.1", "::1")  # the SuperLink's own processes call it by these
_SKEW = timedelta(days=1)  # a clock that is set back some minutes after the keys were made must not stop everybody
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
_SECRET, _PUBLIC = 0o600, 0o644

_Files = list[tuple[Path, bytes, int]]  # where, what, and with which mode


def make_keys(
    folder: str | Path,
    *,
    hosts: Sequence[str],
    clients: Sequence[str],
    days: float = 365,
    force: bool = False,
    now: datetime | None = None,
) -> list[Path]:
    """Make all keys of a trial and return the files.

    `hosts` are the names and addresses by which clients call the server; those of the machine itself are added. The
    certificates hold from five minutes before `now` for so many `days`; a negative number makes expired ones. Files
    that exist are an error, found before anything is to_records, unless `force` is given; other clients' keys stay.
    """
    root = Path(folder)
    names = _host_names([*hosts, *_OWN_HOSTS])
    files = [file for name in _checked_clients(clients) for file in _client_files(root, name)]
    start = now or datetime.now(UTC)
    files += _certified_files(root, names, start, start + timedelta(days=days))
    return _write_all(files, force=force)


def add_client(folder: str | Path, name: str, *, force: bool = False) -> list[Path]:
    """Make the key pair of a further client in a folder that `make_keys` made, and return the files."""
    root = Path(folder)
    if not (root / "ca.crt").is_file():
        raise SafaError(f"{root} holds no keys of a trial: there is no ca.crt in it")
    return _write_all(_client_files(root, *_checked_clients([name])), force=force)


# -- what is in the files --------------------------------------------------------------------------------------------


def _client_files(root: Path, name: str) -> _Files:
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return [(root / "clients" / f"{name}.key", secret, _SECRET), (root / "clients" / f"{name}.pub", public, _PUBLIC)]


def _certified_files(root: Path, hosts: list[x509.GeneralName], now: datetime, end: datetime) -> _Files:
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca = _authority(ca_key, now, end)
    server = _server(server_key.public_key(), hosts, ca, ca_key)
    return [
        (root / "ca.key", _pkcs8(ca_key), _SECRET),
        (root / "ca.crt", ca.public_bytes(Encoding.PEM), _PUBLIC),
        (root / "server.key", _pkcs8(server_key), _SECRET),
        (root / "server.pem", server.public_bytes(Encoding.PEM), _PUBLIC),
    ]


def _pkcs8(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _authority(key: ec.EllipticCurvePrivateKey, now: datetime, end: datetime) -> x509.Certificate:
    """A certificate that signs itself, and may sign those of servers."""
    name = _common_name("SAFA trial authority")
    builder = _certificate(name, name, key.public_key(), min(now, end) - _SKEW, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return _signed(builder, key)


def _server(
    key: ec.EllipticCurvePublicKey,
    hosts: list[x509.GeneralName],
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """The server's certificate, which holds as long as its authority's."""
    name = _common_name("SAFA server")
    builder = _certificate(name, ca.subject, key, ca.not_valid_before_utc, ca.not_valid_after_utc)
    builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return _signed(builder, ca_key)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    return builder.add_extension(issuer, critical=False).sign(key, hashes.SHA384())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


# -- what was asked for ----------------------------------------------------------------------------------------------


def _checked_clients(names: Iterable[str]) -> list[str]:
    checked: list[str] = []
    for name in names:
        fault = name_fault(name)
        if fault:
            raise SafaError(fault)
        if name in checked:
            raise SafaError(f"the client {name} is named twice")
        checked.append(name)
    return checked


def _host_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    return [_host_name(host) for host in dict.fromkeys(hosts)]


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if len(host) <= 253 and _HOST.fullmatch(host):
            return x509.DNSName(host)
        raise SafaError(f"a host is a name or an address, without a port, unlike {host!r}") from None


# -- the disk --------------------------------------------------------------------------------------------------------


def _write_all(files: _Files, *, force: bool) -> list[Path]:
    try:
        there = [path for path, _, _ in files if os.path.lexists(path)]
        if there and not force:
            raise SafaError(f"{there[0]} is there already; choose another folder, or replace it with --force")
        for path, content, mode in files:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if force:
                path.unlink(missing_ok=True)
            _write(path, content, mode)
    except OSError as error:
        raise SafaError(f"cannot write {error.filename}: {error.strerror}") from None
    return [path for path, _, _ in files]


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a new file that has its mode from the start; one that is in the way is an error, never written into."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
