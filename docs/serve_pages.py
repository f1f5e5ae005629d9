"""Take the pictures of docs/serve.md in chromium: PYTHONPATH=. python docs/serve_pages.py.

The deployment is a real coordinator with real devices, in one process, without a network (`tests/deploy/harness.py`).
"""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright
from tests.deploy.harness import Harness

import safa
from safa.deploy.exchange.status import StatusFile
from safa.experiments import Experiment, sweep
from safa.report import page_of
from safa.report.live import LiveServer
from safa.runs import RunWriter

OUT = Path(__file__).with_name("pages")
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
PICTURES = (("serve", "", WIDE, "light"), ("serve-dark", "", WIDE, "dark"), ("serve-phone", "", PHONE, "light"),
            ("serve-deployment", "run/field-trial/run", WIDE, "light"))  # fmt: skip


def begun(folder: Path, rounds: int) -> RunWriter:
    """A run that goes on: so many of its rounds are there."""
    experiment = Experiment(safa.Settings.of("digits", protocol="fedbuff", rounds=80))
    writer = RunWriter.begin(folder, experiment.settings)
    for record in itertools.islice(experiment.rounds(), rounds):
        writer.add(record)
    return writer


def deployed(folder: Path) -> Harness:
    """A deployment in its seventh round, with two of its updates in; one device is offline."""
    harness = Harness(folder, {"clients": 8, "rounds": 20})
    harness.run(until=harness.in_round(7))
    harness.peers[5].is_online = False
    harness.run(until=lambda: harness.coordinator.status()["accepted"] == 2)
    (folder / "run" / "deploy.toml").touch()
    StatusFile(folder / "run").write(harness.coordinator.status, now=0.0)
    return harness


def take(address: str) -> None:
    """The pictures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, path, size, scheme in PICTURES:
            page = browser.new_context(viewport=size, color_scheme=scheme).new_page()  # type: ignore[arg-type]
            page.goto(address + path)
            page.wait_for_selector("html[data-ready]" if path else "#runs polyline", state="attached")
            page.screenshot(path=OUT / f"{name}.png")
        browser.close()


def main() -> None:
    """Some runs of every kind, and pictures of them."""
    with TemporaryDirectory() as place:
        top = Path(place, "runs")
        for protocol in ("safa", "fedavg"):
            safa.simulate("digits", protocol=protocol, rounds=40, out=top / f"digits-{protocol}")
        sweep("boston", protocol=["safa", "fedavg"], seed=range(4), rounds=40, out=top / "boston-sweep")
        begun(top / "stopped", 12).close()
        writer, harness = begun(top / "digits-fedbuff", 33), deployed(top / "field-trial")
        server = LiveServer(top, reproduction=page_of)
        thread = threading.Thread(target=server.run)
        thread.start()
        take(server.address)
        server.stop()
        thread.join()
        harness.coordinator.stop()
        writer.close()


if __name__ == "__main__":
    main()
