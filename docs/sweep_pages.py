"""Take the pictures of docs/sweeps.md in chromium: python docs/sweep_pages.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

import safa
from safa.experiments import sweep

OUT = Path(__file__).with_name("pages")
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
PICTURES = (("sweep", "sweep", WIDE, "light"), ("sweep-dark", "sweep", WIDE, "dark"),
            ("sweep-phone", "sweep", PHONE, "light"), ("comparison", "comparison", WIDE, "light"))  # fmt: skip


def main() -> None:
    """The sweep of the docs and two of its runs, and four pictures of their pages."""
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        place = Path(folder)
        protocols = ["safa", "fedavg", "fedbuff"]
        sweep("digits", protocol=protocols, fraction=[0.1, 0.3], seed=range(5), until="accuracy=0.85", out=place / "d")
        safa.write_report(place / "d", place / "sweep.html")
        safa.write_report([place / "d/runs/0006", place / "d/runs/0016"], place / "comparison.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, page_name, size, scheme in PICTURES:
            page = browser.new_context(viewport=size, color_scheme=scheme).new_page()  # type: ignore[arg-type]
            page.goto((place / f"{page_name}.html").as_uri())
            page.wait_for_selector("html[data-ready]", state="attached")
            page.screenshot(path=OUT / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
