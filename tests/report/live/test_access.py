"""Who is answered, and what: by plain requests, as an attacker makes them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from safa.cli.program import main
from safa.errors import SafaError
from safa.experiments.sweep import run_sweep
from safa.report.live import LiveServer
from safa.runs.settings import Settings
from tests.report.live.serving import Answer, ask, serving, written

TOKEN = "a-token-of-a-test_0123"
HOSTILE = ["<script>alert(1)</script>", "x..%2f", "a\"b'c", "a&amp;b#c?d"]


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    with written(folder / "top" / "run", done=2), written(folder / "outside", done=2):
        pass
    for name in HOSTILE:
        with written(folder / "top" / name, done=1):
            pass
    (folder / "top" / "linked").symlink_to(folder / "outside")
    list(run_sweep([Settings.of("boston", rounds=2, train=False)], folder / "top" / "sweep"))
    (folder / "top" / "sweep" / "runs" / "0001").rename(folder / "of-a-sweep")
    (folder / "top" / "sweep" / "runs" / "0001").symlink_to(folder / "of-a-sweep")
    with written(folder / "top" / "two\nlines", done=1):
        pass
    (folder / "secret.txt").write_text("a secret")
    (folder / "top" / "run" / "notes.txt").write_text("a secret")
    return folder / "top"


@pytest.fixture(scope="module")
def open_address(top: Path) -> Iterator[str]:
    with serving(top) as address:
        yield address


@pytest.fixture(scope="module")
def closed_address(top: Path) -> Iterator[str]:
    """A server that others can reach."""
    with serving(top, host="0.0.0.0", token=TOKEN) as address:
        yield address


def cookie_of(answer: Answer) -> str:
    return str(answer.headers["set-cookie"]).partition(";")[0]


def test_without_the_token_nothing_is_served(closed_address: str) -> None:
    paths = ("/", "/run/run", "/in/run", "/compare?run=run", "/events/run/run", "/events/in/", "/nothing", "/?token=",
             f"/?token={TOKEN[:-1]}", f"/?token={TOKEN}x", "/?token=%00")  # fmt: skip
    for path in paths:
        answer = ask(closed_address, path)
        assert answer.status == 403
        assert "needs the token" in answer.text
        assert "digits" not in answer.text
    port = closed_address.rpartition(":")[2].partition("/")[0]
    for cookie in (f"safa-token-{port}=", f"safa-token-{port}=wrong", "x", 'safa-token="', f"other={TOKEN}"):
        assert ask(closed_address, "/", headers={"Cookie": cookie}).status == 403


def test_the_token_is_taken_from_the_address_once_and_then_from_a_cookie(closed_address: str) -> None:
    given = ask(closed_address, f"/run/run?token={TOKEN}&x=1")
    assert (given.status, given.headers["location"], given.text) == (303, "/run/run?x=1", "")
    assert re.search(r"; HttpOnly; Path=/; SameSite=lax$", given.headers["set-cookie"])
    shown = ask(closed_address, "/run/run", headers={"Cookie": cookie_of(given)})
    assert shown.status == 200
    assert "SAFA on digits" in shown.text
    assert ask(closed_address, f"//elsewhere.org/?token={TOKEN}").headers["location"] == "/elsewhere.org/"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "localhost.evil", "a b"]
)
def test_a_request_for_another_host_is_refused(open_address: str, closed_address: str, host: str) -> None:
    for address in (open_address, closed_address):
        answer = ask(address, f"/?token={TOKEN}", headers={"Host": host})
        assert answer.status in (400, 421)
        assert "digits" not in answer.text
        assert "set-cookie" not in answer.headers


def test_addresses_of_this_machine_are_answered(open_address: str, closed_address: str) -> None:
    for host in ("127.0.0.1", "localhost:99", "LOCALHOST", "[::1]:8"):
        assert ask(open_address, "/", headers={"Host": host}).status == 200
    assert ask(open_address, "/", headers={"Host": "192.168.1.7"}).status == 421
    assert ask(closed_address, "/", headers={"Host": "192.168.1.7"}).status == 403  # it is asked for the token


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_it_can_be_read_only(open_address: str, method: str) -> None:
    assert ask(open_address, "/run/run", method=method).status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/run/../outside", "/run/..%2foutside", "/run/%2e%2e/outside", "/run/%2e%2e%2foutside", "/run/run/../../x",
        "/run//etc/passwd", "/run/%2fetc%2fpasswd", "/run/linked", "/run/run/notes.txt", "/run/run/rounds.jsonl",
        "/run/run%00", "/run/sweep", "/events/run/sweep", "/run/two%0alines",
        "/run/", "/run", "/in/..", "/in/%2e%2e/outside", "/in/linked", "/events/run/..%2foutside",
        "/events/in/..%2f", "/../secret.txt", "/page.css", "/run/run/config.toml", "/events/run/linked", "/run/%ff",
        "/run/" + "a" * 5000, "/run/" + "a/" * 2000,
    ],
    ids=lambda path: path[:30],
)  # fmt: skip
def test_no_path_leads_out_or_to_a_file(open_address: str, path: str) -> None:
    answer = ask(open_address, path)
    assert answer.status == 404
    assert "secret" not in answer.text
    assert "root:" not in answer.text
    assert "digits" not in answer.text


def test_a_comparison_takes_nothing_from_outside(open_address: str) -> None:
    for paths in (
        "run=run&run=../outside",
        "run=linked&run=run",
        "run=/etc&run=/tmp",
        "",
        "run=run",
        "run=run&run=run",
    ):
        answer = ask(open_address, f"/compare?{paths}")
        assert "Choose two or more" in answer.text


def test_hostile_names_are_shown_as_they_are_and_do_nothing(open_address: str) -> None:
    listed = ask(open_address, "/").text
    assert "<script>alert" not in listed
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in listed
    addresses = re.findall(r'<a href="(/run/[^"]+)"', listed)
    assert len(addresses) == len(HOSTILE) + 2
    for address in set(addresses) - {"/run/sweep"}:
        page = ask(open_address, address)
        assert page.status == 200
        assert "<script>alert" not in page.text


def test_every_answer_tells_the_browser_to_be_careful(open_address: str) -> None:
    for path in ("/", "/run/run", "/compare", "/nothing"):
        headers = ask(open_address, path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "base-uri 'none'" in policy
        assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers
        assert "access-control-allow-origin" not in headers


def test_elsewhere_than_on_loopback_a_token_is_made(tmp_path: Path) -> None:
    with serving(tmp_path, host="0.0.0.0") as address:
        assert re.search(r"/\?token=[\w-]{32}$", address)
        assert ask(address, "/").status == 403
        assert ask(address, address[address.index("/?") :]).status == 303


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"port": 70000}, "a port is a number from 0 to 65535, not 70000"),
        ({"token": "short"}, "a token has at least 16 characters"),
        ({"token": "with a space in it; and more"}, "letters, digits, - and _ only"),
        ({"host": "no.such.host.invalid"}, "cannot listen on no.such.host.invalid"),
        ({"folder": "nowhere"}, "there is no folder"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, given: dict[str, object], said: str) -> None:
    values = {"folder": tmp_path} | {name: tmp_path / "x" if name == "folder" else v for name, v in given.items()}
    with pytest.raises(SafaError, match=said):
        LiveServer(reproduction=str, **values)  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_one_sentence(
    tmp_path: Path, open_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = open_address.rpartition(":")[2].strip("/")
    assert main(["serve", str(tmp_path), "--port", port]) == 2
    assert capsys.readouterr().err == f"safa: cannot listen on 127.0.0.1, port {port}: Address already in use\n"


def test_the_server_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[3] / "docs" / "serve.md"
    monkeypatch.chdir(tmp_path)
    exec(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0], {})
    assert re.fullmatch(r"http://127.0.0.1:\d+/ 200\n", capsys.readouterr().out)


def test_without_the_extra_one_sentence_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(tmp_path)]) == 2
    assert capsys.readouterr().err == ("safa: the live view needs uvicorn; install it with pip install 'safa[serve]'\n")
