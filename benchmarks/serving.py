"""How long `safa run` takes with and without its page open in a browser, in turn: `python benchmarks/serving.py`.

Every pair is a run without and a run with a server and a headless Chromium that shows the page of the run. Prints the
times, and the ratio of their sums.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAFA = [sys.executable, "-m", "safa"]


def timed(folder: Path, name: str, arguments: list[str]) -> float:
    """How long a run takes."""
    start = time.perf_counter()
    subprocess.run([*SAFA, "run", *arguments, "--quiet", "--force", "--out", str(folder / name)], check=True)
    return time.perf_counter() - start


@contextmanager
def page_open(folder: Path, path: str) -> Iterator[None]:
    """A server, and a browser that shows one of its pages."""
    from playwright.sync_api import sync_playwright

    command = [*SAFA, "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        try:
            assert server.stdout is not None
            said = re.search(r"http://\S+", server.stdout.readline())
            assert said is not None
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            browser.new_page().goto(said[0] + path)
            yield
            browser.close()
        finally:
            server.terminate()


def main() -> None:
    """Measure pairs, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    run = ["digits", "--rounds", str(arguments.rounds)]
    without, with_page = [], []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        timed(folder, "run", run)  # files are read and compiled once
        for _ in range(arguments.pairs):
            without.append(timed(folder, "run", run))
            with page_open(folder, "run/run"):
                with_page.append(timed(folder, "run", run))
            print(f"without {without[-1]:.2f} s, with the page open {with_page[-1]:.2f} s", flush=True)
    print(f"ratio of the sums: {sum(with_page) / sum(without):.3f}")


if __name__ == "__main__":
    main()
