"""Which setting is the best: by seeds that are compared one by one, with numbers that can be checked by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from safa.analysis import Target
from safa.analysis.compare import Best, Setting, by_setting, rank_by_metric, rank_by_target, with_shared_seeds
from safa.analysis.statistics import mean_interval
from safa.cli.program import main
from safa.cli.sweep_tables import print_settings
from safa.errors import SafaError

TARGET = Target("accuracy", 0.8)


def settings(ends: float, /, **times: list[float | None]) -> list[Setting]:
    """Settings by name, with the time to the target in every seed."""
    varied = [{"protocol": name, "seed": seed} for name, of in times.items() for seed in range(len(of))]
    rows = [
        {"task": "t", "time_to_target_s": time, "virtual_time_s": ends, "best_accuracy": 0.5 + seed / 100}
        for of in times.values()
        for seed, time in enumerate(of)
    ]
    return by_setting(varied, rows)


def ranked(**times: list[float | None]) -> Best:
    return rank_by_target("t", settings(1000.0, **times), TARGET, TARGET)


def by_metric(directions: dict[str, str], **values: list[float]) -> Best:
    varied = [{"protocol": name, "seed": seed} for name, of in values.items() for seed in range(len(of))]
    rows = [{f"last_{next(iter(directions), 'loss')}": value} for of in values.values() for value in of]
    return rank_by_metric("t", by_setting(varied, rows), directions)


def names(found: Best) -> list[str]:
    return [standing.setting.name for standing in found.standings]


def test_rows_are_grouped_by_what_was_varied_and_ordered_by_seed() -> None:
    varied = [{"protocol": p, "fraction": f, "seed": s} for s in (2, 0, 1) for p in ("a", "b") for f in (0.1, 0.3)]
    found = by_setting(varied, [{"place": place} for place in range(12)])
    assert [setting.name for setting in found] == [f"{p}, fraction {f}" for p in "ab" for f in (0.1, 0.3)]
    assert [row["place"] for row in found[1].rows] == [5, 9, 1]
    assert by_setting([{"seed": 0}], [{}])[0].name == "the only setting"


def test_the_first_is_told_from_the_second_where_worlds_explain_what_differs() -> None:
    """All times differ by more between worlds than between settings: only the pairs tell them apart."""
    found = ranked(slow=[101.0, 990.0, 54.0, 300.0], fast=[90.0, 900.0, 50.0, 271.0])
    assert names(found) == ["fast", "slow"]
    assert found.is_certain
    assert mean_interval([11.0, 90.0, 4.0, 29.0]).excludes(0.0) is False  # the differences would not do
    lead, second = found.sentences()
    assert lead == "fast is first to accuracy=0.8: after 182 s (geometric mean over 4 seeds)."
    assert second == "The seeds allow saying so: slow takes 1.1 times as long (95% interval 1.07 to 1.13)."


def test_what_the_seeds_do_not_allow_is_said() -> None:
    found = ranked(a=[100.0, 200.0, 300.0], b=[120.0, 180.0, 330.0])
    assert names(found)[0] == "a"
    assert not found.is_certain
    assert found.sentences()[1].startswith(
        "Cannot tell first from second with 3 seeds: b takes 1.06 times as long (95%"
    )
    one = ranked(a=[100.0], b=[200.0])
    assert one.sentences()[1] == "Cannot tell first from second with one seed: b takes 2 times as long."
    same = ranked(a=[100.0, 50.0], b=[100.0, 50.0])
    assert not same.is_certain


def test_settings_that_do_not_reach_it_in_all_seeds_come_behind() -> None:
    found = ranked(rare=[1.0, None, None], all=[500.0, 600.0, 700.0], none=[None] * 3, most=[900.0, 2.0, None])
    assert names(found) == ["all", "most", "rare", "none"]
    assert found.sentences()[1] == (
        "Cannot tell first from second with 3 seeds: most reached it in 2 of 3 seeds, "
        "and is known to be behind in 2 and ahead in 1 of them."
    )
    assert [standing.behind is None for standing in found.standings] == [False, True, True, True]


def test_six_seeds_that_all_say_the_same_are_enough_without_an_interval() -> None:
    for seeds, certain in ((5, False), (6, True)):
        assert ranked(a=[10.0] * seeds, b=[None] * seeds).is_certain is certain


def test_seeds_that_speak_for_the_second_do_not_make_the_first_certain() -> None:
    """The one that reaches the target in all seeds comes first, though another one is sooner in most of them."""
    found = ranked(sure=[100.0] * 10, quick=[None] + [10.0] * 9)
    assert names(found) == ["sure", "quick"]
    assert not found.is_certain
    assert found.sentences()[1].endswith("is known to be behind in 1 and ahead in 9 of them.")


def test_a_run_that_ended_too_early_says_nothing() -> None:
    found = rank_by_target("t", settings(50.0, a=[100.0] * 6, b=[None] * 6), TARGET, None)
    assert not found.is_certain
    assert found.note == "Runs were at their last round before the first setting was at the target: b."
    assert ranked(a=[100.0] * 6, b=[None] * 6).note == ""


def test_runs_that_another_target_ended_are_noted() -> None:
    found = rank_by_target("t", settings(1000.0, a=[1.0, None]), TARGET, Target("accuracy", 0.7))
    assert found.note.startswith("The runs ended when accuracy=0.7 was held")
    assert rank_by_target("t", settings(1000.0, a=[1.0, 2.0]), TARGET, Target("accuracy", 0.9)).note == ""


def test_nobody_at_the_target_is_said_with_the_best_that_was_seen() -> None:
    found = ranked(a=[None, None], b=[None, None])
    assert found.sentences() == ["No setting reached accuracy=0.8 in any seed; the best accuracy was 0.51 (a)."]
    assert found.to_json()["first"] is None
    assert not found.is_certain


@pytest.mark.parametrize(("direction", "first"), [("higher", "b"), ("lower", "a")])
def test_metrics_have_a_direction(direction: str, first: str) -> None:
    found = by_metric({"f1": direction}, a=[0.1, 0.5, 0.3], b=[0.2, 0.59, 0.41])
    assert found.first.name == first
    assert found.is_certain
    assert found.sentences()[1].startswith("The seeds allow saying so: ")
    assert "is worse by 0.1 (95% interval 0.0752 to 0.125)" in found.sentences()[1]
    assert by_metric({}, a=[3.0], b=[2.0]).first.name == "b"


def test_models_that_diverged_are_the_worst() -> None:
    found = by_metric({}, a=[math.nan, 0.1], b=[2.0, math.inf], c=[math.inf, 2.0], d=[3.0, 3.0])
    assert names(found) == ["d", "b", "c", "a"]
    assert not found.is_certain
    assert names(by_metric({}, b=[2.0, math.inf], c=[math.inf, 2.0])) == ["b", "c"]


def test_a_sweep_that_trained_nothing_has_no_best_setting() -> None:
    varied: list[dict[str, Any]] = [{"seed": 0}]
    with pytest.raises(SafaError, match="not every run of the sweep has a last accuracy"):
        rank_by_metric("t", by_setting(varied, [{"last_accuracy": None}]), {"accuracy": "higher"})


def test_a_time_of_zero_has_no_ratio() -> None:
    found = ranked(a=[0.0, 0.0], b=[1.0, 2.0])
    assert names(found) == ["a", "b"]
    assert found.standings[1].behind is None


def test_a_line_of_the_table_says_how_many_seeds_reached_it(capsys: pytest.CaptureFixture[str]) -> None:
    some = settings(1000.0, a=[None, 20.0], b=[10.0, 20.0], c=[20.0, 41.0])
    print_settings(some)
    _, a, b, c, *_ = capsys.readouterr().out.splitlines()
    assert "1 of 2 seeds" in a
    assert b.split()[-1] == "1"
    assert "2.02 (1.73 to 2.37)" in c
    print_settings(settings(1000.0, a=[None], b=[10.0]))
    assert "One seed, so there are no intervals." in capsys.readouterr().out


def test_the_command_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"sweep digits --fraction 0.3,0.5 --seed 0-1 --rounds 5 --workers 1 --quiet --out {tmp_path}"
    assert main(command.split()) == 0
    assert main(["best", str(tmp_path), "--target", "accuracy=0.2"]) == 0
    out = capsys.readouterr().out
    assert "is first to accuracy=0.2: after" in out
    assert "2 of 2" in out
    assert main(["best", str(tmp_path), "--target", "accuracy=0.2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["target"] == "accuracy=0.2"
    assert [standing["reached"] for standing in answer["settings"]] == [2, 2]
    assert main(["replay", str(tmp_path / "runs" / "0001")]) == 0
    assert "that of the run itself was not kept" in capsys.readouterr().out
    assert main(["best", str(tmp_path)]) == 0
    assert "has the best accuracy of the last model" in capsys.readouterr().out
    assert main(["best", str(tmp_path), "--target", "f1=0.2"]) == 2
    assert capsys.readouterr().err == "safa: there is no metric 'f1' to reach; there is loss, accuracy\n"
    assert main(["best", "nowhere"]) == 2


def test_settings_are_compared_on_seeds_that_they_share() -> None:
    def places(**seeds: list[int]) -> list[int]:
        return with_shared_seeds([{"protocol": name, "seed": seed} for name, of in seeds.items() for seed in of])

    assert places(safa=[0, 1], fedavg=[0, 1]) == [0, 1, 2, 3]
    assert places(safa=[0, 1, 2], fedavg=[0, 1, 2], fedcs=[0]) == [0, 1, 2, 3, 4, 5], "one that has only begun waits"
    assert places(safa=[0, 1, 2], fedavg=[1, 2, 3]) == [1, 2, 3, 4]
    assert places(safa=[0], fedavg=[1]) == [0]
