"""What a checkpoint writes: an entry of 1 MB for each of 1,000 clients, of which 100 change in a round.

    python benchmarks/checkpoint.py [--clients 1000] [--megabytes 1] [--updates 100] [--rounds 30] [--folder DIR]

Round 0 is the first checkpoint, which writes all entries. `MB written` are the bytes of the files that are new after a
checkpoint, `MB on disk` those of all files of both checkpoints. Last, the newest checkpoint is read again: its peak is
the private memory (RssAnon) that this takes, sampled all the time. Files are made in `--folder` (or TMPDIR, which
should be a disk) and removed.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from safa.protocol.records import Ids
from safa.runs import RunWriter, load_run
from safa.runs.settings import Settings


class Entries:
    """An entry for each client, in memory."""

    def __init__(self, clients: int, size: int) -> None:
        self._rows = torch.rand(clients, size)
        self._changed = self.numbers = np.arange(clients)

    def put(self, numbers: Ids, rows: Tensor) -> None:
        """The entries of these clients := these."""
        self._rows[torch.from_numpy(numbers)] = rows
        self._changed = np.union1d(self._changed, numbers)

    def get(self, numbers: Ids) -> Tensor:
        """The entries of these clients."""
        return self._rows[torch.from_numpy(numbers)]

    def take_changed(self) -> Ids:
        """The clients whose entries were put since this was last asked."""
        changed, self._changed = self._changed, self._changed[:0]
        return changed


def sizes(folder: Path) -> dict[tuple[str, int], int]:
    """The bytes of every file of checkpoints, by name and inode: a file that was replaced is another one."""
    found = [(path.name, path.stat()) for path in (folder / "checkpoint").glob("*")]
    return {(name, about.st_ino): about.st_size for name, about in found}


def rss_anon_mb() -> float:
    """Private memory of this process now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024 / 1e6


def write(folder: Path, given: argparse.Namespace) -> None:
    """Print a line for every checkpoint."""
    draw = np.random.default_rng(0)
    entries = Entries(given.clients, int(given.megabytes * 1e6 / 4))
    writer = RunWriter.begin(folder, Settings.of("boston", rounds=given.rounds))
    live = given.clients * given.megabytes
    for number in range(given.rounds + 1):
        if number:
            clients = np.sort(draw.choice(given.clients, given.updates, replace=False))
            entries.put(clients, torch.rand(given.updates, int(given.megabytes * 1e6 / 4)))
        before, start = sizes(folder), time.perf_counter()
        writer.checkpoint(number, {"model": entries.get(np.arange(1))}, tables={"entries": entries})
        seconds, after = time.perf_counter() - start, sizes(folder)
        written, there = sum(after[file] for file in after.keys() - before.keys()) / 1e6, sum(after.values()) / 1e6
        print(
            f"{number:>6} {written:>11.1f} {seconds:>8.2f} {len(after):>6} {there:>11.0f} {there / live:>9.2f}",
            flush=True,
        )
    writer.close()


def read(folder: Path) -> None:
    """Print how long the newest checkpoint takes to be read, and how much memory."""
    peak, done = [base := rss_anon_mb()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], rss_anon_mb())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    found = load_run(folder).load_checkpoint()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    rows = found.tables["entries"][1]
    print(f"read: {seconds:.2f} s, {rows.nbytes / 1e6:.0f} MB of entries, peak {peak[0] - base:.0f} MB")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    print(f"{given.clients} clients, {given.megabytes:g} MB each, {given.updates} updates a round")
    titles = ("round", "MB written", "seconds", "files", "MB on disk", "of live")
    print("{:>6} {:>11} {:>8} {:>6} {:>11} {:>9}".format(*titles), flush=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        write(Path(folder) / "run", given)
        read(Path(folder) / "run")


if __name__ == "__main__":
    main()
