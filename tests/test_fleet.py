"""The world: draws, files, faults, links."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from safa.errors import SafaError
from safa.fleet import Faults, Fleet, draw_sizes, draw_speeds, make_fleet, read_column, read_links, read_trace
from safa.fleet.availability import Availability, daily_times
from safa.runs.settings import Settings
from safa.streams import stream, uniform_at


@pytest.mark.parametrize("distribution", ["exponential", "normal", "lognormal", "constant"])
def test_speeds_have_the_mean_and_respect_the_floor(distribution: str) -> None:
    speeds = draw_speeds(20_000, seed=1, distribution=distribution, mean=2.0, spread=0.3, floor=0.01)
    assert speeds.min() >= 0.01
    assert speeds.mean() == pytest.approx(2.0, rel=0.03)


def test_exponential_speeds_above_a_floor_are_memoryless() -> None:
    """Redrawing what is below the floor is the same as shifting the distribution by the floor."""
    speeds = draw_speeds(50_000, seed=0, floor=0.5)
    assert (speeds - 0.5).mean() == pytest.approx(1.0, rel=0.02)
    assert np.median(speeds - 0.5) == pytest.approx(np.log(2), rel=0.03)


@pytest.mark.parametrize("distribution", ["normal", "exponential", "equal"])
def test_sizes_sum_to_the_data_set(distribution: str) -> None:
    sizes = draw_sizes(100, seed=1, distribution=distribution, mean=700.0, floor=40)
    assert sizes.sum() == 70_000
    assert sizes.min() > 30
    assert (sizes.std() == 0) == (distribution == "equal")


def test_a_client_keeps_its_speed_in_a_larger_fleet() -> None:
    few, many = (draw_speeds(count, seed=5, floor=0.2) for count in (10, 1000))
    assert np.array_equal(few, many[:10])


OTHERS = ((1, "a"), (0, "b"))


def test_numbers_at_a_place_are_uniform_and_unrelated() -> None:
    """Neither along the clients nor along their counts, nor between purposes and seeds."""
    client, count = (grid.ravel() for grid in np.meshgrid(np.arange(300), np.arange(300), indexing="ij"))
    drawn = uniform_at(0, "a", client, count).reshape(300, 300)
    assert np.bincount((drawn.ravel() * 10).astype(int)) == pytest.approx(np.full(10, 9000), rel=0.05)
    assert drawn.mean(axis=0).std() == pytest.approx(np.sqrt(1 / 12 / 300), rel=0.2)
    assert drawn.mean(axis=1).std() == pytest.approx(np.sqrt(1 / 12 / 300), rel=0.2)
    others = [drawn[1:, :], drawn[:, 1:], *(uniform_at(*key, client, count).reshape(300, 300) for key in OTHERS)]
    for other in others:
        same = drawn[: other.shape[0], : other.shape[1]]
        assert abs(np.corrcoef(same.ravel(), other.ravel())[0, 1]) < 0.015


def test_streams_differ_by_purpose_and_key() -> None:
    draws = {
        tuple(stream(*key).random(3))  # type: ignore[arg-type]
        for key in [(0, "a"), (0, "b"), (1, "a"), (0, "a", 1), (0, "a", 2)]
    }
    assert len(draws) == 5
    assert np.array_equal(stream(0, "a", 1).random(3), stream(0, "a", 1).random(3))


def test_unknown_distributions_and_unreachable_floors_are_refused() -> None:
    with pytest.raises(SafaError, match="speed_distribution must be one of exponential, normal, lognormal, constant"):
        draw_speeds(5, seed=0, distribution="uniform", floor=0.1)
    with pytest.raises(SafaError, match="hardly ever reaches the floor of 5"):
        draw_speeds(5, seed=0, distribution="constant", floor=5)


def test_the_mean_shard_stays_when_the_fleet_grows() -> None:
    small, large = (make_fleet(Settings.of("mnist", clients=count)) for count in (100, 5000))
    assert small.sizes.mean() == large.sizes.mean() == 700


def test_time_of_an_attempt_is_as_in_the_paper() -> None:
    """1.4 Mbit/s and 10 MB: 57.14 s each way; 10 Gbit/s: 8 ms a copy; Eq. 18 in between."""
    fleet = make_fleet(Settings.of("mnist"))
    assert fleet.down_s[0] == fleet.up_s[0] == pytest.approx(57.142857)
    assert fleet.copy_s == pytest.approx(0.008)
    assert fleet.train_s[7] == fleet.sizes[7] / 40 * 5 / fleet.speeds[7]
    assert fleet.turnaround_s[7] == pytest.approx(fleet.train_s[7] + 114.285714)
    assert len(fleet) == 100


def test_steps_take_every_client_as_many_mini_batches() -> None:
    fleet = make_fleet(Settings.of("mnist", local_steps=30))
    assert np.array_equal(fleet.train_s, 30 / fleet.speeds)
    assert np.array_equal(fleet.sizes, make_fleet(Settings.of("mnist")).sizes)


def test_bandwidths_must_be_positive() -> None:
    with pytest.raises(SafaError, match="down_mbps, up_mbps"):
        Fleet.assemble(
            speeds=np.ones(1),
            sizes=np.ones(1),
            epochs=1,
            batch_size=1,
            down_mbps=0.0,
            up_mbps=1.0,
            server_mbps=1.0,
            model_size_mb=1.0,
            faults=Faults(1, seed=0, crash_rate=0.0),
        )


# -- faults ----------------------------------------------------------------------------------------------------------


def crash_times(faults: Faults, clients: list[int], *, begin_s: float = 0.0, left_s: float = 10.0) -> list[float]:
    count = len(clients)
    cut_s = faults.crash_times(
        np.array(clients),
        np.full(count, begin_s),
        np.full(count, left_s),
        round_number=1,
        ordinal=np.zeros(count, dtype=np.int64),
    )
    return [float(value) for value in cut_s]


def test_as_many_stretches_crash_as_the_crash_rate_says() -> None:
    faults = Faults(20_000, seed=3, crash_rate=0.3)
    cut_s = np.array(crash_times(faults, list(range(20_000))))
    crashed = np.isfinite(cut_s)
    assert crashed.mean() == pytest.approx(0.3, abs=0.01)
    assert cut_s[crashed].mean() == pytest.approx(5.0, abs=0.1)


def test_a_client_meets_its_own_fate_whoever_else_is_asked_about() -> None:
    faults = Faults(50, seed=3, crash_rate=0.5)
    assert crash_times(faults, [7, 3]) == [crash_times(faults, [7])[0], crash_times(faults, [3])[0]]


def test_a_trace_cuts_work_when_the_client_goes_offline() -> None:
    trace = np.array([[0, 0, 5], [0, 8, 30], [2, 4, 9]], dtype=float)
    faults = Faults(3, seed=0, crash_rate=0.0, trace=trace)
    assert crash_times(faults, [0, 1, 2]) == [5.0, 0.0, 0.0]
    assert crash_times(faults, [0, 1, 2], begin_s=4.0) == [5.0, 4.0, 9.0]
    assert crash_times(faults, [0], begin_s=9.0) == [np.inf]
    assert crash_times(faults, [0], begin_s=99.0) == [99.0]  # after the trace, nobody is online


def stretch(faults: Faults, client: int, begin_s: float, left_s: float, number: int = 0) -> tuple[float, float]:
    """When a stretch is cut short, and when its client is back."""
    cut_s, back_s = faults.stretch(np.array([client]), np.array([begin_s]), np.array([left_s]), np.array([number]))
    return float(cut_s[0]), float(back_s[0])


def test_a_client_that_crashed_is_back_after_an_exponential_delay() -> None:
    faults = Faults(20_000, seed=3, crash_rate=0.3, return_delay_s=100.0)
    everybody = np.arange(20_000)
    for number in (0, 1, 7):
        nth = np.full(20_000, number, dtype=np.int32)
        cut_s, back_s = faults.stretch(everybody, np.zeros(20_000), np.full(20_000, 10.0), nth)
        crashed = np.isfinite(cut_s)
        delay_s = back_s[crashed] - cut_s[crashed]
        assert crashed.mean() == pytest.approx(0.3, abs=0.01)
        assert cut_s[crashed].mean() == pytest.approx(5.0, abs=0.1)
        assert delay_s.mean() == pytest.approx(100.0, rel=0.04)
        assert (delay_s > 100.0).mean() == pytest.approx(np.exp(-1), abs=0.02)
        assert np.isinf(back_s[~crashed]).all()


def test_what_a_stretch_meets_depends_on_the_client_and_its_number_alone() -> None:
    small, large = (Faults(count, seed=3, crash_rate=0.5, return_delay_s=9.0) for count in (10, 5000))
    clients, numbers = np.array([7, 3, 3]), np.array([2, 2, 900], dtype=np.int32)
    for one, other in zip(small.lots(clients, numbers), large.lots(clients, numbers), strict=True):
        assert np.array_equal(one, other)
    for place in range(3):
        alone = large.lots(clients[[place]], numbers[[place]])
        assert [float(lot[0]) for lot in alone] == [float(lot[place]) for lot in large.lots(clients, numbers)]


def test_who_goes_offline_is_back_when_it_is_online_again() -> None:
    trace = np.array([[0, 0, 50], [0, 80, 300], [2, 40, 90]], dtype=float)
    faults = Faults(3, seed=0, crash_rate=0.0, trace=trace, return_delay_s=1e9)
    assert stretch(faults, 0, 10.0, 100.0) == (50.0, 80.0)
    assert stretch(faults, 0, 10.0, 40.0) == (np.inf, np.inf)  # it is done when it goes
    assert stretch(faults, 0, 290.0, 100.0) == (300.0, np.inf)  # and is never back
    assert faults.online_s(np.array([0, 1, 2]), np.array([60.0, 0.0, 60.0])).tolist() == [80.0, np.inf, 60.0]
    again = Faults(3, seed=0, crash_rate=0.0, trace=trace, period_s=np.full(3, 300.0), return_delay_s=1e9)
    assert stretch(again, 0, 290.0, 100.0) == (350.0, 380.0)  # online from the end of a period into the next
    assert stretch(again, 2, 40.0, 100.0) == (90.0, 340.0)


def test_who_crashes_is_back_at_a_time_online_after_the_delay() -> None:
    trace = np.array([[0, 0, 50], [0, 5000, 6000]], dtype=float)
    faults = Faults(1, seed=1, crash_rate=0.999, trace=trace, return_delay_s=100.0)
    (_, _, delay_s) = faults.lots(np.array([0]), np.array([0], dtype=np.int32))
    cut_s, back_s = stretch(faults, 0, 0.0, 40.0)
    assert cut_s < 40.0
    assert cut_s + delay_s[0] > 50.0
    assert back_s == 5000.0


def test_clients_are_online_for_their_hours_most_of_them_at_night() -> None:
    times, period_s = daily_times(10_000, seed=1, hours=8.0)
    online = Availability(times, period_s)
    everybody = np.arange(10_000)
    hours = np.bincount(times[:, 0].astype(np.int64), weights=times[:, 2] - times[:, 1]) / 3600
    assert np.allclose(hours, 8.0)
    day = [np.mean(online.online(everybody, np.full(10_000, at))[0] == at) for at in np.arange(8) * 10_800.0]
    assert day == pytest.approx([*day[:5], *day[3:0:-1]], abs=0.03)  # the same before and after noon
    assert day[0] / day[4] == pytest.approx(4.0, rel=0.1)
    for at in (0.0, 43_200.0, 90_000.0):
        from_s, until_s = online.online(everybody, np.full(10_000, at))
        assert (from_s <= at + 16 * 3600 + 1e-3).all()
        assert (until_s - from_s <= 8 * 3600 + 1e-3).all()
        assert np.allclose((until_s - from_s)[from_s > at], 8 * 3600)


def test_return_delays_need_stretches_that_may_succeed() -> None:
    for wrong in ({"crash_rate": 1.0}, {"crash_rate": 0.5, "model": "round"}):
        with pytest.raises(SafaError, match="return_delay_s needs fault_model = attempt, and a crash_rate below 1"):
            Faults(1, seed=0, return_delay_s=9.0, **wrong)


@pytest.mark.parametrize(("crash_rate", "model"), [(-0.1, "round"), (1.1, "round"), (0.5, "sometimes")])
def test_wrong_faults_are_refused(crash_rate: float, model: str) -> None:
    with pytest.raises(SafaError, match="must be"):
        Faults(1, seed=0, crash_rate=crash_rate, model=model)


def test_each_client_may_have_a_crash_rate_of_its_own() -> None:
    rates = np.repeat([0.0, 0.2, 0.7, 1.0], 5000)
    crashed, _ = Faults(20_000, seed=3, crash_rate=rates).draw(1)
    assert crashed.reshape(4, -1).mean(axis=1) == pytest.approx([0, 0.2, 0.7, 1], abs=0.02)


def test_one_crash_rate_for_all_is_the_same_as_one_for_each() -> None:
    for_all, for_each = (Faults(50, seed=3, crash_rate=rate).draw(2) for rate in (0.4, [0.4] * 50))
    assert np.array_equal(for_all, for_each)


@pytest.mark.parametrize(
    ("crash_rate", "complaint"),
    [
        ([0.1, 0.2], "crash_rate must be one number, or one for each of 3 clients, not an array of shape"),
        ([[0.1, 0.2, 0.3]], "crash_rate must be one number, or one for each of 3 clients, not an array of shape"),
        ([0.1, 1.5, 0.3], "crash_rate must be from 0 to 1, not 1.5"),
        ([0.1, 0.2, float("nan")], "crash_rate must be from 0 to 1, not nan"),
    ],
)
def test_wrong_crash_rates_say_what_is_wrong(crash_rate: list[float], complaint: str) -> None:
    with pytest.raises(SafaError, match=complaint):
        Faults(3, seed=0, crash_rate=crash_rate)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "world.csv"


def test_a_column_skips_comments_and_empty_lines(file: Path) -> None:
    file.write_text("# speeds\n1.5\n\n  2\n3e-1\n")
    assert read_column(file, count=3, what="speeds").tolist() == [1.5, 2.0, 0.3]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds speeds for 0 clients, but there are 3"),
        ("1\n2\n", "holds speeds for 2 clients, but there are 3"),
        ("1\n2\nfast\n", "line 3: speeds must be a number, not 'fast'"),
        ("1\n-2\n3\n", "line 2: speeds must be above 0, not -2"),
        ("1\n0\n3\n", "line 2: speeds must be above 0, not 0"),
        ("1\nnan\n3\n", "line 2: speeds must be a number, not 'nan'"),
        ("inf\n2\n3\n", "line 1: speeds must be a number, not 'inf'"),
    ],
)
def test_a_wrong_column_says_where(file: Path, text: str, complaint: str) -> None:
    file.write_text(text)
    with pytest.raises(SafaError, match=complaint):
        read_column(file, count=3, what="speeds")


def test_files_that_cannot_be_read_say_why(file: Path) -> None:
    with pytest.raises(SafaError, match=r"cannot read .*world\.csv: No such file"):
        read_column(file, count=3, what="speeds")
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SafaError, match="it is not text"):
        read_column(file, count=3, what="speeds")


def test_links_come_in_two_columns(file: Path) -> None:
    file.write_text("down_mbps,up_mbps\n10,1\n20,2\n")
    down, up = read_links(file, count=2)
    assert (down.tolist(), up.tolist()) == ([10, 20], [1, 2])
    fleet = make_fleet(Settings.of("boston", clients=2, links=str(file)))
    assert fleet.down_s.tolist() == [8.0, 4.0]
    assert fleet.up_s.tolist() == [80.0, 40.0]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "first line must be 'down_mbps,up_mbps'"),
        ("up,down\n1,1\n", "first line must be"),
        ("down_mbps,up_mbps\n1\n", "line 2: needs down_mbps,up_mbps, not '1'"),
        ("down_mbps,up_mbps\n1,0\n", "line 2: up_mbps must be above 0"),
        ("down_mbps,up_mbps\n1,1\n", "holds links for 1 clients, but there are 2"),
        ("down_mbps,up_mbps\n", "holds links for 0 clients, but there are 2"),
        ("down_mbps,up_mbps\n1,inf\n", "line 2: up_mbps must be a number, not 'inf'"),
        (f"down_mbps,up_mbps\n1,{'1' * 200_000}\n", "line 2: field larger than field limit"),
    ],
)
def test_wrong_links_say_where(file: Path, text: str, complaint: str) -> None:
    file.write_text(text)
    with pytest.raises(SafaError, match=complaint):
        read_links(file, count=2)


HEADER = "client,online_from_s,online_until_s\n"


def test_a_trace_is_sorted_by_client_and_time(file: Path) -> None:
    file.write_text(HEADER + "1,50,60\n0,0,10\n1,0,5\n")
    assert read_trace(file, count=2).tolist() == [[0, 0, 10], [1, 0, 5], [1, 50, 60]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("2,0,1\n", "line 2: client must be a number from 0 to 1, not '2'"),
        ("0.5,0,1\n", "line 2: client must be"),
        ("x,0,1\n", "line 2: client must be a number, not 'x'"),
        ("0,5,5\n", "line 2: a time online must"),
        ("0,-1,5\n", "line 2: a time online must"),
        ("0,0,10\n1,0,10\n0,9,12\n", "line 4: this client is online already"),
        ("", "names no time at which a client is online"),
        ("# nobody\n\n", "names no time at which a client is online"),
        ("0,9,5\n", "line 2: a time online must"),
        ("0,nan,5\n", "line 2: online_from_s must be a number, not 'nan'"),
        ("0,0,inf\n", "line 2: online_until_s must be a number, not 'inf'"),
        ("-1,0,5\n", "line 2: client must be a number from 0 to 1, not '-1'"),
    ],
)
def test_a_wrong_trace_says_where(file: Path, text: str, complaint: str) -> None:
    file.write_text(HEADER + text)
    with pytest.raises(SafaError, match=complaint):
        read_trace(file, count=2)
