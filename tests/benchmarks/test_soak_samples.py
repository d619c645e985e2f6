"""The slopes, bounds and verdicts of a soak run's samples, and the picture of them."""

from __future__ import annotations

import statistics
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak.plot import plot, ticks
from benchmarks.soak.samples import (
    ENGINE_WARM_UP_S,
    FD_SLACK,
    MAX_MB_PER_HOUR,
    NOISE_MB,
    TASK_SLACK,
    Sample,
    growth,
    growth_checks,
    rest_checks,
    slope,
)

QUIET = Sample(0.0, 100.0, 500.0, 50.0, fds=9, threads=4, tasks=7, sessions=0, running=0, waiting=0, in_use=0)


def samples(*server_mb: float, every_s: float = 60.0) -> list[Sample]:
    return [replace(QUIET, at_s=index * every_s, server_mb=mb) for index, mb in enumerate(server_mb)]


def test_the_slope_of_a_line_is_its_own() -> None:
    assert slope([(0, 1.0), (1, 3.5), (4, 11.0)]) == 2.5


def test_a_slope_needs_two_places() -> None:
    assert slope([]) == slope([(3, 7.0)]) == slope([(3, 7.0), (3, 9.0)]) == 0.0


def test_outliers_do_not_bend_a_slope() -> None:
    points = [(float(at), 2.0 * at) for at in range(20)]
    for index in (3, 9, 15):
        points[index] = (points[index][0], 1e6)
    assert slope(points) == 2.0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(-1000, 1000)), max_size=12))
def test_the_slope_is_the_median_of_all_pairs(points: list[tuple[int, int]]) -> None:
    exact = [Fraction(y2 - y1, x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x1 != x2]
    expected = float(statistics.median(exact)) if exact else 0.0
    assert slope([(float(x), float(y)) for x, y in points]) == pytest.approx(expected)


def test_growth_counts_from_the_warm_up_on() -> None:
    grown = growth(samples(0.5, 90, 100, 101, 102, 103), "server", 120.0)
    assert grown.mb == pytest.approx(3.0)
    assert grown.mb_per_hour == pytest.approx(60.0)
    assert grown.allowed_mb == pytest.approx(NOISE_MB["server"] + MAX_MB_PER_HOUR * 180 / 3600)


def test_times_without_the_process_do_not_count() -> None:
    noted = samples(100, 0, 102, 0, 104)
    assert growth(noted, "server", 0.0).mb_per_hour == pytest.approx(60.0)
    assert growth([], "server", 0.0).mb == 0.0


@pytest.mark.parametrize(("excess_mb", "is_bounded"), [(-0.01, True), (0.01, False)])
def test_growth_is_bounded_up_to_the_bound(excess_mb: float, is_bounded: bool) -> None:
    num, every_s = 11, 60.0
    allowed = NOISE_MB["server"] + MAX_MB_PER_HOUR * (num - 1) * every_s / 3600
    step = (allowed + excess_mb) / (num - 1)
    assert growth(samples(*(100 + step * n for n in range(num))), "server", 0.0).is_bounded is is_bounded


def test_of_the_engine_only_the_last_process_counts_and_after_its_own_warm_up() -> None:
    killed_s = 300.0
    noted = [replace(QUIET, at_s=at, engine_mb=at if at < killed_s + ENGINE_WARM_UP_S else 700.0)
             for at in map(float, range(0, 600, 5))]  # fmt: skip
    checks = {check.name: check for check in growth_checks(noted, 10.0, killed_s)}
    assert [check.holds for check in checks.values()] == [True] * 3
    early = {check.name: check.holds for check in growth_checks(noted, 10.0, 0.0)}
    assert early == {
        "memory of the server": True,
        "memory of the compiler": True,
        "memory of the engine": False,
    }


def test_a_short_observation_is_not_judged() -> None:
    def engine(num: int) -> list[Sample]:
        return [replace(QUIET, at_s=5.0 * n, engine_mb=500.0 + 20 * n) for n in range(num)]

    judged = {num: growth_checks(engine(num), 0.0, -ENGINE_WARM_UP_S)[2] for num in (12, 13)}
    assert judged[12].holds
    assert "not judged" in judged[12].wanted
    assert not judged[13].holds


def test_all_given_back() -> None:
    after = replace(QUIET, at_s=600.0, fds=QUIET.fds + FD_SLACK, tasks=7 + TASK_SLACK)
    assert all(check.holds for check in rest_checks(QUIET, after))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"running": 1}, "running requests"),
        ({"waiting": 1}, "waiting requests"),
        ({"in_use": 1}, "slots in use"),
        ({"sessions": 1}, "sessions"),
        ({"sessions": None}, "sessions"),
        ({"fds": QUIET.fds + FD_SLACK + 1}, "file descriptors"),
        ({"tasks": 7 + TASK_SLACK + 1}, "tasks"),
        ({"tasks": None}, "tasks"),
    ],
)
def test_leftovers_are_named(change: dict[str, float | None], name: str) -> None:
    checks = rest_checks(QUIET, replace(QUIET, **change))  # type: ignore[arg-type]
    assert [check.name for check in checks if not check.holds] == [name]


@pytest.mark.parametrize(
    ("most", "expected"),
    [(700, list(range(0, 701, 100))), (9, [0, 2, 4, 6, 8, 10]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1.0])],
)
def test_ticks_are_round_and_reach_the_top(most: float, expected: list[float]) -> None:
    assert ticks(most) == pytest.approx(expected)


@given(st.floats(1e-6, 1e9))
def test_an_axis_has_a_few_ticks(most: float) -> None:
    marks = ticks(most)
    assert 4 <= len(marks) <= 10
    assert marks[0] == 0
    assert marks[-1] >= most * (1 - 1e-6)


def test_the_picture_shows_lines_gaps_and_kills() -> None:
    noted = [
        replace(sample, tasks=None if index == 2 else 7)
        for index, sample in enumerate(samples(*range(90, 96)))
    ]
    svg = ElementTree.fromstring(plot(noted, [120.0], "a <run>"))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in svg.iter(f"{space}text")]
    for wanted in (
        "a <run>",
        "server",
        "engine",
        "compiler",
        "file descriptors",
        "tasks",
        "threads",
        "seconds",
    ):
        assert wanted in texts
    assert texts.count("engine killed") == 2
    lines = [line.get("points", "").split() for line in svg.iter(f"{space}polyline")]
    assert sorted(map(len, lines)) == [2, 3, 6, 6, 6, 6, 6]  # tasks in two pieces
