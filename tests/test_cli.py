"""The command line as a user meets it."""

from __future__ import annotations

import csv
import json
import pkgutil
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from safa import load_run
from safa.cli import program
from safa.cli.program import main
from safa.paper.collect import Results
from safa.runs import write_config
from safa.runs.settings import Settings
from safa.tasks import catalogue, load_problem
from tests.programs import started

SETTINGS = {
    "task", "protocol", "clock", "seed", "fraction", "crash_rate", "lag_tolerance", "rounds", "clients", "epochs",
    "batch_size", "lr", "round_limit_s",
}  # fmt: skip
COLUMNS = {
    "round_length_s", "t_dist_s", "sync_ratio", "effective_update_ratio", "version_variance", "futility", "starved",
    "fairness", "virtual_time_s", "best_accuracy", "best_loss",
}  # fmt: skip

Capture = pytest.CaptureFixture[str]

OWN = """
import torch
from safa.tasks import Problem

x = torch.randn(90, 3)
problem = Problem(
    model=lambda: torch.nn.Linear(3, 1),
    loss=lambda output, target: ((output[:, 0] - target) ** 2).mean(),
    metrics={"accuracy": lambda output, target: 1 - (output[:, 0] - target).abs().mean()},
    train=(x[:60], x[:60, 0]), test=(x[60:], x[60:, 0]),
)
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_run_prints_what_was_run_and_what_came_out(capsys: Capture) -> None:
    assert main(["run", "boston", "--no-train"]) == 0
    out = capsys.readouterr().out
    assert "safa on boston: 5 clients, 100 rounds, C = 0.3, tau = 5, crash rate 0.3, causal clock, seed 0." in out
    assert "round_length_s" in out
    assert "Nothing was written" in out


@pytest.mark.parametrize(("protocol", "shown"), [("fedavg", "C = 0.3, crash rate"), ("fedsecant", "crash rate")])
def test_run_shows_no_setting_that_the_protocol_does_not_have(protocol: str, shown: str, capsys: Capture) -> None:
    assert main(["run", "boston", "--no-train", "--protocol", protocol]) == 0
    assert f"{protocol} on boston: 5 clients, 100 rounds, {shown} 0.3, causal clock, seed 0." in capsys.readouterr().out


def test_a_run_that_trains_is_kept(capsys: Capture) -> None:
    for number in (1, 2):
        assert main(["run", "boston", "--rounds", "3"]) == 0
        folder = f"runs/boston-safa-{number}"
        assert f"Written to {folder}; safa report {folder} makes a page of it." in capsys.readouterr().out
        assert load_run(f"runs/boston-safa-{number}").model()["weight"].shape == (1, 12)


def test_json_is_one_object_and_nothing_else(capsys: Capture) -> None:
    assert main(["run", "boston", "--no-train", "--json", "--seed", "3", "--round-limit", "inf"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert set(result) == {"settings", "metrics"}
    assert set(result["settings"]) >= SETTINGS
    assert set(result["metrics"]) >= COLUMNS
    assert result["settings"]["seed"] == 3
    assert result["settings"]["round_limit_s"] == "inf"
    assert captured.err == ""
    assert not Path("runs").exists()


def test_run_writes_a_folder_that_can_be_run_again(capsys: Capture) -> None:
    assert main(["run", "boston", "--no-train", "--rounds", "7", "--seed", "5", "--out", "first"]) == 0
    assert "Written to first" in capsys.readouterr().out
    assert load_run("first").settings.rounds == 7
    assert main(["run", "--config", "first/config.toml", "--out", "second", "--quiet"]) == 0
    for name in ("config.toml", "rounds.jsonl", "summary.json"):
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()


def test_options_go_before_a_config_file(capsys: Capture) -> None:
    Path("mine.toml").write_text('task = "boston"\nrounds = 3\nseed = 9\n')
    assert main(["run", "--config", "mine.toml", "--seed", "1", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["rounds"], settings["seed"]) == (3, 1)


def test_both_trainers_come_to_the_same_accuracy(capsys: Capture) -> None:
    accuracies = []
    for trainer in ("batched", "serial"):
        assert main(["run", "boston", "--rounds", "10", "--trainer", trainer, "--json"]) == 0
        accuracies.append(json.loads(capsys.readouterr().out)["metrics"]["best_accuracy"])
    assert accuracies[0] == pytest.approx(accuracies[1], abs=1e-5)


def test_a_problem_of_ones_own(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    Path("mine.py").write_text(OWN)
    assert main(["run", "mine:problem", "--rounds", "3", "--eval-clients", "yes", "--out", "run"]) == 0
    assert "client_accuracy_worst_decile" in capsys.readouterr().out
    assert list(load_run("run").model()) == ["bias", "weight"]


def test_choosing_a_model_by_the_test_set_is_warned_of(capsys: Capture) -> None:
    assert main(["run", "boston", "--rounds", "2", "--preset", "paper"]) == 0
    assert "chosen by its loss on the test set" in capsys.readouterr().err


def test_sweep_writes_a_row_a_run(capsys: Capture) -> None:
    command = ["sweep", "boston", "--preset", "paper", "--no-train", "--protocol", "safa,fedavg"]
    assert main([*command, "--fraction", "0.1, 0.5", "--seed", "0,1,2", "--rounds", "5", "--out", "table"]) == 0
    with Path("table/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert set(rows[0]) >= SETTINGS | COLUMNS
    assert [(row["protocol"], row["seed"], row["fraction"]) for row in rows[:3]] == [
        ("safa", "0", "0.1"),
        ("safa", "0", "0.5"),
        ("safa", "1", "0.1"),
    ]
    assert rows[0]["best_accuracy"] == ""
    captured = capsys.readouterr()
    assert "fedavg" in captured.out
    assert "12 runs in table/results.csv" in captured.err


def test_a_sweep_gives_the_same_rows_with_any_number_of_workers() -> None:
    tables = []
    for workers in ("1", "2"):
        command = ["sweep", "boston,digits", "--seed", "0,1,2", "--rounds", "4", "--quiet", "--workers", workers]
        assert main([*command, "--out", workers]) == 0
        tables.append(Path(workers, "results.csv").read_bytes())
    assert tables[0] == tables[1]
    assert tables[0].count(b"\n") == 7


def test_sweep_finds_a_new_folder_by_itself() -> None:
    for number in (1, 2):
        assert main(["sweep", "boston", "--rounds", "2", "--quiet"]) == 0
        assert Path(f"runs/sweep-boston-{number}/results.csv").exists()


def test_the_lists(capsys: Capture) -> None:
    assert main(["protocols"]) == 0
    out = capsys.readouterr().out
    assert [name for name in ("safa", "fedavg", "fedcs", "local", "fedasync", "fedbuff") if name not in out] == []
    assert main(["tasks"]) == 0
    assert "186,480 samples, 500 clients" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("safa.aggregation.registry") is None, reason="there is no registry of aggregators yet")
def test_the_aggregators_and_server_optimisers_are_listed_with_a_line_each(capsys: Capture) -> None:
    from safa.aggregation.registry import available, optimisers

    assert main(["aggregators"]) == 0
    aggregators, of_server = capsys.readouterr().out.split("\n\n")
    for listed, names in ((aggregators, available()), (of_server, optimisers())):
        lines = {line.split()[0]: line for line in listed.splitlines()[1:]}
        assert list(lines) == list(names)
        assert all(summary and summary in lines[name] for name, summary in names.items())


def test_every_command_is_a_module_that_adds_itself() -> None:
    folder = Path(program.__file__).parent
    shared = {"__init__", "arguments", "console", "live", "program", "progress", "show", "sweep_tables"}
    modules = {module.name for module in pkgutil.iter_modules([str(folder)])}
    assert modules - shared == set(commands())


def commands() -> list[str]:
    """The commands in the order of `safa --help`."""
    (found,) = (action for action in program._parser()._actions if action.dest == "==SUPPRESS==" and action.choices)
    return list(found.choices or [])


@pytest.mark.parametrize("command", commands())
def test_every_command_explains_itself(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: safa {command}")
    assert len(out.split("\n\n")[1]) > 10, "it has a description"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("run boston --fraction 0", "fraction must be above 0 and at most 1, not 0"),
        ("run boston --fraction 1.01", "fraction must be above 0 and at most 1, not 1.01"),
        ("run boston --crash-rate 2", "crash_rate must be at least 0 and at most 1, not 2"),
        ("run boston --lag-tolerance 0", "lag_tolerance must be at least 1, not 0"),
        ("run boston --lag-tolerance 1.5", "lag_tolerance must be a whole number, not 1.5"),
        ("run boston --rounds many", "rounds must be a number, not 'many'"),
        ("run boston --keep-progress perhaps", "keep_progress must be yes or no, not 'perhaps'"),
        ("run boston --clock wall", "clock must be one of causal, paper, not 'wall'"),
        ("run boston --protocol fedsgd", "there is no protocol 'fedsgd'; there are safa, fedavg, fedcs, local"),
        ("run boston --protocol fedasync --preset paper", "the paper clock knows safa, fedavg, fedcs and local only"),
        ("run boston --speeds few.txt", "few.txt holds speeds for 2 clients, but there are 5"),
        ("run boston --speeds bad.txt", "bad.txt, line 2: speeds must be above 0, not -1"),
        ("run boston --sizes word.txt", "word.txt, line 3: sizes must be a number, not 'x'"),
        ("run boston --trace none.csv", "cannot read none.csv: No such file or directory"),
        ("run boston --out used", "used already holds a run; choose another folder, or replace it with --force"),
        ("run boston --out other", "other holds other files; choose an empty or new folder"),
        ("run boston --out foreign --force", "foreign holds other files; choose an empty or new folder"),
        ("run boston --out few.txt", "few.txt is not a folder"),
        ("run boston --out few.txt/deep", "cannot make the folder few.txt/deep: Not a directory"),
        ("run boston --set patience", "--set needs NAME=VALUE, not 'patience'"),
        ("run boston --set patience=3", "safa has no setting 'patience'; it has fraction, lag_tolerance"),
        ("run cifar", "there is no task 'cifar'; there are boston, mnist, kdd99"),
        ("run", "name a task, one of boston, mnist, kdd99"),
        ("run boston --speed 3", "unrecognized arguments: --speed 3 (did you mean --speeds?) (see safa run --help)"),
        ("sweep boston --fraction 0.1,2", "fraction must be above 0 and at most 1, not 2"),
        ("sweep boston --protocol safa,fedbuff --preset paper", "the paper clock knows"),
        ("sweep boston --speeds few.txt --clients 2,3", "few.txt holds speeds for 2 clients, but there are 3"),
        ("sweep boston --out used", "used already holds a run"),
        ("run boston --device warp", "there is no device 'warp' here that torch can use; try --device cpu"),
        ("run boston --partition pies", "there is no partition 'pies'; there are contiguous, iid, dirichlet:ALPHA"),
        ("run nothing.here:problem", "there is no module nothing.here"),
        ("run boston --resume used", "--resume takes everything from its folder"),
        ("run --resume other", "other holds no run"),
        ("sweep boston --workers 0", "workers must be at least 1, not 0"),
        ("run boston --protocol fedavg --lag-tolerance 3", "lag_tolerance has no effect with protocol = fedavg"),
        ("run boston --server-lr 2", "server_lr has no effect with protocol = safa; it is for protocol = fedbuff"),
        ("run boston --optimiser adam --momentum 0.5", "momentum has no effect with optimiser = adam"),
        ("run boston --momentum 1.5", "momentum must be at least 0 and below 1, not 1.5"),
        ("run --config unused.toml", "lag_tolerance has no effect with protocol = fedavg; it is for protocol = safa"),
        ("run --config table.toml", "protocol_options in table.toml must be a table"),
        ("run --config number.toml", "a task is given by its name, not as 3"),
        ("run boston --trace header.csv", "header.csv names no time at which a client is online"),
        ("run boston --sizes large.txt", "the sizes in large.txt add up to 1,000 samples, but boston has 506"),
        ("run boston --clients 10000000000", "clients must be at least 1 and at most 100000000, not 10000000000"),
        ("run boston --rounds 10000000000", "rounds must be at least 1 and at most 1000000000, not 10000000000"),
        ("sweep boston --protocol fedavg,fedcs --lag-tolerance 3,5", "lag_tolerance has no effect with protocol = "),
        ("sweep boston --protocol safa,fedasync --hinge-lag 3", "hinge_lag has no effect with staleness = polynomial"),
        ("sweep boston --seed 0,0", "seed lists 0 twice"),
        ("sweep boston --fraction 1,0.5,1.0", "fraction lists 1.0 twice"),
        ("sweep boston --protocol safa,fedavg,safa", "protocol lists safa twice"),
        ("sweep boston,digits,boston", "task lists boston twice"),
        ("sweep digits --protocol safa,fedasync --aggregator median", "the aggregator median compares the updates"),
        (
            "run digits --protocol fedbuff --aggregator own",
            "the aggregator own needs a protocol that lets",
        ),
        ("sweep boston,digits --sizes large.txt --clients 5", "the sizes in large.txt add up to 1,000 samples"),
        ("swep boston", "there is no command 'swep' (did you mean sweep?); there are run, sweep, "),
        ("deploy locale", "there is no command 'locale' (did you mean local?); there are local, server, "),
        ("run boston --fractoin 0.1", "unrecognized arguments: --fractoin 0.1 (did you mean --fraction?)"),
        ("run boston --fractoin=0.1", "unrecognized arguments: --fractoin=0.1 (did you mean --fraction?)"),
        ("run bostn", "there is no task 'bostn' (did you mean boston?); there are boston, "),
        ("run boston --protocol fedavgg", "there is no protocol 'fedavgg' (did you mean fedavg?); there are safa, "),
        ("run boston --aggregator meen", "there is no aggregator 'meen' (did you mean mean?); there are mean, "),
        ("run boston --server-optimiser adm", "there is no server optimiser 'adm' (did you mean adam?); there are "),
        ("run boston --preset papr", "there is no preset 'papr' (did you mean paper?); there is paper"),
        ("run boston --until acuracy=1", "there is no metric 'acuracy' to reach (did you mean accuracy?); there is "),
        ("run boston --set fracton=1", "safa has no setting 'fracton' (did you mean fraction?); it has fraction, "),
        ("run --config typo.toml", "there is no setting 'lag_tolernce' (did you mean lag_tolerance?)"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: str, complaint: str, capsys: Capture) -> None:
    Path("few.txt").write_text("1\n2\n")
    Path("bad.txt").write_text("1\n-1\n1\n1\n1\n")
    Path("word.txt").write_text("30\n30\nx\n30\n30\n")
    Path("large.txt").write_text("200\n" * 5)
    Path("header.csv").write_text("client,online_from_s,online_until_s\n")
    Path("unused.toml").write_text('task = "boston"\nprotocol = "fedavg"\nlag_tolerance = 3\n')
    Path("table.toml").write_text('task = "boston"\nprotocol_options = 3\n')
    Path("number.toml").write_text("task = 3\n")
    Path("typo.toml").write_text('task = "boston"\nlag_tolernce = 3\n')
    Path("used").mkdir()
    write_config(Path("used"), Settings.of("boston"))
    Path("other").mkdir()
    Path("other/thesis.tex").write_text("precious")
    Path("foreign").mkdir()
    Path("foreign/config.toml").write_text('title = "precious"')
    precious = Path("used/config.toml").read_bytes()
    before = sorted(Path().rglob("*"))
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"safa: {complaint}")
    assert captured.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before  # nothing lost, nothing half-written
    assert Path("used/config.toml").read_bytes() == precious


def test_safa_alone_prints_its_help(capsys: Capture) -> None:
    assert main([]) == 0
    alone = capsys.readouterr().out
    assert alone.startswith("usage: safa")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert capsys.readouterr().out == alone


def test_a_sweep_may_vary_what_some_of_its_protocols_use() -> None:
    command = ["sweep", "boston", "--protocol", "safa,fedavg", "--lag-tolerance", "3,5", "--rounds", "2", "--no-train"]
    assert main([*command, "--out", "table", "--quiet", "--workers", "1"]) == 0
    with Path("table/results.csv").open() as file:
        assert [row["lag_tolerance"] for row in csv.DictReader(file)] == ["3", "5", "3", "5"]


@pytest.mark.parametrize("protocol", ["safa", "fedavg"])
def test_the_config_file_of_a_run_with_a_preset_can_be_run_again(protocol: str) -> None:
    command = ["run", "boston", "--preset", "paper", "--protocol", protocol, "--rounds", "2", "--quiet"]
    assert main([*command, "--out", "first"]) == 0
    assert main(["run", "--config", "first/config.toml", "--out", "second", "--quiet"]) == 0
    assert Path("first/config.toml").read_bytes() == Path("second/config.toml").read_bytes()


def test_sizes_may_count_more_samples_than_there_are_where_nothing_is_trained() -> None:
    Path("large.txt").write_text("200\n" * 5)
    assert main(["run", "boston", "--sizes", "large.txt", "--rounds", "2", "--no-train", "--quiet"]) == 0


@pytest.mark.slow
def test_too_little_memory_is_one_sentence() -> None:
    code = """
import resource, sys
from safa.cli import main

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
sys.exit(main(["run", "boston", "--no-train", "--clients", "100000000", "--out", "run"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("safa: not enough memory: Unable to allocate")
    assert done.stderr.count("\n") == 1
    assert not Path("run").exists()


def test_force_replaces_a_run() -> None:
    for seed in ("1", "2"):
        assert main(["run", "boston", "--rounds", "2", "--seed", seed, "--out", "run", "--force", "--quiet"]) == 0
    assert load_run("run").settings.seed == 2


def test_a_setting_of_a_foreign_protocol_is_passed_on(capsys: Capture) -> None:
    assert main(["run", "boston", "--rounds", "2", "--set", "lag_tolerance=9", "--set", "fraction=0.4", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["lag_tolerance"], settings["fraction"]) == (9, 0.4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "file", "said"),
    [
        (["run", "boston", "--rounds", "100000"], "rounds.jsonl", "rounds are finished"),
        (
            ["sweep", "boston", "--seed", "0-998", "--rounds", "10"],
            "results.csv",
            "resume with the same command and --out out",
        ),
        (["reproduce", "--task", "boston", "--what", "timing", "--workers", "2"], "results.jsonl", "runs are finished"),
    ],
)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_what_was_finished_readable(arguments: list[str], file: str, said: str, times: int) -> None:
    results = Path("out", file)
    with started([sys.executable, "-m", "safa", *arguments, "--out", "out"], stderr=subprocess.PIPE) as process:
        while process.poll() is None and not (results.exists() and results.read_bytes().count(b"\n") > 2):
            time.sleep(0.001)  # leaves the processor to the command
        for _ in range(times):  # people are impatient
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)  # which waits for workers, too: they hold the same stderr
    assert process.returncode == 130
    # Where the signal met the main thread in the midst of another library, the watchdog has the last word.
    assert times > 1 or said in err or err.endswith("safa: stopped\n")
    assert times > 1 or "Traceback" not in err
    assert "resource_tracker" not in err
    if file == "rounds.jsonl":
        assert len(list(load_run("out").records())) >= 3
    elif file == "results.jsonl":
        assert len(Results(Path("out", file))) >= 3
    else:
        with results.open() as table:
            assert all(row["last_loss"] for row in csv.DictReader(table))


def test_a_closed_pipe_is_no_accident() -> None:
    done = subprocess.run(
        f"{sys.executable} -m safa protocols | true", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("safa 0.")


# -- pages and theory --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_makes_a_page_of_a_run_and_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "boston", "--no-train", "--rounds", "5", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    values = ["--fraction", "0.3,0.5", "--rounds", "5", "--workers", "1"]
    assert main(["sweep", "boston", "--no-train", *values, "--out", str(tmp_path / "sweep"), "--quiet"]) == 0
    for name in ("run", "sweep"):
        assert main(["report", str(tmp_path / name)]) == 0
        page = (tmp_path / name / "report.html").read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>")
        assert "boston" in page
        assert str(tmp_path / name / "report.html") in capsys.readouterr().out


def test_report_of_a_folder_without_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds neither a run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_bias_prints_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--rounds", "4", "--clients", "60", "--repetitions", "100"]
    assert main(["bias", "--fraction", "0.5", *size, "--out", str(tmp_path / "bias")]) == 0
    told = capsys.readouterr().out
    assert "case 2 of SAFA" in told
    assert "as printed, no probability" in told
    assert {path.name for path in (tmp_path / "bias").iterdir()} == {"bias.svg", "bias.png"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--crash-a", "1"], "crash_a must be at least 0 and below 1, not 1.0"),
        (["--fraction", "2"], "fraction must be from 0 to 1, not 2.0"),
        (["--repetitions", "3"], "repetitions must be at least"),
    ],
)
def test_bias_refuses_nonsense(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bias", *arguments, "--out", str(tmp_path / "bias")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "bias").exists()


def test_replay_makes_the_model_anew(tmp_path: Path, capsys: Capture) -> None:
    folder = str(tmp_path / "run")
    assert main(["run", "digits", "--rounds", "4", "--out", folder, "--quiet"]) == 0
    assert main(["replay", folder, "--out", str(tmp_path / "again.safetensors")]) == 0
    assert "is equal to the run's own" in capsys.readouterr().out
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()


def test_replay_of_a_run_that_trained_nothing_is_refused(tmp_path: Path, capsys: Capture) -> None:
    folder = str(tmp_path / "run")
    assert main(["run", "boston", "--no-train", "--rounds", "2", "--out", folder, "--quiet"]) == 0
    assert main(["replay", folder]) == 2
    assert "trained nothing" in capsys.readouterr().err


def test_ctrl_c_ends_it_even_where_it_is_swallowed() -> None:
    code = """
import os, signal, threading
import safa.cli.program as cli

def deaf():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()
    except KeyboardInterrupt:
        threading.Event().wait()

cli._STOP_LIMIT_S, cli.main = 0.1, deaf
cli.entry()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "safa: stopped\n")


# -- a stranger's folder -----------------------------------------------------------------------------------------------

EVIL = """
from pathlib import Path
Path("was-imported").touch()
""" + OWN.replace("torch.randn(90, 3)", "torch.linspace(-1, 1, 270).reshape(90, 3)")


def forget_evil() -> None:
    sys.modules.pop("evil", None)
    catalogue._own_task.cache_clear()
    load_problem.cache_clear()


@pytest.fixture(name="strangers")
def _strangers(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The folder of a stopped run whose task is a module that lies in the current folder, too."""
    monkeypatch.syspath_prepend(".")
    Path("evil.py").write_text(EVIL)
    forget_evil()
    command = ["run", "evil:problem", "--rounds", "5", "--checkpoint-every", "2", "--clients", "3", "--quiet"]
    assert main([*command, "--out", "run"]) == 0
    Path("run/summary.json").unlink()
    Path("run/model.safetensors").unlink()
    Path("was-imported").unlink()
    forget_evil()
    yield "run"
    forget_evil()


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("replay run", "the task of this run, evil:problem, is not built in; if you trust it, name it: "
         "safa replay run --task evil:problem"),
        ("run --resume run", "the task of this run, evil:problem, is not built in; if you trust it, name it: "
         "safa run evil:problem --resume run"),
        ("replay run --task boston", "the task of this run is 'evil:problem', not 'boston'"),
        ("replay run --task other:problem", "the task of this run is 'evil:problem', not 'other:problem'"),
        ("run other:problem --resume run", "the task of this run is 'evil:problem', not 'other:problem'"),
    ],
)  # fmt: skip
def test_nothing_is_imported_because_a_folder_names_it(
    strangers: str, command: str, told: str, capsys: Capture
) -> None:
    list(load_run(strangers).records())
    before = {path: path.read_bytes() for path in Path(strangers).rglob("*") if path.is_file()}
    assert main(command.split()) == 2
    assert capsys.readouterr().err == f"safa: {told}\n"
    assert not Path("was-imported").exists()
    assert "evil" not in sys.modules
    assert {path: path.read_bytes() for path in Path(strangers).rglob("*") if path.is_file()} == before


def test_a_report_imports_nothing_either(strangers: str) -> None:
    assert main(["report", strangers]) == 0
    assert not Path("was-imported").exists()


@pytest.mark.parametrize("command", ["replay run --task evil:problem", "run evil:problem --resume run --quiet"])
def test_what_is_named_on_the_command_line_is_imported(strangers: str, command: str) -> None:
    assert main(command.split()) == 0
    assert Path("was-imported").exists()
    assert (load_run(strangers).summary is not None) == command.startswith("run")


def test_a_run_of_an_unnamed_problem_is_resumed_by_any_name(strangers: str, capsys: Capture) -> None:
    config = Path(strangers, "config.toml")
    config.write_text(config.read_text().replace("evil:problem", "your own"))
    assert main(["run", "--resume", strangers]) == 2
    told = "this run is of a problem that was given in Python; name it: safa run package.module:attribute --resume run"
    assert capsys.readouterr().err == f"safa: {told}\n"
    assert main(["run", "evil:problem", "--resume", strangers, "--quiet"]) == 0


def test_a_deployment_is_not_resumed_as_a_simulation(capsys: Capture) -> None:
    Path("run").mkdir()
    write_config(Path("run"), Settings.of("boston"))
    Path("run/deploy.toml").write_text("")
    assert main(["run", "--resume", "run"]) == 2
    assert capsys.readouterr().err == (
        "safa: the run in run is a deployment; resume it with safa deploy server (or local) --resume run\n"
    )


# -- what the system refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "part", "told"),
    [
        ("report run", "run/report.html", "cannot write run/report.html: No space left on device"),
        ("replay run --out again", "again", "cannot write again: No space left on device"),
    ],
)
def test_a_full_disk_is_one_sentence(command: str, part: str, told: str, capsys: Capture) -> None:
    assert main(["run", "boston", "--rounds", "3", "--clients", "3", "--quiet", "--out", "run"]) == 0
    Path(f"{part}.part").symlink_to("/dev/full")
    before = {path: path.read_bytes() for path in Path("run").iterdir() if path.suffix != ".part"}
    assert main(command.split()) == 2
    assert capsys.readouterr().err == f"safa: {told}\n"
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_a_sweep_on_a_full_disk_is_one_sentence(capsys: Capture) -> None:
    command = ["sweep", "boston", "--no-train", "--rounds", "2", "--seed", "0,1,2,3", "--workers", "1", "--quiet"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        assert main([*command, "--out", "table"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == "safa: cannot write table/results.csv: File too large\n"


def test_a_folder_in_the_way_is_one_sentence(capsys: Capture) -> None:
    assert main(["run", "boston", "--no-train", "--rounds", "3", "--quiet", "--out", "run"]) == 0
    Path("run/report.html").mkdir()
    assert main(["report", "run"]) == 2
    assert capsys.readouterr().err == "safa: cannot use run/report.html: Is a directory\n"
