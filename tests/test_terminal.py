"""What people see while a command works: in terminals of several widths, in a pipe, without colours, and at the end."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import safa
from safa.cli import main, reproduce
from safa.cli.live import LiveView, watched
from safa.cli.progress import Progress, curve, duration, rate
from safa.experiments.engines import LocalEngine
from safa.paper import grid
from safa.protocol.records import RoundRecord
from tests.programs import started
from tests.terminals import in_terminal, screen_of

Capture = pytest.CaptureFixture[str]

DRAW = """
import os, sys, threading, warnings
from dataclasses import replace
import safa
from safa.cli import live
from safa.cli.progress import Progress

live._FIRST_S = threading.TIMEOUT_MAX  # it is drawn when this program says so
now = 0.0
progress = Progress(20, "round")
settings = safa.Settings.of("digits", clients=500, rounds=12, clock="paper", lag_tolerance=2)
with live.LiveView(progress, clock=lambda: now) as view:
    for record in safa.run_rounds(settings):
        now += 2.0
        view.round(replace(record, loss=1 / record.round, metrics={"accuracy": 1 - 1 / (1 + record.round)}))
        if record.round in (1, 5):
            view.refresh()
"""
PROGRAM = [sys.executable, "-c"]


def records(rounds: int = 12) -> Iterator[RoundRecord]:
    """Rounds of a run in which the accuracy rises."""
    for record in safa.run_rounds(
        safa.Settings.of("digits", clients=500, rounds=rounds, clock="paper", lag_tolerance=2)
    ):
        yield replace(record, loss=1 / record.round, metrics={"accuracy": 1 - 1 / (1 + record.round)})


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# -- in a terminal -----------------------------------------------------------------------------------------------------

SEEN: dict[int, list[str]] = {
    40: [
        "round 12 of 20  ━━━━━───  30 rounds/min",
        "16 s left",
        "virtual time 31 min  500 clients",
        "accuracy 0.9231  ▁▄▅▆▇▇▇▇████",
        "██▓▓▓░░▒  █ picked 150  ▓ undrafted 202",
        "░ crashed 148  ▒ deprecated 38",
    ],
    80: [
        "round 12 of 20  ━━━━━━━━━━━━━━━━━━━━━━───────────────  30 rounds/min  16 s left",
        "virtual time 31 min  500 clients  accuracy 0.9231  ▁▄▅▆▇▇▇▇████",
        "████▓▓▓▓▓▓░░░░░▒  █ picked 150  ▓ undrafted 202  ░ crashed 148  ▒ deprecated 38",
    ],
    120: [
        "round 12 of 20  ━━━━━━━━━━━━━━━━━━━━━━━━────────────────  30 rounds/min  16 s left",
        "virtual time 31 min  500 clients  accuracy 0.9231  ▁▄▅▆▇▇▇▇████",
        "███████████▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░░▒▒▒  █ picked 150  ▓ undrafted 202  ░ crashed 148  ▒ deprecated 38",
    ],
}


@pytest.mark.parametrize("columns", SEEN)
def test_the_view_says_the_same_at_every_width(columns: int) -> None:
    """It is left by a program that ends at once: the picture is whole, and what comes next stands below it."""
    code = f"{DRAW}    view.refresh()\n    os._exit(0)"
    with in_terminal([*PROGRAM, code], columns=columns) as terminal:
        assert terminal.read_all() == 0
    assert terminal.screen == SEEN[columns]
    assert screen_of(f"{terminal.text}$ ", columns)[-1] == "$"
    assert "\x1b[?25l" not in terminal.text, "a cursor that was hidden would be missed"


def test_the_docs_show_what_is_seen() -> None:
    page = Path(__file__).parent.parent.joinpath("docs", "terminal.md").read_text(encoding="utf-8")
    for columns in (40, 80):
        assert "\n".join(SEEN[columns]) in page


def test_the_view_is_gone_at_the_end_and_other_lines_stay() -> None:
    code = f"""{DRAW}    view.refresh()
    view.line("ann is new")
    warnings.warn("mind this")
print("done")
"""
    with in_terminal([*PROGRAM, code], columns=60, rows=4) as terminal:
        assert terminal.read_all() == 0
    first, *others, last = terminal.screen
    assert (first, last) == ("ann is new", "done")
    assert "mind this" in " ".join(others)
    assert "round" not in " ".join(others)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 120])
def test_ctrl_c_leaves_the_terminal_clean(columns: int, tmp_path: Path) -> None:
    run = ["run", "boston", "--no-train", "--rounds", "10000000", "--out", str(tmp_path / "run")]
    with in_terminal([sys.executable, "-m", "safa", *run], columns=columns) as terminal:
        # not in the middle of a picture, into which the kernel would write ^C
        terminal.read_until(lambda text: text.count(" left") > 1 and re.search(r"deprecated \d+\S*\r\n\Z", text))
        terminal.press("\x03")
        assert terminal.read_all() == 130
    said = "".join(terminal.screen)
    assert said.startswith("safa: stopped; ")
    assert " of 10000000 rounds are finished and can be read in " in said
    assert "left" not in said


def test_no_color_means_no_escape_code_of_any_kind() -> None:
    code = f"{DRAW}from safa.cli import main\nmain(['protocols'])"
    with in_terminal([*PROGRAM, code], columns=80, NO_COLOR="1") as terminal:
        assert terminal.read_all() == 0
    assert "\x1b" not in terminal.text
    assert "accuracy 0.9231" in terminal.text
    assert "fedavg" in terminal.text


def test_a_terminal_that_cannot_be_drawn_on_gets_lines() -> None:
    with in_terminal([*PROGRAM, DRAW], columns=80, TERM="dumb") as terminal:
        assert terminal.read_all() == 0
    assert "\x1b" not in terminal.text
    assert terminal.text.count("safa: round ") >= 2


# -- a deployment ------------------------------------------------------------------------------------------------------

SHOW = """
import sys, threading
from pathlib import Path
import safa
from safa.cli import live
from safa.cli.deploy.output import _Show
from safa.cli.progress import Progress

live._FIRST_S = threading.TIMEOUT_MAX
if len(sys.argv) > 1:
    sys.stdout = Path(sys.argv[1]).open("w")
show = _Show(quiet=False, progress=Progress(3, "round", time_name="time"))
with show.view:
    for record in safa.run_rounds(safa.Settings.of("boston", rounds=3)):
        show(f"warning: client {record.round}")
        show(record)
        show.view.refresh()
"""


def test_a_deployment_in_a_terminal_has_the_view_and_no_table() -> None:
    with in_terminal([*PROGRAM, SHOW], columns=80) as terminal:
        assert terminal.read_all() == 0
    assert terminal.screen == ["warning: client 1", "warning: client 2", "warning: client 3"]
    assert "round 3 of 3" in terminal.text
    assert "undrafted  refused" not in terminal.text


def test_a_deployment_writes_its_table_for_other_programs_too(tmp_path: Path) -> None:
    with in_terminal([*PROGRAM, SHOW, str(tmp_path / "table")], columns=80) as terminal:
        assert terminal.read_all() == 0
    head, *rows = (tmp_path / "table").read_text().splitlines()
    assert head.split()[:2] == ["round", "time,"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert "round 3 of 3" in terminal.text


# -- lines of text -----------------------------------------------------------------------------------------------------


def test_lines_come_for_every_tenth_and_at_least_once_a_minute(capsys: Capture) -> None:
    clock, seen = Clock(), []
    with LiveView(Progress(40, "round"), clock=clock) as view:
        for record, wait_s in zip(records(40), [1.0] * 20 + [59.0, 62.0] + [30.0] * 18, strict=True):
            clock.now += wait_s
            view.round(record)
            seen += [record.round] if capsys.readouterr().err else []
    assert seen == [5, 10, 15, 20, 22, *range(24, 41, 2)]
    assert capsys.readouterr() == ("", ""), "the last one has been said"


def test_a_line_is_one_sentence(capsys: Capture) -> None:
    clock = Clock()
    with LiveView(Progress(40, "round", done=10, at_most=True), clock=clock) as view:
        clock.now = 6.0
        view.round(list(records(16))[-1])
    assert capsys.readouterr().err == (
        "safa: round 16 of at most 40, virtual time 42 min, 500 clients, accuracy 0.9412, picked 150, undrafted 203, "
        "crashed 147, deprecated 30, 1.0 rounds/s, at most 24 s left\n"
    )


@pytest.mark.parametrize(
    ("title", "said"), [("", ""), ("near, rates", "near, rates: 3 of 3 runs, 5.0 runs/s, 0 s left\n")]
)
def test_what_is_over_at_once_needs_no_line_but_a_part_of_something_has_its_own(
    title: str, said: str, capsys: Capture
) -> None:
    clock = Clock()

    def rows() -> Iterator[dict[str, Any]]:
        for _ in range(3):
            clock.now += 0.2
            yield {}

    with LiveView(Progress(3, "run", title=title), clock=clock) as view:
        for row in rows():
            view.run(row)
    assert capsys.readouterr() == ("", said)


def test_runs_have_the_main_metric_of_the_last_one_and_their_weight(capsys: Capture) -> None:
    clock = Clock()
    with LiveView(Progress(5, "run", done=2, work=61.0, worked=30.0), clock=clock) as view:
        clock.now = 15.0
        view.run({"virtual_time_s": 7200.0, "best_accuracy": 0.9, "last_accuracy": 0.8, "last_loss": 0.1}, 15.0)
    assert capsys.readouterr().err == ("safa: 3 of 5 runs, last run: virtual time 2.0 h, accuracy 0.8, 16 s left\n")


@pytest.mark.parametrize(
    ("command", "last"),
    [
        ("run boston --no-train --rounds 20", "safa: round 20 of 20, virtual time "),
        ("sweep boston --no-train --rounds 2 --seed 0-19 --workers 1", "safa: 20 of 20 runs, last run: virtual time "),
    ],
)
def test_commands_in_a_pipe_say_how_far_they_are(
    command: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("safa.cli.live._LEAST_S", 0.0)
    assert main([*command.split(), "--out", str(tmp_path / "out")]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("safa: ")]
    assert len(lines) == 10
    assert lines[-1].startswith(last)
    assert main([*command.split(), "--out", str(tmp_path / "again"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_reproduction_in_a_pipe_counts_all_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("safa.cli.live._LEAST_S", 0.0)
    jobs = grid.plan(["boston"], ["timing"], seeds=1, worlds=1, device="cpu")[:10]
    what = {"task": "boston", "what": "timing", "seeds": 1, "worlds": 1}
    given = Namespace(**what, device="cpu", workers=1, engine="local", quiet=False)
    for count in (4, 10):
        reproduce._run_missing(given, tmp_path, jobs[:count], LocalEngine())
        first, *_, last = capsys.readouterr().err.splitlines()
        assert first.startswith(f"safa: {1 if count == 4 else 5} of {count} runs, last run: virtual time ")
        assert last.startswith(f"safa: {count} of {count} runs, last run: virtual time ")


def test_quiet_is_quiet(capsys: Capture) -> None:
    clock = Clock()
    with LiveView(Progress(12, "round", title="near"), quiet=True, clock=clock) as view:
        for record in records():
            clock.now += 100
            view.round(record)
    assert list(watched([1, 2], Progress(2, "size", title="near"), lambda _: {}, quiet=True)) == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_an_error_has_no_last_line(capsys: Capture) -> None:
    with suppress(KeyboardInterrupt), LiveView(Progress(2, "run", title="near")) as view:
        view.run({})
        raise KeyboardInterrupt
    assert capsys.readouterr() == ("", "")


# -- closed pipes ------------------------------------------------------------------------------------------------------


@contextmanager
def closed_pipe() -> Iterator[int]:
    """A pipe that nobody reads any more, as head leaves it."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


COMMANDS = [
    "protocols --help",
    "protocols",
    "run boston --no-train --rounds 5",
    "run boston --no-train --rounds 5 --json",
]
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_pipe_is_no_error(command: str) -> None:
    program = [sys.executable, "-m", "safa", *command.split()]
    with closed_pipe() as pipe:
        done = subprocess.run(program, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False, env=BUFFERED)
        assert (done.returncode, done.stderr) == (141, "")
        assert subprocess.run(program, stdout=pipe, stderr=pipe, check=False, env=BUFFERED).returncode == 141


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_a_full_disk_is_one_sentence(command: str) -> None:
    program = [sys.executable, "-m", "safa", *command.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=BUFFERED)
    assert (done.returncode, done.stderr) == (2, "safa: cannot write the output: No space left on device\n")


def test_ctrl_c_says_what_is_kept_although_tee_is_gone(tmp_path: Path) -> None:
    run = ["run", "boston", "--no-train", "--rounds", "10000000", "--out", str(tmp_path / "run")]
    streams: dict[str, Any] = {"stderr": subprocess.PIPE, "env": BUFFERED}
    with closed_pipe() as pipe, started([sys.executable, "-m", "safa", *run], stdout=pipe, **streams) as process:
        file = tmp_path / "run" / "rounds.jsonl"
        while process.poll() is None and not (file.exists() and file.stat().st_size):
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err.startswith("safa: stopped; ")
    assert err.endswith(f"resume with --resume {tmp_path / 'run'}\n")


# -- numbers in words --------------------------------------------------------------------------------------------------


def test_a_curve_reaches_from_the_lowest_to_the_highest() -> None:
    assert curve([0, 1, 2, 3, 4, 5, 6, 7], 40) == "▁▂▃▄▅▆▇█"
    assert curve([3.0], 40) == "▁"
    assert curve([1.0, math.nan, math.inf, 2.0], 40) == "▁  █"
    assert curve([-1.7e308, 1.7e308], 40) == "▁█"
    assert curve([math.nan], 40) == " "
    many = curve([float(n) for n in range(1000)], 16)
    assert (len(many), many[-1], many) == (16, "█", "".join(sorted(many)))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (119, "119 s"),
        (120, "2.0 min"),
        (3600, "60 min"),
        (7200, "2.0 h"),
        (90000, "25 h"),
        (1e6, "12 days"),
    ],
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("per_second", "words"),
    [(1234.5, "1,234 runs/s"), (0.5, "30 runs/min"), (0.001, "3.6 runs/h")],
)
def test_a_rate_has_the_unit_that_suits_it(per_second: float, words: str) -> None:
    assert rate(per_second, "run") == words


def test_runs_that_were_finished_before_say_nothing_of_the_time_left() -> None:
    progress = Progress(100, "run")
    progress.start(0.0)
    for number in range(60):
        progress.add_run({}, 3.0 + number * 1e-5)
    assert progress.left_s(4.0) is None
    progress.add_run({}, 13.0)
    progress.add_run({}, 23.0)
    assert progress.left_s(23.0) == pytest.approx(380, rel=1e-3)


def test_control_characters_in_a_name_are_not_printed() -> None:
    progress = Progress(2, "run", title="a\x1b[2J")
    progress.start(0.0)
    progress.add_run({"last_\x1b[31mred": 1.0}, 1.0)
    shown = "".join(text for line in progress.lines(80, 1.0) for text, _ in line)
    assert "\x1b" not in shown + progress.sentence(1.0)
    assert json.dumps("a\\x1b[2J")[1:-1] in json.dumps(shown)
