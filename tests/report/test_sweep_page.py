"""The page of a sweep: who is first, by how much, how sure that is, and the trade-offs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from safa.analysis import Target, pareto_front
from safa.errors import SafaError
from safa.experiments.results import load_sweep
from safa.experiments.sweep import combinations, run_sweep
from safa.report import read_sweep, sweep_page, sweep_sections, write_report
from safa.report.answer import Answer, find_answer
from safa.report.page import Folded, Headline, blocks_of
from safa.report.plan import Plan
from safa.report.setting_figures import MOST, looks
from safa.report.tables import EVALUATIONS
from safa.report.words import duration
from tests.programs import chromium
from tests.report.test_pages import specs_of, text_of

SMALL: dict[str, list[Any]] = {"rounds": [10], "epochs": [1], "eval_clients": [True]}


def swept(folder: Path, *, keep: Any = "records", **given: list[Any]) -> Path:
    """A sweep that trains."""
    for _ in run_sweep(combinations(["boston"], SMALL | given), folder, keep=keep):
        pass
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return swept(tmp_path_factory.mktemp("sweep"), protocol=["safa", "fedavg"], fraction=[0.4, 1.0], seed=[0, 1, 2])


def timed(**times: list[float | None]) -> list[dict[str, Any]]:
    """The rows of a sweep over protocols with a target, whose curves rise to it."""
    plain = {"task": "t", "until": "accuracy=0.5", "metric.accuracy": "higher", "clock": "causal", "fraction": 0.3,
             "crash_rate": 0.1, "rounds": 9, "clients": 5, "last_loss": 1.0, "last_accuracy": 0.5, "best_accuracy": 0.5,
             "virtual_time_s": 500.0}  # fmt: skip
    measured = dict.fromkeys(("round_length_s", "sync_ratio", "effective_update_ratio", "version_variance", "futility",
                              "starved", "fairness"), 0.5)  # fmt: skip
    return [
        plain | measured | {"protocol": name, "seed": seed, "time_to_target_s": time}
        | {EVALUATIONS: [(at_s, {"accuracy": at_s / 400}) for at_s in (100.0, 200.0, time or 300.0)]}
        for name, of in times.items()
        for seed, time in enumerate(of)
    ]  # fmt: skip


def answered(rows: list[dict[str, Any]], target: str | None = None) -> Answer:
    return find_answer(rows, Plan.of(rows), target)


def facts(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    (headline,) = [block for block in sweep_sections(rows)[0].blocks if isinstance(block, Headline)]
    return [(fact.name, fact.value, fact.meaning) for fact in headline.facts]


# -- the answer --------------------------------------------------------------------------------------------------------


def test_the_first_view_says_who_is_first_by_how_much_and_how_sure() -> None:
    said = facts(timed(safa=[100.0, 200.0, 150.0], fedavg=[200.0, 410.0, 290.0]))
    assert said == [
        ("First to accuracy 0.5", "SAFA", ""),
        ("It takes", "2.4 min", "geometric mean over 3 seeds"),
        ("The next takes", "1.99×", "as long: FedAvg, 4.79 min"),  # noqa: RUF001
        ("Do the seeds allow saying so?", "Yes", "95% interval 1.85 to 2.15×, 3 seeds compared one by one"),  # noqa: RUF001
    ]


def test_where_the_seeds_do_not_allow_it_the_page_cannot_tell() -> None:
    said = facts(timed(safa=[100.0, 200.0, 150.0], fedavg=[90.0, 300.0, 150.0]))
    assert said[0] == ("First to accuracy 0.5", "SAFA", "ahead, but cannot be told from the next")
    assert said[3][1] == "Cannot tell"
    assert facts(timed(safa=[100.0], fedavg=[200.0]))[3][1:] == ("Cannot tell", "one seed has no interval: add seeds")


def test_a_target_that_is_not_always_reached_is_counted_by_seeds() -> None:
    said = facts(timed(safa=[100.0, 200.0], fedavg=[200.0, None]))
    assert said[2] == ("The next", "1 of 2 seeds", "is how often FedAvg got there")
    assert said[3] == (
        "Do the seeds allow saying so?",
        "Cannot tell",
        "known to be behind in 2 and ahead in 0 of 2 seeds",
    )
    (nobody,) = facts(timed(safa=[None], fedavg=[None]))
    assert nobody[:2] == ("First to accuracy 0.5", "none")


def test_the_answer_is_that_of_safa_best(folder: Path) -> None:
    rows = read_sweep(folder)
    found = answered(rows)
    assert found.best is not None
    assert found.target is not None
    best = load_sweep(folder).best(str(found.target))
    assert [one.value for one in found.best.standings] == [one.value for one in best.standings]
    assert [one.behind for one in found.best.standings] == [one.behind for one in best.standings]
    assert found.best.is_certain == best.is_certain
    held = answered(rows, f"loss={rows[0]['last_loss'] * 1.5:g},held=2")
    assert held.best is not None
    assert [one.value for one in held.best.standings] == [
        one.value for one in load_sweep(folder).best(str(held.target)).standings
    ]


def test_without_a_target_the_page_chooses_one_and_says_why(folder: Path) -> None:
    found = answered(read_sweep(folder))
    levels = sorted(min(setting.numbers("best_accuracy")) for setting in found.settings)
    assert found.target is not None
    assert levels[1] - 0.001 <= found.target.value <= levels[1], "three of four settings reached it with every seed"
    assert sum(one.setting.reached == 3 for one in found.best.standings) == 3 if found.best else False
    said = text_of(sweep_page(read_sweep(folder)))
    assert "This page chose that target" in said
    assert f"First to accuracy {found.target.value:g}" in said


def test_without_curves_the_last_models_are_compared(tmp_path: Path) -> None:
    rows = read_sweep(swept(tmp_path, keep="nothing", protocol=["safa", "fedavg"], seed=[0, 1]))
    found = answered(rows)
    assert found.target is None
    assert found.best == load_sweep(tmp_path).best() or found.best is not None
    assert facts(rows)[0][0] == "Best accuracy of the last model"
    with pytest.raises(SafaError, match=r"were not kept, so that accuracy=0\.1 cannot be asked for"):
        sweep_page(rows, target="accuracy=0.1")


def test_curves_are_enough_for_a_target(tmp_path: Path) -> None:
    kept = read_sweep(swept(tmp_path / "records", protocol=["safa", "fedavg"], seed=[0, 1]))
    short = read_sweep(swept(tmp_path / "curves", keep="curves", protocol=["safa", "fedavg"], seed=[0, 1]))
    one, other = answered(kept), answered(short)
    assert one.target == other.target
    assert one.best is not None
    assert other.best is not None
    assert [s.value for s in other.best.standings] == pytest.approx([s.value for s in one.best.standings], rel=1e-5)


def test_a_sweep_that_is_not_finished_is_compared_by_the_seeds_that_are_there() -> None:
    rows = timed(safa=[100.0, 200.0, 150.0], fedavg=[200.0, 410.0, 290.0], fedcs=[100.0])
    found = answered(rows)
    assert found.best is not None
    assert [one.setting.name for one in found.best.standings] == ["SAFA", "FedAvg"]
    assert [setting.name for setting in found.unranked] == ["FedCS"]
    page = text_of(sweep_page(rows, planned=9))
    assert "Not finished: 7 of 9 runs on t." in page
    assert "Not ranked, as they have not the same seeds: FedCS." in page


def test_the_blocks_keep_their_keys_while_a_sweep_grows() -> None:
    rows = timed(safa=[100.0, 200.0, 150.0], fedavg=[200.0, 410.0, 290.0])
    early, late = (blocks_of(sweep_sections(rows[:n])) for n in (5, 6))
    assert early.keys() == late.keys()
    assert early["first-0"] != late["first-0"]


def test_every_task_has_an_answer(tmp_path: Path) -> None:
    runs = combinations(["boston", "digits"], {"protocol": ["safa", "fedavg"], "rounds": [2], "epochs": [1]})
    list(run_sweep(runs, tmp_path))
    titles = [section.title for section in sweep_sections(read_sweep(tmp_path))]
    assert titles[0] == "Which setting is first on boston"
    assert "Which setting is first on digits" in titles


# -- the charts --------------------------------------------------------------------------------------------------------


def test_the_curves_are_means_over_the_seeds_with_a_band() -> None:
    page = sweep_page(timed(safa=[250.0, 350.0], fedavg=[250.0, 350.0]))
    points = [
        p for rows in specs_of(page)[0]["datasets"].values() for p in rows if p.get("setting") == "SAFA" and "low" in p
    ]
    at_end = points[-1]
    assert at_end["mean"] == pytest.approx((250 + 350) / 2 / 400)
    assert (at_end["low"], at_end["high"]) == (250 / 400, 350 / 400)
    assert points[0]["time"] == pytest.approx(100 / 60), "in minutes"
    assert "accuracy 0.5" in json.dumps(specs_of(page)[0])


def test_the_bars_have_the_interval_of_the_comparison() -> None:
    page = sweep_page(
        timed(safa=[100.0, 200.0, 150.0], fedavg=[200.0, 410.0, 290.0], fedcs=[95.0, 330.0, 160.0], fedbuff=[None] * 3)
    )
    bars = {row["setting"]: row for rows in specs_of(page)[1]["datasets"].values() for row in rows if "said" in row}
    assert bars["SAFA"] | {"low": None} == bars["SAFA"]
    assert bars["FedAvg"]["low"] / bars["SAFA"]["value"] == pytest.approx(1.853, abs=0.001)
    assert bars["FedAvg"]["said"].endswith("min · 1.99×")  # noqa: RUF001
    assert bars["FedCS"]["said"].endswith("cannot tell")
    assert bars["FedCS"]["low"] < bars["SAFA"]["value"] < bars["FedCS"]["high"]
    assert bars["FedBuff"]["value"] is None
    assert bars["FedBuff"]["said"] == "reached in 0 of 3 seeds"


def test_the_front_has_what_nobody_beats() -> None:
    assert pareto_front([(1, 5), (2, 4), (3, 4), (2, 6), (1, 5)]) == [0, 1, 4]
    rows = timed(safa=[100.0], fedavg=[200.0], fedcs=[300.0])
    for row, futility in zip(rows, (0.4, 0.1, 0.3), strict=True):
        row["futility"] = futility
    said = text_of(sweep_page(rows))
    assert "Time against work thrown away" in said
    assert "On the front, the soonest first: SAFA; FedAvg." in said
    assert "Time against clients left out" in said, "for want of the worst-served tenth"
    rows = [row | {"client_accuracy_worst_decile": 0.2} for row in rows]
    assert "Time against accuracy of the worst-served tenth" in text_of(sweep_page(rows))


def test_settings_are_coloured_by_what_varies() -> None:
    rows = timed(safa=[100.0], fedavg=[200.0])
    rows = [row | {"fraction": fraction} for row in rows for fraction in (0.1, 0.3)]
    found = answered(rows)
    styled = looks(found.settings, Plan.of(rows))
    assert styled["SAFA, C 0.1"].colour == styled["SAFA, C 0.3"].colour != styled["FedAvg, C 0.1"].colour
    assert styled["SAFA, C 0.1"].dash != styled["SAFA, C 0.3"].dash
    rows = [timed(safa=[100.0])[0] | {"fraction": value / 10} for value in range(1, 10)]
    styled = looks(answered(rows).settings, Plan.of(rows))
    assert len({(style.colour, style.dash) for style in styled.values()}) == len(styled) == MOST
    assert f"Grey: settings behind the first {MOST}." in text_of(sweep_page(rows))


def test_settings_that_hardly_differ_are_two() -> None:
    rows = [row | {"fraction": value} for row in timed(safa=[100.0, 200.0]) for value in (0.30001, 0.30002)]
    assert [setting.name for setting in answered(rows).settings] == ["C 0.30001", "C 0.30002"]


def test_the_page_of_one_setting_compares_nothing() -> None:
    page = sweep_page(timed(safa=[100.0, 200.0]))
    assert "There is one setting only, so there is nothing to compare." in text_of(page)
    assert len(specs_of(page)) > 0


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_what_does_not_answer_the_question_is_folded(folder: Path) -> None:
    *_, last = sweep_sections(read_sweep(folder))
    assert [block.title for block in last.blocks if isinstance(block, Folded)] == [
        "Charts of all metrics",
        "All runs",
        "What was the same",
    ]


def test_a_target_is_given_for_the_page(folder: Path, tmp_path: Path) -> None:
    page = write_report(folder, tmp_path / "page.html", target="accuracy=0.05").read_text()
    assert "First to accuracy 0.05" in text_of(page)
    with pytest.raises(SafaError, match="there is no metric 'accurracy' to reach"):
        write_report(folder, tmp_path / "page.html", target="accurracy=0.05")
    with pytest.raises(SafaError, match="a target is for the page of a sweep, or of several runs"):
        write_report(folder / "runs" / "0001", tmp_path / "page.html", target="accuracy=0.05")


def test_a_damaged_record_is_named(folder: Path, tmp_path: Path) -> None:
    broken = swept(tmp_path, seed=[0])
    (broken / "runs" / "0001" / "rounds.jsonl").write_text('{"round": 1}\n')
    with pytest.raises(SafaError, match=r"rounds\.jsonl, line 1: it is not the record of a round"):
        read_sweep(broken)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.5, "0.5 s"), (90, "90 s"), (150, "2.5 min"), (7200, "2 h"), (200_000, "2.31 days")]
)
def test_lengths_of_time_have_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_default_target_where_less_is_better() -> None:
    rows = timed(safa=[1.0, 1.0], fedavg=[1.0, 1.0])
    for row, best in zip(rows, (0.1234, 0.2345, 0.3, 0.2), strict=True):
        row |= {"metric.accuracy": "lower", "until": None, "best_accuracy": best}
    assert answered(rows).target == Target("accuracy", 0.3, higher=False)


@pytest.mark.slow
def test_the_first_screen_answers_the_question(tmp_path: Path) -> None:
    """A window of 1280 x 800 holds the answer, the curves and the ranking of six settings, without scrolling."""
    made = timed(safa=[100.0, 200.0, 150.0], fedavg=[200.0, 410.0, 290.0], fedcs=[95.0, 330.0, 160.0])
    rows = [row | {"fraction": fraction} for row in made for fraction in (0.1, 0.3)]
    (tmp_path / "page.html").write_text(sweep_page(rows))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto((tmp_path / "page.html").as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        seen = page.evaluate(
            "[...document.querySelectorAll('.headline, .chart')].slice(0, 3)"
            ".map(one => one.getBoundingClientRect().bottom)"
        )
        said = page.locator(".headline").inner_text()
        browser.close()
    assert max(seen) < 800
    assert all(words in said for words in ("First to accuracy 0.5", "SAFA", "The next takes", "Cannot tell"))
