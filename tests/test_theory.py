"""EUR and bias: the theory against itself, against every possible course of a small fleet, and against simulation."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from safa import Settings, run_rounds
from safa.analysis import Metrics
from safa.analysis import theory as t
from safa.analysis.contributions import contributions
from safa.errors import SafaError
from safa.fleet import Faults, Fleet
from safa.paper import printed_theory
from safa.paper.bias import BiasReport, Estimate, bias_figure, bias_report, describe, sample_chances, table
from safa.protocol import Safa
from safa.server import Server
from safa.simulation import paper_rounds

Case = t.Case
shares = st.floats(0, 1)
cases = st.sampled_from(Case)


# -- shares and cases --------------------------------------------------------------------------------------------------


def test_effective_update_ratios() -> None:
    assert t.eur_fedavg(0.5, 0.3) == pytest.approx(0.35)
    assert (t.eur_safa(0.5, 0.3), t.eur_safa(0.9, 0.3)) == (0.5, 0.7)


@given(shares, shares)
def test_selecting_after_training_is_never_worse(fraction: float, crash_rate: float) -> None:
    assert t.eur_safa(fraction, crash_rate) >= t.eur_fedavg(fraction, crash_rate) - 1e-12


@pytest.mark.parametrize(
    ("fraction", "crash_rate", "case", "appendix"),
    [
        (0.8, 0.3, Case.DEFICIT, Case.DEFICIT),
        (0.3, 0.7, Case.DEFICIT, Case.DEFICIT),  # on the boundary, although 1 - 0.7 > 0.3 in binary
        (0.5, 0.3, Case.MIXED, Case.MIXED),
        (0.5, 0.0, Case.MIXED, Case.MIXED),
        (0.35, 0.3, Case.PRIORITY, Case.MIXED),
        (0.1, 0.3, Case.PRIORITY, Case.PRIORITY),
    ],
)
def test_cases(fraction: float, crash_rate: float, case: Case, appendix: Case) -> None:
    assert (t.case_of(fraction, crash_rate), t.case_as_in_appendix(fraction, crash_rate)) == (case, appendix)


@given(shares, shares)
def test_the_appendix_differs_where_it_is_said_to(fraction: float, crash_rate: float) -> None:
    commit = 1 - crash_rate
    low, high = commit**2 / (2 - crash_rate), commit / (2 - crash_rate)
    if min(abs(fraction - edge) for edge in (low, high, commit)) > 1e-6:
        differs = t.case_of(fraction, crash_rate) != t.case_as_in_appendix(fraction, crash_rate)
        assert differs == (low < fraction < high)


@pytest.mark.parametrize(
    ("fraction", "crash_rate", "clients", "boundaries"),
    [
        (0.5, 0.3, 200, []),
        (0.5, 0.3, 20, ["1 and 2", "2 and 3"]),
        (0.7, 0.3, 200, ["1 and 2"]),
        (0.7, 0.3, 10_000, ["1 and 2"]),
        (0.41, 0.3, 1000, ["2 and 3"]),
        (0.5, 0.0, 200, ["2 and 3"]),
        (1.0, 0.01, 200, []),  # nobody is too many
    ],
)
def test_near_a_boundary_chance_may_decide(
    fraction: float, crash_rate: float, clients: int, boundaries: list[str]
) -> None:
    found = t.near_boundaries(fraction, crash_rate, clients)
    assert len(found) == len(boundaries)
    assert all(f"boundary of cases {name}" in sentence for name, sentence in zip(boundaries, found, strict=True))


def test_the_sentence_about_a_boundary() -> None:
    assert t.near_boundaries(0.7, 0.3, 200) == [
        "near the boundary of cases 1 and 2: 140.0 ± 6.5 clients commit for 140 places, "
        "so a round may be of the other case by chance"
    ]


# -- formulas ----------------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """cr = 1/2: P_D(r) = (1 - P_D(r-1)) / 2 and P_S(r) = (1/2 - P_D(r-1)) / 2; B starts a round later."""
    a = t.chances_by_recurrence(Case.PRIORITY, 0.5, 0.5, 4).a
    assert a.direct.tolist() == [0.5, 0.25, 0.375, 0.3125]
    assert a.bypass.tolist() == [0.0, 0.0, 0.125, 0.0625]
    b = t.chances_by_recurrence(Case.MIXED, 0.5, 0.5, 4).b
    assert b.direct.tolist() == [0.0, 0.5, 0.25, 0.375]
    assert b.bypass.tolist() == [0.0, 0.25, 0.0, 0.125]
    assert t.chances_by_recurrence(Case.MIXED, 0.5, 0.5, 4).bias.tolist() == [np.inf, 0.5 / 0.75, 2.0, 1.0]


@given(cases, shares, shares, st.integers(0, 60))
def test_the_closed_form_solves_the_recurrence(case: Case, crash_a: float, crash_b: float, rounds: int) -> None:
    one, other = (form(case, crash_a, crash_b, rounds) for form in (t.chances_by_recurrence, t.chances_in_closed_form))
    for client in ("a", "b"):
        for way in ("direct", "bypass", "total"):
            left, right = (getattr(getattr(pair, client), way) for pair in (one, other))
            assert left.shape == (rounds,)
            assert np.abs(left - right).max(initial=0) < 1e-12
            assert np.all((left > -1e-12) & (left < 1 + 1e-12))


@given(cases, st.floats(0, 0.99), st.floats(0.01, 0.99))
def test_in_the_long_run_who_takes_turns_loses_what_is_overwritten(case: Case, crash_a: float, crash_b: float) -> None:
    """An update is lost if it was undrafted and its client is picked next: in the long run (1-cr)^3 / (2-cr)."""
    pair = t.chances_in_closed_form(case, crash_a, crash_b, 3000)
    lost_a, lost_b = ((1 - crash) ** 3 / (2 - crash) for crash in (crash_a, crash_b))
    if case != Case.PRIORITY or crash_a > 0.01:
        assert pair.a.total[-1] == pytest.approx(1 - crash_a - (lost_a if case == Case.PRIORITY else 0))
    assert pair.b.total[-1] == pytest.approx(1 - crash_b - (lost_b if case == Case.MIXED else 0))


@given(st.floats(0, 0.99), st.integers(1, 60))
def test_what_is_printed_is_no_probability(crash: float, turn: int) -> None:
    turns = np.array([turn])
    right = t.chances_by_recurrence(Case.PRIORITY, crash, crash, turn).a.direct[-1:]
    assert printed_theory.direct(crash, turns) == pytest.approx(-right, abs=1e-12)
    assert printed_theory.sigma(crash, turns) == pytest.approx(1 + right, abs=1e-12)


def test_the_printed_sigma_at_a_crash_rate_of_three_tenths() -> None:
    assert printed_theory.sigma(0.3, np.array([200]))[0] == pytest.approx(2.4 / 1.7)  # 1.41
    assert printed_theory.improper(0.3, 5) == {"P_D": [2, 3, 4, 5], "sigma": [2, 3, 4, 5], "P": [2, 3, 4, 5]}
    assert printed_theory.improper(0.5, 5)["P"] == [2, 4, 5]  # exactly 1 in round 3
    assert printed_theory.improper(0.8, 5)["P"] == []
    assert printed_theory.improper(1.0, 5) == {"P_D": [], "sigma": [], "P": []}


@given(st.floats(0.01, 0.99))
def test_the_wrong_sign_turns_the_conclusions_round(crash: float) -> None:
    """With equal crash rates and in the long run: as printed, SAFA favours B in case 2 and A in case 3."""
    for case in (Case.MIXED, Case.PRIORITY):
        right, printed = (form(case, crash, crash, 3000) for form in (t.chances_by_recurrence, printed_theory.chances))
        low, high = sorted([right.bias[-1], printed.bias[-1]])
        assert low < t.bias_fedavg(crash, crash) == 1 < high
        assert (high == right.bias[-1]) == (case == Case.MIXED)


def test_fedavg() -> None:
    assert t.bias_fedavg(0.2, 0.5) == pytest.approx(1.6)
    assert t.chances_fedavg(0.5, 0.2, 0.5, 3).bias == pytest.approx([1.6] * 3)
    assert (t.bias_fedavg(0.2, 1.0), t.bias_fedavg(1.0, 0.5)) == (np.inf, 0.0)
    assert np.isnan(t.bias_fedavg(1.0, 1.0))


# -- contributions, against Algorithm 1 written out --------------------------------------------------------------------


class Scripted(Faults):
    """Crashes by a table: round, client."""

    def __init__(self, crashes: NDArray[np.bool_]) -> None:
        super().__init__(crashes.shape[1], seed=0, crash_rate=0.0, model="round")
        self.crashes = crashes

    def draw(self, round_number: int, ordinal: int = 0) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        return self.crashes[round_number - 1], np.zeros(self.crashes.shape[1])


def scripted_fleet(crashes: NDArray[np.bool_]) -> Fleet:
    count = crashes.shape[1]
    return Fleet.assemble(
        speeds=np.arange(count, 0, -1.0),
        sizes=np.ones(count),
        epochs=1,
        batch_size=1,
        down_mbps=1.0,
        up_mbps=1.0,
        server_mbps=1.0,
        model_size_mb=0.0,
        faults=Scripted(crashes),
    )


def literal(crashes: NDArray[np.bool_], quota: int) -> tuple[list[set[int]], list[set[int]]]:
    """Algorithm 1 and Eq. 6 to 8 with sets: who contributes directly, who through the bypass, round by round."""
    direct: list[set[int]] = []
    bypass: list[set[int]] = []
    picked: set[int] = set()
    undrafted: set[int] = set()
    for row in crashes:
        commits = [client for client, crashed in enumerate(row) if not crashed]  # fastest first
        ranked = [c for c in commits if c not in picked] + [c for c in commits if c in picked]
        picked = set(ranked[:quota])
        direct.append(picked)
        bypass.append(undrafted - picked)
        undrafted = set(ranked[quota:])
    return direct, bypass


@given(st.data())
def test_contributions_are_those_of_the_algorithm(data: st.DataObject) -> None:
    count, rounds = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    quota = data.draw(st.integers(1, count))
    bits = data.draw(st.lists(st.booleans(), min_size=count * rounds, max_size=count * rounds))
    crashes = np.reshape(bits, (rounds, count))
    protocol = Safa(np.ones(count), fraction=quota / count, lag_tolerance=2)
    records = list(paper_rounds(Server(protocol, seed=0, rounds=rounds), scripted_fleet(crashes)))
    found = contributions(records, np.arange(count))
    direct, bypass = literal(crashes, quota)
    assert [set(np.flatnonzero(row)) for row in found.direct] == direct
    assert [set(np.flatnonzero(row)) for row in found.bypass] == bypass
    metrics = Metrics()
    for record in records:
        metrics.add(record)
    assert (found.direct + 0 + found.bypass).sum(axis=0).tolist() == metrics.merged.tolist()


def test_contributions_of_no_round_are_empty() -> None:
    assert contributions([], [3, 4]).direct.shape == contributions([], [3, 4]).bypass.shape == (0, 2)


def test_protocols_that_merge_at_other_times_are_refused() -> None:
    records = run_rounds(Settings.of("boston", protocol="fedasync", rounds=2))
    with pytest.raises(SafaError, match="one version a round"):
        contributions(records, [0])


# -- exactly -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("quota", "case"), [(9, Case.DEFICIT), (6, Case.MIXED), (3, Case.PRIORITY)])
def test_the_theory_is_exact_where_the_case_is_certain(quota: int, case: Case) -> None:
    """Nine clients, of which only A and B crash: all 256 courses of four rounds, each with its probability."""
    crash_a, crash_b, rounds = 0.3, 0.45, 4
    direct, bypass = np.zeros((rounds, 2)), np.zeros((rounds, 2))
    for course in itertools.product([False, True], repeat=2 * rounds):
        own = np.reshape(course, (rounds, 2))
        probability = np.where(own, [crash_a, crash_b], [1 - crash_a, 1 - crash_b]).prod()
        crashes = np.zeros((rounds, 9), dtype=np.bool_)
        crashes[:, [0, 8]] = own
        server = Server(Safa(np.ones(9), fraction=quota / 9), seed=0, rounds=rounds)
        found = contributions(paper_rounds(server, scripted_fleet(crashes)), [0, 8])
        direct += probability * found.direct
        bypass += probability * found.bypass
    right = t.chances_by_recurrence(case, crash_a, crash_b, rounds)
    for place, client in enumerate((right.a, right.b)):
        assert direct[:, place] == pytest.approx(client.direct, abs=1e-12)
        assert bypass[:, place] == pytest.approx(client.bypass, abs=1e-12)


# -- by simulation -----------------------------------------------------------------------------------------------------

SETTINGS = [
    (crash_a, crash_b, fraction, 0.3) for fraction in (0.8, 0.5, 0.1) for crash_a, crash_b in ((0.3, 0.3), (0.2, 0.5))
]
ROUNDS = 8


@cache
def report(*setting: float) -> BiasReport:
    return bias_report(*setting, rounds=ROUNDS, repetitions=150, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_theory_and_simulation_agree(setting: tuple[float, ...]) -> None:
    """Per setting four checks at three standard errors: P(A), P(B), bias pooled over rounds, and all rounds jointly."""
    found = report(*setting)
    assert not found.boundaries
    assert found.agrees, describe(found)
    assert found.joint[2] > 0.005
    fedavg = Estimate.of_ratio(*found.fedavg_sample.total.mean(axis=2))
    assert abs(fedavg.value - t.bias_fedavg(*setting[:2])) < 3 * fedavg.error
    assert found.safa_sample.eur == pytest.approx(found.eur_safa, abs=0.01)


@pytest.mark.slow
def test_hardly_any_single_value_is_off() -> None:
    """6 settings x 7 rounds x 3 values: 126 comparisons; about 0.3 are expected beyond three standard errors."""
    deviations = np.abs(np.stack([report(*setting).deviations[:, 1:] for setting in SETTINGS]))
    assert deviations.size == 126
    assert np.count_nonzero(deviations > 3) <= 2
    assert deviations.max() < 4


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS[2:])
def test_the_simulation_rejects_what_is_printed(setting: tuple[float, ...]) -> None:
    found = report(*setting)
    assert not replace(found, recurrence=found.as_printed).agrees
    assert replace(found, recurrence=found.as_printed).joint[2] < 1e-9


@pytest.mark.slow
def test_the_simulation_rejects_the_start_of_the_papers_recurrence() -> None:
    """P_D(B) = 1 - cr in round 1 of case 2 shifts everything by a round."""
    found = report(*SETTINGS[2])
    assert found.case == Case.MIXED
    early = t.Pair(found.recurrence.a, t.chances_by_recurrence(Case.PRIORITY, 0.3, 0.3, ROUNDS).a)
    assert replace(found, recurrence=early).joint[2] < 1e-9


@pytest.mark.slow
def test_where_text_and_appendix_differ_the_text_is_right() -> None:
    found = bias_report(0.3, 0.3, 0.35, 0.3, rounds=6, clients=600, repetitions=100)
    assert (found.case, found.case_as_in_appendix, found.boundaries) == (Case.PRIORITY, Case.MIXED, ())
    assert found.agrees
    other = t.chances_by_recurrence(found.case_as_in_appendix, 0.3, 0.3, 6)
    assert replace(found, recurrence=other).joint[2] < 1e-9


def test_the_same_seed_gives_the_same_sample() -> None:
    one, again, other = (
        sample_chances("safa", 0.3, 0.3, 0.5, 0.3, rounds=3, clients=20, repetitions=5, seed=seed) for seed in (7, 7, 8)
    )
    assert np.array_equal(one.total, again.total)
    assert not np.array_equal(one.total, other.total)


def test_the_error_of_a_ratio_is_that_of_repeated_samples() -> None:
    """The delta method, against the spread of the ratio over 4000 samples of 400, with A and B dependent."""
    draws = np.random.default_rng(1).random((400, 4000))
    above, below = (draws < 0.5).astype(np.float64), (draws > 0.2).astype(np.float64)
    estimate = Estimate.of_ratio(above, below)
    assert estimate.error.mean() == pytest.approx(estimate.value.std(), rel=0.05)


# -- the report --------------------------------------------------------------------------------------------------------


@cache
def small() -> BiasReport:
    return bias_report(0.2, 0.0, 0.5, 0.3, rounds=3, clients=20, repetitions=100)


def test_a_report_is_written_in_sentences() -> None:
    lines = describe(small())
    assert lines[0] == "case 2 of SAFA"
    assert lines[1].startswith("EUR of SAFA 0.500 (measured ")
    assert any("near the boundary of cases 2 and 3" in line for line in lines)
    assert lines[-1] == "as printed, no probability: P_D in round 3; sigma in round 2; P in round 2"
    text = "\n".join(describe(replace(small(), case_as_in_appendix=Case.PRIORITY)))
    assert "by the appendix's condition case 3, which is not Algorithm 1" in text


def test_a_report_is_a_table() -> None:
    headings, rows = table(small())
    assert headings == ["round", "P(A)", "measured", "P(B)", "printed", "measured", "bias", "printed", "measured"]
    assert [row[0] for row in rows] == ["2", "3"]
    assert rows[1][1] == "0.800"
    assert rows[1][6] == "inf"  # B, which never crashes, is picked in every other round only
    first = small().to_rows()[0]
    assert (first["round"], first["p_a"], first["p_b"], first["bias"]) == (1, 0.8, 0.0, np.inf)


@pytest.mark.parametrize("several", [False, True])
def test_a_report_is_a_figure(several: bool) -> None:
    drawn = bias_figure([small(), replace(small(), case=Case.PRIORITY)] if several else small()).to_dict()
    (rows,) = drawn["datasets"].values()
    names = {"FedAvg", "SAFA, case 2 (C = 0.5)"} | ({"SAFA, case 3 (C = 0.5)"} if several else set())
    assert {row["who"] for row in rows} == names
    assert all(np.isfinite(row["bias"]) for row in rows)


def test_without_a_figure_no_altair_is_loaded() -> None:
    code = "import sys, safa.paper.bias; print(sorted({'torch', 'altair'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"crash_a": 1.0}, "crash_a must be at least 0 and below 1, not 1.0"),
        ({"crash_b": -0.1}, "crash_b must be at least 0 and below 1, not -0.1"),
        ({"crash_rate": 2}, "crash_rate must be at least 0 and below 1, not 2"),
        ({"fraction": 1.5}, "fraction must be from 0 to 1, not 1.5"),
        ({"fraction": 0.0}, "fraction must be above 0 and at most 1, not 0.0"),
        ({"rounds": 1}, "rounds must be at least 2, not 1"),
        ({"clients": 2}, "clients must be at least 3, not 2"),
        ({"rounds": 20, "repetitions": 100}, "repetitions must be at least 200, not 100"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, float], complaint: str) -> None:
    with pytest.raises(SafaError, match=complaint):
        bias_report(**{"crash_a": 0.3, "crash_b": 0.3, "fraction": 0.5, "crash_rate": 0.3} | values)  # type: ignore[arg-type]


def test_a_share_is_from_0_to_1() -> None:
    with pytest.raises(SafaError, match=r"crash_b must be from 0 to 1, not 1\.5"):
        t.chances_by_recurrence(Case.MIXED, 0.5, 1.5, 3)
    with pytest.raises(SafaError, match="crash_a must be from 0 to 1, not nan"):
        t.bias_fedavg(float("nan"), 0.5)
