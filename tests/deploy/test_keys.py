"""The keys of a trial: real handshakes in memory, formats, modes, and what is never overwritten."""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key

from safa.deploy.launcher.keys import add_client, make_keys
from safa.errors import SafaError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trial") / "keys"
    make_keys(made, hosts=["fl.example.org", "10.0.0.7", "fe80::1"], clients=["ann", "Ward 3"])
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shake_hands(server_folder: Path, ca_folder: Path, host: str) -> None:
    """A TLS handshake of a client that trusts one folder's CA with the server of another, over two buffers."""
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(server_folder / "server.pem", server_folder / "server.key")
    client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_side.load_verify_locations(cadata=(ca_folder / "ca.crt").read_text("ascii"))
    client_side.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(down, up, server_hostname=host)
    server = server_side.wrap_bio(up, down, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert client.version() == "TLSv1.3"


@pytest.mark.parametrize("host", ["fl.example.org", "10.0.0.7", "fe80::1", "localhost", "127.0.0.1", "::1"])
def test_a_client_trusts_the_server_by_each_of_its_names(folder: Path, host: str) -> None:
    shake_hands(folder, folder, host)


def test_a_client_trusts_no_other_name_no_other_authority_and_nothing_expired(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(folder, folder, "evil.example.org")
    make_keys(tmp_path / "expired", hosts=[], clients=[], days=-1)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tmp_path / "expired", folder, "localhost")
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(tmp_path / "expired", tmp_path / "expired", "localhost")


def test_client_keys_are_what_flower_reads(folder: Path) -> None:
    key = load_ssh_private_key((folder / "clients" / "ann.key").read_bytes(), None)
    public = load_ssh_public_key((folder / "clients" / "ann.pub").read_bytes())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP384R1)
    assert key.public_key() == public


def test_the_other_keys_are_pkcs8(folder: Path) -> None:
    for name in ("ca", "server"):
        assert (folder / f"{name}.key").read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
        assert isinstance(load_pem_private_key((folder / f"{name}.key").read_bytes(), None), ec.EllipticCurvePrivateKey)


def test_the_files_and_their_modes(folder: Path) -> None:
    assert contents(folder).keys() == {
        "ca.crt", "ca.key", "server.pem", "server.key",
        "clients/ann.key", "clients/ann.pub", "clients/Ward 3.key", "clients/Ward 3.pub",
    }  # fmt: skip
    for path in folder.rglob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_private_keys_are_private_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: dict[str, int] = {}
    real_open = os.open

    def watched(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = real_open(path, flags, mode)
        modes[Path(path).name] = stat.S_IMODE(os.fstat(descriptor).st_mode)
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    make_keys(tmp_path / "keys", hosts=[], clients=["ann"])
    assert {name: mode for name, mode in modes.items() if name.endswith(".key")} == dict.fromkeys(
        ("ca.key", "server.key", "ann.key"), 0o600
    )


def test_the_certificates_say_how_long_and_for_whom(tmp_path: Path) -> None:
    now = datetime(2030, 1, 2, tzinfo=UTC)
    for name in ("one", "two"):
        make_keys(tmp_path / name, hosts=["localhost", "a.example"], clients=[], days=10, now=now)
    ca, server = (x509.load_pem_x509_certificate((tmp_path / "one" / n).read_bytes()) for n in ("ca.crt", "server.pem"))
    for certificate in (ca, server):
        assert certificate.not_valid_before_utc == now - timedelta(days=1)
        assert certificate.not_valid_after_utc == now + timedelta(days=10)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "a.example"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address(a) for a in ("127.0.0.1", "::1")]
    other = x509.load_pem_x509_certificate((tmp_path / "two" / "server.pem").read_bytes())
    assert len({ca.serial_number, server.serial_number, other.serial_number}) == 3


def test_nothing_is_overwritten_and_nothing_is_half_done(tmp_path: Path) -> None:
    make_keys(tmp_path, hosts=[], clients=["ann"])
    before = contents(tmp_path)
    for clients in (["ann"], ["bob"]):
        with pytest.raises(SafaError, match="is there already; choose another folder, or replace it with --force"):
            make_keys(tmp_path, hosts=[], clients=clients)
    assert contents(tmp_path) == before
    make_keys(tmp_path, hosts=[], clients=["bob"], force=True)
    after = contents(tmp_path)
    assert after["clients/ann.key"] == before["clients/ann.key"]
    assert after["ca.key"] != before["ca.key"]
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", hosts=[], clients=[])
    (tmp_path / "elsewhere").write_bytes(b"mine")
    (tmp_path / "keys" / "clients").mkdir()
    (tmp_path / "keys" / "clients" / "ann.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SafaError, match="is there already"):
        add_client(tmp_path / "keys", "ann")
    add_client(tmp_path / "keys", "ann", force=True)
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"


def test_a_further_client_touches_no_other(tmp_path: Path) -> None:
    make_keys(tmp_path, hosts=[], clients=["ann"])
    before = contents(tmp_path)
    made = add_client(tmp_path, "bob")
    assert [path.name for path in made] == ["bob.key", "bob.pub"]
    assert {name: data for name, data in contents(tmp_path).items() if "bob" not in name} == before
    with pytest.raises(SafaError, match=r"bob\.key is there already"):
        add_client(tmp_path, "bob")


def test_wrong_wishes_are_said_clearly(tmp_path: Path) -> None:
    with pytest.raises(SafaError, match=r"without a port, unlike 'a\.example:8000'"):
        make_keys(tmp_path / "new", hosts=["a.example:8000"], clients=[])
    with pytest.raises(SafaError, match="no path separator"):
        make_keys(tmp_path / "new", hosts=[], clients=["../ann"])
    with pytest.raises(SafaError, match="the client ann is named twice"):
        make_keys(tmp_path / "new", hosts=[], clients=["ann", "ann"])
    with pytest.raises(SafaError, match="holds no keys of a trial"):
        add_client(tmp_path / "new", "ann")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(SafaError, match="cannot write"):
        make_keys(tmp_path / "file", hosts=[], clients=[])
