"""The live view in a real browser: pages that are open grow by themselves, and ask nobody but the server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, Page, sync_playwright

from safa.experiments.sweep import run_sweep
from safa.runs.folder import ROSTER, STATUS, STATUS_FORMAT
from safa.runs.settings import Settings
from tests.deploy.real import running, safa
from tests.deploy.real import wait_for as wait_until
from tests.programs import chromium
from tests.report.live.serving import serving, written

pytestmark = [pytest.mark.slow, pytest.mark.quiet]

SOON_MS = 2000
Open = Callable[..., AbstractContextManager[Page]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser) -> Open:
    """Opens a page until the block is left; then there must be no console message, and no request but to the server."""

    @contextmanager
    def open_one(address: str, path: str = "", *, width: int = 1280, scheme: str = "light") -> Iterator[Page]:
        heard: list[str] = []
        asked: set[str] = set()
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("request", lambda request: asked.add(request.url))
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda problem: heard.append(str(problem)))
        page.goto(address + path)
        yield page
        context.close()
        assert heard == []
        assert {url for url in asked if not url.startswith((address, "data:", "blob:"))} == set()

    return open_one


def glance(page: Page) -> str:
    """What the page of a run says above everything else."""
    return page.locator("header .glance").inner_text()


def wait_for(page: Page, selector: str, words: str, *, ms: int = SOON_MS) -> None:
    """Wait until an element says something."""
    page.wait_for_function(
        "([selector, words]) => document.querySelector(selector)?.textContent.includes(words)",
        arg=[selector, words],
        timeout=ms,
    )


def test_a_page_that_is_open_shows_a_new_round_within_two_seconds_without_a_reload(
    tmp_path: Path, opened: Open
) -> None:
    with written(tmp_path / "run", done=4) as run, serving(tmp_path) as address, opened(address, "run/run") as page:
        page.wait_for_selector("html[data-ready]", state="attached")
        assert "4 of 12 rounds" in glance(page)
        page.evaluate("window.opened = true; document.querySelectorAll('figure').forEach((one) => { one.old = true; })")
        run.add()
        wait_for(page, "header .glance", "5 of 12 rounds")
        page.wait_for_function("[...document.querySelectorAll('figure')].some((one) => !one.old)", timeout=SOON_MS)
        run.finish()
        wait_for(page, "header .glance .state", "finished")
        page.wait_for_function("!document.querySelector('main').textContent.includes('not finished')")
        assert page.evaluate("window.opened")  # it is still the same page


def test_a_run_of_the_command_is_seen_on_the_server_of_the_command(tmp_path: Path, opened: Open) -> None:
    """Nothing but real processes. Whatever round is on the disk is seen within two seconds, without a reload."""
    rounds, log = tmp_path / "runs" / "one" / "rounds.jsonl", tmp_path / "serve.log"
    count = "Number(document.querySelector('header .glance .count').textContent.replaceAll(',', '').split(' ')[0])"
    with running() as processes:
        run = safa(processes, tmp_path / "run.log", "run", "digits", "--rounds", "5000", "--out", str(rounds.parent))
        wait_until(rounds.exists, run, log=tmp_path / "run.log")
        server = safa(processes, log, "serve", str(tmp_path / "runs"), "--port", "0")
        wait_until(lambda: "http://" in log.read_text(), server, log=log)
        address = re.findall(r"http://\S+", log.read_text())[0]
        with opened(address, "run/one") as page:
            page.wait_for_selector("html[data-ready]", state="attached")
            page.evaluate("window.opened = true")
            for _ in range(3):
                written = rounds.read_bytes().count(b"\n")
                page.wait_for_function(f"written => {count} >= written", arg=written, timeout=SOON_MS)
            assert written > 1
            page.locator(".client select").select_option("3")
            assert "Updates merged" in page.locator(".client-details").inner_text()
            assert "running" in glance(page)
            assert page.evaluate("window.opened")
        assert run.poll() is None


def test_a_page_that_was_opened_before_the_first_round_shows_it(tmp_path: Path, opened: Open) -> None:
    with written(tmp_path / "run") as run, serving(tmp_path) as address, opened(address, "run/run") as page:
        wait_for(page, "header .glance", "0 of 12 rounds")
        run.add(3)
        wait_for(page, "header .glance", "3 of 12 rounds")
        page.wait_for_selector("main figure .chart[data-drawn]")


def test_the_list_grows_and_follows_its_runs(tmp_path: Path, opened: Open) -> None:
    with serving(tmp_path) as address, opened(address) as page:
        assert "There are no runs here yet" in page.locator("main").inner_text()
        with written(tmp_path / "first", done=2) as run:
            wait_for(page, "[data-run=first]", "2 of 12 rounds")
            page.get_by_label("Compare first").check()
            run.add()
            wait_for(page, "[data-run=first]", "3 of 12 rounds")
            assert page.get_by_label("Compare first").is_checked()
            assert page.locator("[data-run=first] polyline").count() == 1
        wait_for(page, "[data-run=first] .state", "stopped")
        with written(tmp_path / "<b>second", done=1):
            wait_for(page, "#runs li:first-child", "<b>second")  # what runs comes first
            assert page.locator("#runs b:not(.value b)").count() == 0
        page.get_by_role("link", name="first").click()
        page.wait_for_selector("html[data-ready]", state="attached")
        assert "stopped" in glance(page)
        page.get_by_role("link", name="All runs").click()
        page.wait_for_selector("#runs li")


def test_a_sweep_grows_run_by_run_and_leads_to_its_runs(tmp_path: Path, opened: Open) -> None:
    runs = [Settings.of("boston", rounds=3, train=False, seed=seed) for seed in range(3)]
    made = run_sweep(runs, tmp_path / "sweep")
    next(made)
    next(made)
    with serving(tmp_path) as address, opened(address, "run/sweep") as page:
        assert "2 of 3 runs" in glance(page)
        page.evaluate("window.opened = true")
        list(made)
        wait_for(page, "header .glance", "3 runs")
        page.wait_for_function("document.querySelectorAll('.table:last-of-type tbody tr').length >= 3")
        page.goto(address)
        page.get_by_role("link", name="its runs").click()
        assert page.locator("#runs li").count() == 3


STATUS_NOW: dict[str, Any] = {
    "format": STATUS_FORMAT, "now_s": 100.0, "round": 3, "is_open": True, "opened_s": 90.0, "deadline_s": 150.0,
    "quota": 3, "accepted": 1, "openings": 1, "refusals": {"norm": 2},
}  # fmt: skip


def client(name: str, **more: Any) -> dict[str, Any]:
    usual = {"online": True, "last_seen_s": 100.0, "at_work": True, "lag": 0, "refused": 0, "present": True,
             "blocked": False, "expelled": False}  # fmt: skip
    return {"name": name} | usual | more


def test_a_deployment_shows_the_round_that_is_under_way(tmp_path: Path, opened: Open) -> None:
    folder = tmp_path / "run"
    clients = [
        client("<i>ann", lag=1),
        client("bob", online=False, last_seen_s=60.0),
        client("eve", blocked=True, refused=2),
    ]
    with written(folder, done=2):
        (folder / "deploy.toml").touch()
        (folder / ROSTER).write_text(json.dumps([{"name": c["name"], "size": 1, "details": {}} for c in clients]))
        (folder / STATUS).write_text(json.dumps(STATUS_NOW | {"clients": clients}))
        with serving(tmp_path) as address, opened(address, "run/run") as page:
            check_deployment(page, folder, clients)


def check_deployment(page: Page, folder: Path, clients: list[dict[str, Any]]) -> None:
    part = page.locator("#under-way")
    assert "Round 3 is open" in part.inner_text()
    assert re.search(r"updates in\s+1 of 3", part.inner_text())
    rows = [re.split(r"\s+", row) for row in part.locator("tbody tr").all_inner_texts()]
    assert [row[:2] for row in rows] == [["<i>ann", "online"], ["bob", "offline"], ["eve", "blocked"]]
    assert "40" in rows[1]
    (folder / STATUS).write_text(json.dumps(STATUS_NOW | {"accepted": 2, "clients": clients}))
    wait_for(page, "#under-way", "2 of 3")
    (folder / "summary.json").write_text("{}")
    page.wait_for_selector("#under-way", state="detached")  # no round is under way any more


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_list_is_accessible_and_fits(tmp_path: Path, opened: Open, width: int, scheme: str) -> None:
    long = "a-run-with-a-name-that-is-as-long-as-names-of-runs-can-be"
    with (
        written(tmp_path / long, done=5),
        serving(tmp_path) as address,
        opened(address, width=width, scheme=scheme) as page,
    ):
        page.wait_for_selector("#runs polyline")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        found = Axe().run(page).response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []


def test_two_runs_are_compared_from_the_list(tmp_path: Path, opened: Open) -> None:
    for protocol in ("safa", "fedavg"):
        with written(tmp_path / protocol, protocol=protocol) as run:
            run.finish()
    with serving(tmp_path) as address, opened(address) as page:
        for name in ("safa", "fedavg"):
            page.get_by_label(f"Compare {name}").check()
        page.get_by_role("button", name="Compare").click()
        page.wait_for_selector("html[data-ready]", state="attached")
        assert {"SAFA", "FedAvg"} <= set(re.findall(r"\w+", page.locator("main").inner_text()))
