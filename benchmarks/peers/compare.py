"""The same jobs in safa, in other frameworks and in a plain loop, in turns: a table in Markdown.

    python benchmarks/peers/compare.py [--jobs cnn svm tiny pfl] [--peers NAME ...] [--repeats 3] [--json FILE]

Every result is appended to FILE as it comes, and those that are there are not measured again. The table is printed and
written beside it. `install.py` makes the environments; safa and the plain loop run in the one that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from install import DEFAULT, NAMES
from jobs import JOBS, Job
from processes import watch

HERE = Path(__file__).parent
OWN = ("plain", "safa")
"""Run by this interpreter; the plain loop first, because the models of the others are compared with its model."""

Result = dict[str, Any]


class Comparison:
    """Results by framework, job and repeat, in a file of JSON lines."""

    def __init__(self, file: Path, envs: Path, limit_s: float) -> None:
        self.file, self.envs, self.limit_s = file, envs, limit_s
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if file.exists() else []
        self.results: list[Result] = [json.loads(line) for line in lines]

    def found(self, name: str, peer: str, repeat: int | None = None) -> list[Result]:
        """The runs of a framework on a job that were finished."""
        return [
            result
            for result in self.results
            if (result["name"], result["peer"]) == (name, peer)
            and repeat in (None, result["repeat"])
            and "error" not in result
        ]

    def measure(self, name: str, peer: str, repeat: int, job: Job) -> None:
        """Run a framework once; with a tenth of the clients where it needs more time than there is."""
        if self.found(name, peer, repeat):
            return
        before = self.found(name, peer)
        sizes = [job, job.smaller()] if not before else [Job(**before[-1]["job"])]
        for size in sizes:
            result = self.run(name, peer, size)
            if result.get("error") != "time":
                break
        self.add(result | {"name": name, "peer": peer, "repeat": repeat})

    def run(self, name: str, peer: str, job: Job) -> Result:
        """What a runner reports, or why it does not."""
        python = Path(sys.executable) if peer in OWN else self.envs / peer / "bin" / "python"
        if not python.exists():
            return {"error": f"not installed: python {HERE.name}/install.py {peer}"}
        env = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src")}
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model.npy"
            options = [json.dumps(asdict(job)), "--limit", str(self.limit_s), "--model", str(model)]
            ended = watch([str(python), str(HERE / f"run_{peer}.py"), *options], env, 2 * self.limit_s, Path(folder))
            if ended.code is None:
                return {"error": "time"}
            if ended.code:
                return {"error": (ended.errors.strip().splitlines() or ["no message"])[-1]}
            result: Result = json.loads(ended.output.strip().splitlines()[-1])
            result["memory_mb"] = max(result["memory_mb"], ended.memory_mb)
            return result | {"difference": self.difference(name, peer, job, result, np.load(model))}

    def difference(self, name: str, peer: str, job: Job, result: Result, model: np.ndarray) -> float | None:
        """The distance to the plain loop's model, over how far that was moved; None where clients are drawn."""
        kept = self.file.with_suffix(f".{name}.npy")
        if peer == "plain":
            np.save(kept, model)
        plain = self.found(name, "plain")
        if not plain or job.cohort < job.clients or plain[-1]["job"] != asdict(job) or not kept.exists():
            return None
        if plain[-1]["rounds"] != result["rounds"]:
            return None
        return float(np.linalg.norm(model - np.load(kept)) / plain[-1]["moved"])

    def add(self, result: Result) -> None:
        """Keep a result."""
        self.results.append(result)
        with open(self.file, "a") as file:
            file.write(json.dumps(result) + "\n")
        what = f"{result['median_s']:.3f} s a round" if "error" not in result else result["error"]
        print(f"{result['name']} {result['peer']} {result['repeat']}: {what}", file=sys.stderr, flush=True)

    def error(self, name: str, peer: str) -> str:
        """Why there is no result."""
        errors = [r["error"] for r in self.results if (r["name"], r["peer"]) == (name, peer) and "error" in r]
        return errors[-1] if errors else "not run"


HEAD = (
    "| framework | s per round | updates/s | times safa | MiB at most | start, s | loss | difference | how |",
    "|---|--:|--:|--:|--:|--:|--:|--:|---|",
)


def table(comparison: Comparison, name: str, peers: Iterable[str]) -> list[str]:
    """The lines of a job's table."""
    job = JOBS[name]
    lines = [
        f"### {name}",
        f"{job.model}, {job.clients:,} clients x {job.samples} samples, cohort {job.cohort:,}, batch {job.batch_size}, "
        f"{job.epochs} epoch(s), {job.rounds} rounds, of which the first is not counted",
        "",
        *HEAD,
    ]
    return [*lines, *(row(comparison, name, peer) for peer in peers), ""]


def row(comparison: Comparison, name: str, peer: str) -> str:
    """A framework's medians over the repeats."""
    runs = comparison.found(name, peer)
    if not runs:
        return f"| {peer} | {comparison.error(name, peer)} | | | | | | | |"
    spent = _median(_full_round_s(name, run) for run in runs)
    ratio = _ratio(comparison, name, peer)
    loss = f"{runs[-1]['loss_before']:.3f} to {runs[-1]['loss_after']:.3f}"
    apart = "-" if runs[-1]["difference"] is None else f"{runs[-1]['difference']:.0e}"
    memory, start = (_median(run[key] for run in runs) for key in ("memory_mb", "start_s"))
    return (
        f"| {peer} | {spent:.3f} | {JOBS[name].cohort / spent:,.0f} | {ratio} | {memory:,.0f} | {start:.1f} | {loss} "
        f"| {apart} | {_how(name, runs)} |"
    )


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _full_round_s(name: str, run: Result) -> float:
    """Seconds of a round with all clients of the job, where a run had fewer."""
    return float(JOBS[name].cohort / run["updates_per_s"])


def _ratio(comparison: Comparison, name: str, peer: str) -> str:
    """How many times as long as safa it takes, by runs of the same repeat."""
    safa = {run["repeat"]: _full_round_s(name, run) for run in comparison.found(name, "safa")}
    runs = [run for run in comparison.found(name, peer) if run["repeat"] in safa]
    return f"{_median(_full_round_s(name, run) / safa[run['repeat']] for run in runs):.1f}" if runs else "-"


def _how(name: str, runs: list[Result]) -> str:
    """How it was run, and what is missing from the job."""
    rounds, job = min(run["rounds"] for run in runs), runs[-1]["job"]
    return ", ".join(
        [runs[-1]["how"]]
        + ([f"{rounds} rounds, then time was up"] if rounds < job["rounds"] else [])
        + ([f"{job['clients']:,} clients, scaled"] if job["clients"] < JOBS[name].clients else [])
        + [f"{len(runs)} run(s)"]
    )


def versions(comparison: Comparison) -> str:
    """The versions of everything that was run."""
    found: dict[str, str] = {}
    for result in comparison.results:
        found |= result.get("versions", {})
    return ", ".join(f"{name} {number}" for name, number in sorted(found.items()))


def machine() -> str:
    """What this runs on."""
    about = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in about if line.startswith("model name")]
    name = models[0] if models else platform.machine()
    return (
        f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the end"
    )


def report(comparison: Comparison, names: list[str], peers: list[str]) -> str:
    """All tables."""
    lines = [f"{machine()}. {versions(comparison)}.", ""]
    return "\n".join(lines + [line for name in names for line in table(comparison, name, peers)])


def main() -> None:
    """Measure what is not measured yet; print and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", nargs="*", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--peers", nargs="*", choices=[*OWN, *NAMES], default=[*OWN, *NAMES])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("runs/peers.jsonl"))
    parser.add_argument("--envs", type=Path, default=DEFAULT)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a run begins no round")
    parser.add_argument("--quick", action="store_true", help="a tenth of the clients, 3 rounds")
    arguments = parser.parse_args()
    comparison = Comparison(arguments.json.resolve(), arguments.envs, arguments.limit)
    peers = sorted(arguments.peers, key=[*OWN, *NAMES].index)
    for repeat in range(arguments.repeats):
        for name in arguments.jobs:
            job = replace(JOBS[name].smaller(), rounds=3) if arguments.quick else JOBS[name]
            for peer in peers:
                comparison.measure(name, peer, repeat, job)
    text = report(comparison, arguments.jobs, peers)
    arguments.json.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
