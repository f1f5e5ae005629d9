"""Take the pictures of docs/pages.md in chromium: python docs/pages.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Page, sync_playwright

import safa

OUT = Path(__file__).with_name("pages")
WIDE, TALL, PHONE = ({"width": 1280, "height": 800}, {"width": 1280, "height": 960}, {"width": 390, "height": 844})


def client(page: Page) -> None:
    """Choose a client in the map, and go there."""
    page.locator(".client select").select_option("30")
    page.evaluate("document.querySelector('#clients').scrollIntoView()")


def main() -> None:
    """One run, and four pictures of its page."""
    run = safa.simulate("digits", clients=60, rounds=120, round_limit_s=60, until="accuracy=0.85,held=2")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = safa.write_report(run, Path(folder) / "run.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, size, scheme in (("run", WIDE, "light"), ("run-dark", WIDE, "dark"), ("run-phone", PHONE, "light"),
                                   ("run-client", TALL, "light")):  # fmt: skip
            options = {"viewport": size, "color_scheme": scheme}
            page = browser.new_context(**options).new_page()  # type: ignore[arg-type]
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-ready]", state="attached")
            if name == "run-client":
                client(page)
            page.screenshot(path=OUT / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
