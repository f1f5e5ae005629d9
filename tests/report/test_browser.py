"""The pages in a real browser: nothing is asked from outside, and everything answers to mouse and keyboard."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, Page, Route, sync_playwright

from safa.paper.bias import bias_report
from safa.paper.collect import Results, collect
from safa.paper.grid import job
from safa.paper.reproduction import write_reproduction
from safa.report import compare_page, run_page, run_sections, sweep_page
from safa.report.page import OUTSIDE, Cell, Section, Table, blocks_of, render
from tests.programs import chromium
from tests.report.making import learnt, simulated
from tests.report.test_pages import map_of, sweep

pytestmark = pytest.mark.slow

Open = Callable[..., Page]
RUN = learnt(simulated(rounds=20, lag_tolerance=2))
TARGET = replace(RUN, settings=replace(RUN.settings, until="accuracy=0.9"), summary=None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    rows = sweep(folder, ["boston"], protocol=["safa", "fedavg"], crash_rate=[0.1, 0.3], seed=[0, 1])
    cells: list[list[str | Cell]] = [
        ["b", Cell("10", 10)],
        ["a", Cell("9", 9.0, OUTSIDE)],
        ["c", Cell("")],
        ["a2", Cell("9.0", 9)],
        ["a10", Cell("no", -1)],
    ]
    pages = {
        "run": run_page(RUN),
        "target": run_page(TARGET),
        "equal": compare_page([RUN, replace(RUN)]),
        "wide": run_page(learnt(simulated("kdd99", rounds=100))),
        "sweep": sweep_page(rows),
        "table": render(
            "A table", "To be sorted.", [Section("Table", [Table(["name", "n"], cells, caption="Some rows")])]
        ),
    }
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages} | {"reproduction": reproduced(folder / "reproduction")}


def reproduced(folder: Path) -> Path:
    """The page of a reproduction that has only just begun."""
    folder.mkdir()
    jobs = [
        job("as printed", "boston", protocol, crash_rate=0.3, fraction=fraction, seed=0, train=False)
        for protocol in ("safa", "fedavg")
        for fraction in (0.1, 0.5)
    ]
    list(collect(jobs, Results(folder / "results.jsonl")))
    return write_reproduction(folder, bias=[bias_report(0.3, 0.3, 0.5, 0.3, rounds=4, clients=60, repetitions=100)])


@pytest.fixture
def open_page(browser: Browser, files: dict[str, Path]) -> Iterator[Open]:
    """Opens a page, waits until it is drawn, and holds it to silence: no error, no warning, no request."""
    contexts = []
    heard: list[str] = []
    asked: list[str] = []

    def refuse(route: Route) -> None:
        asked.append(route.request.url)
        route.abort()

    def open_one(
        name: str, *, width: int = 1280, scheme: str = "light", script: str = "", part: str = "", **options: Any
    ) -> Page:
        options |= {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.add_init_script(script)
        page.set_default_timeout(15_000)
        page.route(lambda url: not url.startswith("file:"), refuse)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda problem: heard.append(str(problem)))
        page.goto(files[name].as_uri() + part)
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert heard == []
    assert {url for url in asked if not url.startswith("data:")} <= {path.as_uri() for path in files.values()}


def unfold(page: Page) -> None:
    page.locator("details").evaluate_all("parts => parts.forEach((part) => { part.open = true; })")


def column(page: Page, place: int = 1) -> list[str]:
    """The texts of a column, top to bottom, of the rows that are shown."""
    cells = page.locator(f"tbody tr:not([hidden]) td:nth-child({place})").all_inner_texts()
    return [re.sub(r"[▲★\s].*", "", cell) or cell for cell in cells]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["run", "sweep", "reproduction"])
def test_a_page_is_drawn_whole(open_page: Open, name: str, width: int, scheme: str) -> None:
    page = open_page(name, width=width, scheme=scheme)
    looks = set(page.locator(".chart").evaluate_all("boxes => boxes.map(box => box.dataset.drawn)"))
    assert looks == {scheme + (" narrow" if width == 390 else "")}
    widths = page.locator(".chart svg, .chart canvas").evaluate_all("all => all.map(one => one.clientWidth)")
    assert len(widths) == page.locator(".chart").count()
    assert min(widths) > 300
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out
    sizes = page.locator(".chart").evaluate_all("boxes => boxes.map(box => [box.scrollWidth, box.clientWidth])")
    assert all(inside <= room for inside, room in sizes)


def test_every_chart_is_drawn_without_scrolling(open_page: Open) -> None:
    page = open_page("run")
    assert page.locator(".chart[data-drawn]").count() == page.locator(".chart").count() > 3


def test_runs_that_are_equal_are_compared(open_page: Open) -> None:
    """Axes are drawn also where all values are the same."""
    page = open_page("equal")
    assert page.get_by_text("level with the next").is_visible()
    assert page.locator(".chart[data-drawn]").count() == page.locator(".chart").count() > 3


def test_a_page_follows_the_colour_scheme(open_page: Open) -> None:
    page = open_page("run", scheme="light")
    chart = page.locator(".chart").first
    assert chart.locator("svg path[stroke='#0072b2']").count() > 0
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector(".chart[data-drawn=dark]")
    assert chart.locator("svg path[stroke='#4fa9e3']").count() > 0
    assert chart.locator("svg path[stroke='#0072b2']").count() == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"


@pytest.mark.parametrize("name", ["run", "wide"])
def test_the_map_answers_to_the_mouse(open_page: Open, name: str) -> None:
    page = open_page(name)
    canvas = page.locator(".chart[data-renderer=map] canvas")
    canvas.evaluate("canvas => canvas.scrollIntoView()")
    size = canvas.bounding_box()
    assert size is not None
    for place in range(40):  # over cells until one is met whose update came in
        page.mouse.move(size["x"] + 100 + 20 * place, size["y"] + 120)
        told = page.locator("#tip").inner_text()
        if re.search(r"arrived\s+[\d,.]+ s", told):
            break
    assert re.search(
        r"client\s+\d+\s+round\s+\d+\s+what happened\s+(picked|undrafted)\s+versions behind\s+\d+\s+arrived\s+.* into",
        told,
    )
    page.mouse.move(size["x"] + size["width"] / 2, size["y"] - 30)
    page.wait_for_selector("#tip", state="hidden")


def details(page: Page) -> dict[str, str]:
    """The numbers on the cards of the client that was chosen, by name."""
    cards = page.locator(".client-details .facts > div").all()
    return {card.locator("dt").inner_text().split("\n")[0]: card.locator("dd").first.inner_text() for card in cards}


def test_a_click_on_the_map_shows_the_details_of_a_client(open_page: Open) -> None:
    page = open_page("run")
    assert details(page) == {}
    canvas = page.locator(".chart[data-renderer=map] canvas")
    canvas.scroll_into_view_if_needed()
    canvas.click(position={"x": 300, "y": 100})
    chart = map_of(run_page(RUN))
    row = chart["clients"].index(page.locator(".client select").input_value())
    facts = {fact["name"]: fact["values"][row] for fact in chart["facts"]}
    assert details(page) == facts
    assert page.locator(".client-details svg rect").count() == 20
    assert "over the rounds" in str(page.locator(".client-details svg").get_attribute("aria-label"))


def test_the_keyboard_chooses_a_client(open_page: Open) -> None:
    page = open_page("run")
    assert not page.locator(".chosen").is_visible()
    page.get_by_label("details of client").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    assert page.locator(".client select").input_value() == map_of(run_page(RUN))["clients"][2]
    third = details(page)
    assert page.locator(".chosen").is_visible()
    page.keyboard.press("ArrowDown")
    assert details(page) != third


def test_an_open_page_grows(open_page: Open) -> None:
    """Blocks that have changed are replaced; what the reader did stays, and nothing else is touched."""
    shorter = replace(RUN, summary=None, held_records=RUN.held_records[:12])
    page = open_page("run")
    page.locator(".client select").select_option("4")
    page.locator("details", has_text="Settings").locator("summary").click()
    page.get_by_label("Filter").fill("clients")
    page.get_by_label("Filter").focus()
    page.evaluate("scrollTo(0, 300)")
    page.evaluate("window.before = [...document.querySelectorAll('[data-block]')]")
    assert page.evaluate("blocks => window.safa.update(blocks)", blocks_of(run_sections(shorter)))
    page.get_by_text("This run is not finished: 12 of 20 rounds").wait_for()
    assert page.locator(".client-details svg rect").count() == 12
    assert page.locator(".chosen").is_visible()
    replaced = page.evaluate("before.filter((block) => !block.isConnected).map((block) => block.dataset.block)")
    assert {"result-0", "result-1", "result-2", "clients-0"} <= set(replaced)
    assert page.locator(".table").get_attribute("data-block") not in replaced
    assert page.evaluate("document.activeElement.value") == "clients"
    assert page.evaluate("scrollY") == 300
    assert page.locator("details[open]").count() == 1
    page.get_by_role("button", name="Open all").click()
    page.wait_for_function("document.querySelectorAll('.chart:not([data-drawn])').length === 0")
    assert not page.evaluate("window.safa.update({'no-such-block': '<p></p>'})")


def test_a_list_that_is_open_is_not_taken_away(open_page: Open) -> None:
    page = open_page("run")
    page.evaluate("window.map = document.querySelector('[data-block=clients-0]')")
    page.locator(".client select").dispatch_event("pointerdown")
    shorter = blocks_of(run_sections(replace(RUN, summary=None, held_records=RUN.held_records[:12])))
    page.evaluate("blocks => window.safa.update(blocks)", shorter)
    assert page.evaluate("window.map.isConnected")
    page.locator(".client select").select_option("4")
    page.wait_for_function("!window.map.isConnected")
    assert page.locator(".client select").input_value() == "4"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
@pytest.mark.parametrize("name", ["target", "sweep"])
def test_a_page_is_accessible(open_page: Open, name: str, width: int, scheme: str) -> None:
    """What axe-core calls serious or critical, with everything opened."""
    page = open_page(name, width=width, scheme=scheme, bypass_csp=True)
    unfold(page)
    if name == "target":
        page.locator(".client select").select_option("4")
    found = Axe().run(page).response["violations"]
    assert [problem["id"] for problem in found if problem["impact"] in ("serious", "critical")] == []


LOOK = """
window.tasks = [];
new PerformanceObserver((list) => tasks.push(...list.getEntries().map((task) => task.duration)))
  .observe({ type: "longtask" });
new MutationObserver((changes, watcher) => { window.seen = performance.now(); watcher.disconnect(); })
  .observe(document, { subtree: true, attributeFilter: ["data-drawn"] });
"""
"""Notes how long tasks take, and when the first chart is there."""


@pytest.mark.quiet
def test_a_page_of_500_clients_and_100_rounds_answers_at_once(open_page: Open) -> None:
    page = open_page("wide", script=LOOK)
    loaded = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert page.evaluate("window.seen") - loaded < 1000
    page.evaluate("tasks.length = 0")
    for _ in range(10):
        page.mouse.wheel(0, 300)
        page.evaluate("new Promise(requestAnimationFrame)")
    page.locator(".chart[data-renderer=map] canvas").click(position={"x": 300, "y": 100})
    assert details(page)
    assert max(page.evaluate("tasks"), default=0) < 200


@pytest.mark.quiet
def test_a_page_of_a_million_updates_opens(open_page: Open, files: dict[str, Path]) -> None:
    path = files["run"].with_name("million.html")
    files["million"] = path
    path.write_text(run_page(learnt(simulated("mnist", clients=1000, rounds=1000))), encoding="utf-8")
    assert path.stat().st_size < 20e6
    page = open_page("million", script=LOOK)
    assert page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") < 3000
    assert page.evaluate("window.seen") < 3000
    page.locator(".client select").select_option("999")
    assert page.locator(".client-details svg rect").count() == 1000


def test_a_curve_answers_to_the_mouse(open_page: Open) -> None:
    page = open_page("run")
    point = page.locator(".chart").first.locator("svg .mark-symbol path").nth(5)
    point.hover(force=True)
    assert re.search(r"accuracy\s+0\.9\d+\s+round\s+6", page.locator("#tip").inner_text())


def test_a_chart_can_be_saved(open_page: Open) -> None:
    page = open_page("run")
    for kind in ("SVG", "PNG"):
        with page.expect_download() as download:
            page.locator("figure").first.get_by_role("button", name=f"as {kind}").click()
        assert download.value.suggested_filename == f"accuracy-over-virtual-time.{kind.lower()}"


def test_a_table_sorts_by_mouse(open_page: Open) -> None:
    page = open_page("table")
    head = page.get_by_role("columnheader", name="n", exact=True)
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(page) == ["a10", "a", "a2", "b", "c"]  # by number, ties as they were, what is missing last
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert column(page) == ["b", "a", "a2", "a10", "c"]


def test_the_tables_of_a_reproduction_sort_and_filter(open_page: Open) -> None:
    page = open_page("reproduction")
    box = page.locator(".table", has_text="Table IV:")
    box.get_by_role("button", name="deviation").click()
    deviations = box.locator("tbody td:last-child").all_inner_texts()
    shares = [float(text.split("%")[0]) for text in deviations]
    assert shares == sorted(shares)
    box.get_by_label("Filter").fill("FedAvg")
    assert box.locator("tbody tr:not([hidden])").count() == 2


def test_a_table_sorts_and_filters_by_keyboard(open_page: Open) -> None:
    page = open_page("table")
    page.get_by_role("button", name="name").focus()
    page.keyboard.press("Enter")
    assert column(page) == ["a", "a2", "a10", "b", "c"]  # numbers inside of names count as numbers
    page.keyboard.press("Space")
    assert column(page) == ["c", "b", "a10", "a2", "a"]
    page.get_by_label("Filter").focus()
    page.keyboard.type("A1")
    assert column(page) == ["a10"]
    assert page.get_by_role("status").inner_text() == "1 of 5 rows"
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    assert len(column(page)) == 5


def test_the_first_key_leads_to_the_content(open_page: Open) -> None:
    page = open_page("run")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_a_page_has_landmarks_and_words_for_its_charts(open_page: Open) -> None:
    page = open_page("run")
    for role in ("banner", "main", "contentinfo"):
        assert page.get_by_role(role).count() == 1
    assert open_page("reproduction").get_by_role("navigation").count() == 1
    assert page.locator("html").get_attribute("lang") == "en"
    names = page.locator(".chart").evaluate_all("boxes => boxes.map(box => box.getAttribute('aria-label'))")
    assert all(len(name) > 30 for name in names)


def test_paper_is_light_and_has_every_chart(open_page: Open) -> None:
    page = open_page("sweep", scheme="dark")
    page.emulate_media(media="print")
    page.wait_for_selector("html[data-printable]", state="attached")
    assert page.locator(".chart[data-drawn=paper]").count() == page.locator(".chart").count()
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for gone in (".filter", ".save", ".skip"):
        assert not page.locator(gone).first.is_visible()
    page.emulate_media(media="screen")
    page.wait_for_selector(".chart[data-drawn=dark]")


COLOURS = """async ([picture, boxes]) => {
  const image = Object.assign(new Image(), { src: `data:image/png;base64,${picture}` });
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  return boxes.map((box) => new Set(new Uint32Array(context.getImageData(...box.map(Math.round)).data.buffer)).size);
}"""  # how many colours there are in boxes of a picture; outside of it there is one


@pytest.mark.parametrize("name", ["run", "sweep", "reproduction"])
def test_a_capture_of_the_whole_page_holds_every_chart(open_page: Open, name: str) -> None:
    """With `#open=all` behind the address, everything is open."""
    page = open_page(name, part="#open=all")
    assert page.locator("details:not([open])").count() == 0
    boxes = page.locator(".chart").evaluate_all(
        "boxes => boxes.map(box => box.getBoundingClientRect()).map(b => [b.left, b.top, b.width, b.height])"
    )
    assert boxes
    picture = base64.b64encode(page.screenshot(full_page=True)).decode()
    colours = page.context.new_page().evaluate(COLOURS, [picture, boxes])
    assert min(colours) > 10


def test_the_button_of_a_section_follows_its_parts(open_page: Open) -> None:
    page = open_page("run")
    button = page.locator(".opener").first
    assert button.text_content() == "Open all"
    button.click()
    page.wait_for_function("document.querySelector('.opener').textContent === 'Close all'")
    page.evaluate("document.querySelector('section:has(.opener) > details').open = false")
    page.wait_for_function("document.querySelector('.opener').textContent === 'Open all'")
    page.evaluate("location.hash = '#open=all'")
    page.wait_for_function("document.querySelector('.opener').textContent === 'Close all'")


def test_a_page_prints_with_all_its_charts_at_once(open_page: Open) -> None:
    """The browser takes the picture right after it said that it will print: by then, the charts have to be there."""
    page = open_page("run")
    drawn = "document.querySelectorAll('.chart[data-drawn=paper]').length"
    page.evaluate(f"addEventListener('afterprint', () => {{ window.printed = {drawn} }})")
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert page.evaluate("window.printed") == page.locator(".chart").count()
