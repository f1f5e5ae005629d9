"""Files of real runs, sweeps and deployments are damaged in every way, thousands of times, and used all the same.

Whatever is damaged: what is called ends with 0, or with 2 and one sentence. It never ends with a traceback, and what
only reads, or refuses, leaves every file as it was.
"""

from __future__ import annotations

import functools
import io
import json
import math
import random
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from safa import Settings, load_run, simulate
from safa.cli import program as cli
from safa.cli.program import main
from safa.deploy.exchange.coordinator import Coordinator
from safa.errors import SafaError
from safa.experiments.results import load_sweep
from safa.experiments.simulate import Experiment, run_to_end
from safa.report import read_table
from safa.runs import RunWriter
from tests.deploy.harness import Harness

MUTATIONS = 2100
"""How often a file is damaged, over all folders."""
REPORT_EVERY = 10
"""A page takes long to draw: it is made of one folder in so many, and of every third sweep."""
LARGER = ("rounds", "clients", "epochs", "batch_size", "max_clients")
"""Settings that make a run long: a larger one is no damage, and there is nothing to find out about it."""
WORDS: tuple[Any, ...] = (
    None, True, False, "word", "", "\x1b[31m", -1, 0, 1, 7, 10**12, 10**30, -(10**400), 0.5, -2.5, 1e308, math.nan,
    math.inf, [], [[]], [1, "a"], {}, {"a": 1},
)  # fmt: skip

_SWEEP = "sweep boston --clients 3 --rounds 2 --fraction 0.3,0.5 --seed 0,1 --until loss=0.4 --workers 1 --quiet"
SWEEPS = {kind: [*_SWEEP.split(), "--keep", keep] for kind, keep in (("sweep", "records"), ("table", "nothing"))}
"""The commands of the sweeps, by the names of their folders."""

pytestmark = pytest.mark.slow


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="folders")
def _folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("real")
    small: dict[str, Any] = {"clients": 3, "rounds": 4, "crash_rate": 0.2, "fraction": 0.5}
    simulate("boston", **small, eval_clients=True, out=base / "run")
    simulate("boston", **small, protocol="fedbuff", buffer_size=2, out=base / "fedbuff")
    settings = Settings.of("boston", **small | {"rounds": 5}, checkpoint_every=1)
    rounds = run_to_end(Experiment(settings), RunWriter.begin(base / "stopped", settings))
    for _ in range(4):
        next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    for kind, command in SWEEPS.items():
        assert main([*command, "--out", str(base / kind)]) == 0
    given = {"clients": 3, "rounds": 3}
    Harness(base / "deployed", given).run()
    harness = Harness(base / "halted", given)
    harness.run(until=harness.in_round(3))
    harness.coordinator.stop()
    return {
        "run": base / "run",
        "fedbuff": base / "fedbuff",
        "stopped": base / "stopped",
        "sweep": base / "sweep",
        "table": base / "table",
        "deployed": base / "deployed" / "run",
        "halted": base / "halted" / "run",
    }


# -- damage ------------------------------------------------------------------------------------------------------------


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def swap(content: bytes, draw: random.Random) -> bytes:
    """Two lines of a text change places, or two bytes where there are no lines."""
    parts = content.splitlines(keepends=True)
    if len(parts) < 2 or b"\0" in content:
        parts = [content[place : place + 1] for place in range(len(content))]
    one, other = draw.sample(range(len(parts)), 2)
    parts[one], parts[other] = parts[other], parts[one]
    return b"".join(parts)


def double(content: bytes, draw: random.Random) -> bytes:
    """A line is there twice, or not at all."""
    parts = content.splitlines(keepends=True)
    place = draw.randrange(len(parts))
    return b"".join(parts[:place] + parts[place : place + 1] * draw.choice((0, 2)) + parts[place + 1 :])


def retype(content: bytes, draw: random.Random, suffix: str) -> bytes:
    """A value becomes another, mostly of another type; or two values change places."""
    kinds: dict[str, Callable[[bytes, random.Random], bytes]] = {
        ".json": _retype_json, ".jsonl": _retype_line, ".toml": _retype_toml, ".csv": _retype_cell,
    }  # fmt: skip
    return kinds.get(suffix, flip)(content, draw)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a JSON value that could hold something else, as (container, key)."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _retype_json(content: bytes, draw: random.Random) -> bytes:
    root = [json.loads(content)]
    places = list(_places(root))
    container, key = draw.choice(places)
    if draw.random() < 0.3:
        other, place = draw.choice(places)
        container[key], other[place] = other[place], container[key]
    else:
        container[key] = draw.choice(WORDS)
    try:
        return json.dumps(root[0]).encode()
    except ValueError:  # a value was put into itself
        return b"[" * 5000


def _retype_line(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines()
    place = draw.randrange(len(lines))
    lines[place] = _retype_json(lines[place], draw)
    return b"\n".join(lines) + b"\n"


def _retype_toml(content: bytes, draw: random.Random) -> bytes:
    lines = content.decode().splitlines()
    place, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    name = lines[place].split(" = ")[0]
    values = ['"word"', "true", "-1", "0", "3.5", "inf", "nan", "[]", "{}", "9" * 30, "1979-05-27", '"a:b"', "'", ""]
    value = draw.choice(values) if draw.random() < 0.7 else lines[other].split(" = ")[-1]
    lines[place] = f"{name} = {value}"
    return "\n".join(lines).encode() + b"\n"


def _retype_cell(content: bytes, draw: random.Random) -> bytes:
    lines = [line.split(b",") for line in content.splitlines()]
    row, column = draw.choice(lines), draw.randrange(len(lines[0]))
    row[column] = draw.choice(
        (b"", b"word", b"-1", b"nan", b"inf", b"9" * 400, b"True", b'"', b"a,b", b"\xff", b"1e999")
    )
    return b"\n".join(b",".join(line) for line in lines) + b"\n"


def damage(path: Path, draw: random.Random) -> str:
    """Damage a file, and say how."""
    content = path.read_bytes()
    kind = draw.choice(("cut", "flip", "swap", "double", *["retype"] * 5, "missing", "empty", "folder"))
    if kind in ("missing", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "retype":
        path.write_bytes(retype(content, draw, path.suffix))
    else:
        path.write_bytes({"cut": cut, "flip": flip, "swap": swap, "double": double}[kind](content, draw))
    return f"{kind} {path.name}"


def is_larger(path: Path, before: bytes) -> bool:
    """Whether a changed config asks for more than it did."""
    try:
        old, new = tomllib.loads(before.decode()), tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return False
    numbers = [(new.get(name), old.get(name)) for name in LARGER]
    return any(type(one) in (int, float) and other is not None and one > other for one, other in numbers)


# -- use ---------------------------------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder but its page."""
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    return {
        name: path.read_bytes() if path.is_file() else None for name, path in paths.items() if name != "report.html"
    }


def called(arguments: list[str]) -> tuple[int, str]:
    """The exit code of a command, and what it said on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return code, err.getvalue()


def load(folder: Path) -> tuple[int, str]:
    """Read everything that there is of a run or a sweep, as a user's own program would."""
    try:
        if not (folder / "rounds.jsonl").exists() and (folder / "results.csv").exists():
            read_table(folder / "results.csv")
            load_sweep(folder).best("loss=0.5" if (folder / "runs").exists() else None)
            return 0, ""
        run = load_run(folder)
        list(run.records())
        run.roster()
        if run.summary is not None:
            run.model()
    except SafaError as error:
        return 2, f"safa: {error}\n"
    return 0, ""


def resume_deployment(folder: Path) -> tuple[int, str]:
    """Resume a deployment, up to its first round."""
    try:
        Coordinator(folder, now=0.0).stop()
    except SafaError as error:
        return 2, f"safa: {error}\n"
    return 0, ""


def uses(kind: str, folder: Path, number: int) -> Iterator[tuple[str, Callable[[], tuple[int, str]]]]:
    """What is called on a folder, by name; those that may change it come last."""
    yield "load", lambda: load(folder)
    if kind not in SWEEPS:
        yield "replay", lambda: called(["replay", str(folder)])
    if number % (3 if kind in SWEEPS else REPORT_EVERY) == 0:
        yield "report", lambda: called(["report", str(folder)])
    if kind == "halted":
        yield "deploy", lambda: resume_deployment(folder)
    elif kind in SWEEPS:
        yield "resume", lambda: called([*SWEEPS[kind], "--out", str(folder)])
    else:
        yield "resume", lambda: called(["run", "--resume", str(folder), "--quiet"])


def check(kind: str, folder: Path, number: int, how: str, counts: Counter[str]) -> None:
    for name, use in uses(kind, folder, number):
        before = tree(folder)
        code, said = use()
        counts[f"{name} {code}"] += 1
        assert code in (0, 2), (how, name, code, said)
        assert "Traceback" not in said, (how, name, said)
        if code == 2:
            assert said.count("\n") == 1, (how, name, said)
            assert said.startswith("safa: "), (how, name, said)
        elif name != "resume":
            assert said == "", (how, name, said)
        if code == 2 or name in ("load", "report", "replay"):
            assert tree(folder) == before, (how, name, said)


@pytest.mark.parametrize("kind", ["run", "fedbuff", "stopped", "sweep", "table", "deployed", "halted"])
def test_whatever_is_damaged_is_reported_in_one_sentence(
    kind: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_parser", functools.cache(cli._parser))  # which is a third of the time
    draw = random.Random(f"damage {kind}")
    files = sorted(
        path.relative_to(folders[kind]) for path in folders[kind].rglob("*") if path.is_file() and path.stat().st_size
    )
    counts: Counter[str] = Counter()
    number = 0
    while number < MUTATIONS // len(folders):
        folder = tmp_path / "folder"
        shutil.copytree(folders[kind], folder)
        file = draw.choice(files)
        before = (folder / file).read_bytes()
        how = f"{kind} {number}: {damage(folder / file, draw)}"
        if is_larger(folder / file, before):
            counts["larger"] += 1
        else:
            check(kind, folder, number, how, counts)
            number += 1
        shutil.rmtree(folder)
    assert counts["larger"] < number / 20
    assert min(counts["load 0"], counts["load 2"]) > number / 8  # neither is all for nothing, nor nothing damaged
    assert counts["report 0"] + counts["report 2"] >= number // REPORT_EVERY
