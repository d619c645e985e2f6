"""Numbers and formats as regular expressions, against the arithmetic and the parsers of Python."""

from __future__ import annotations

import datetime
import math
import random
import uuid
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.engine.pattern_strategies import walked

from agentflow.engine.grammar.dfa import build_dfa
from agentflow.engine.grammar.json_scalars import (
    MOST_FRACTION,
    MOST_INTEGER,
    MOST_NUMBER,
    integer,
    number,
    text_of_format,
)

dice = st.randoms(use_true_random=False)
wholes = st.integers(-30, 30) | st.integers(-(10**19), 10**19)
decimals = (
    st.decimals(-50, 50, places=2).map(float) | st.floats(-1e17, 1e17) | st.sampled_from([0.0, -0.0, 9.0])
)
limits = st.none() | st.integers(-20, 20) | decimals


@given(wholes, wholes, st.lists(wholes, max_size=8))
def test_integers_are_those_of_the_range(one: int, other: int, values: list[int]) -> None:
    least, most = min(one, other), max(one, other)
    regex = integer(least, most)
    assume(regex is not None)
    dfa = build_dfa(regex)
    near = [limit + step for limit in (least, most, 0, 10, -100) for step in range(-2, 3)]
    for value in [*values, *near]:
        is_inside = least <= value <= most and abs(value) <= MOST_INTEGER
        assert dfa.matches(str(value).encode()) == is_inside, value
    assert not any(dfa.matches(text) for text in (b"-0", b"01", b"", b"-", b"1.0", b"1e1"))


@given(limits, limits, limits, limits, st.lists(decimals, max_size=5), dice)
def test_numbers_are_those_of_the_range(
    least: float | None,
    most: float | None,
    above: float | None,
    below: float | None,
    values: list[float],
    dice: random.Random,
) -> None:
    def is_inside(value: float | Decimal) -> bool:
        is_low = (least is not None and value < least) or (above is not None and value <= above)
        is_high = (most is not None and value > most) or (below is not None and value >= below)
        return not is_low and not is_high and abs(value) < MOST_NUMBER

    regex = number(least, most, above=above, below=below)
    given_limits = [limit for limit in (least, most, above, below) if limit is not None]
    near = [Decimal(repr(limit)) + Decimal(step) / 1000 for limit in given_limits for step in range(-2, 3)]
    texts = [f"{value:f}" for value in near] + [f"{Decimal(repr(value)):f}" for value in values]
    # Close to large open limits, fewer digits are exact.
    are_small = all(abs(limit) < 1e9 for limit in (above, below) if limit is not None)
    if regex is None:
        short = [Decimal(text) for text in texts if len(text.partition(".")[2].rstrip("0")) <= 3]
        assert not are_small or not any(map(is_inside, short))
        return
    dfa = build_dfa(regex)
    for text in texts:
        is_short = are_small and len(text.partition(".")[2]) <= 3
        if dfa.matches(text.encode()):
            assert is_inside(float(text)), text
        elif is_short and text != "-0" and not text.startswith("-0.0"):
            assert not is_inside(float(text)), text
    for _ in range(5):
        text = walked(dfa, dice, max_bytes=25).decode()
        assert is_inside(float(text)), text
        assert len(text) < 40


@given(st.floats(0.1, 1e6), dice)
def test_a_number_near_an_open_limit_is_not_rounded_to_it(limit: float, dice: random.Random) -> None:
    regex = number(0, below=limit)
    assert regex is not None
    dfa = build_dfa(regex)
    exact = Decimal(repr(limit))
    for digits in range(1, MOST_FRACTION + 1):
        text = f"{exact - Decimal(1).scaleb(-digits):f}"
        assert not dfa.matches(text.encode()) or float(text) < limit


def test_an_impossible_range_has_no_number() -> None:
    assert integer(3, 2) is None
    assert integer(10**18, 10**19) is None
    assert number(1, 0) is None
    assert number(above=1, below=1) is None
    assert number(most=1e15, above=1e15) is None
    assert number(math.inf) is None
    assert number(most=math.nan) is None


KINDS: dict[str, Any] = {
    "date": datetime.date,
    "time": datetime.time,
    "date-time": datetime.datetime,
    "duration": datetime.timedelta,
    "uuid": uuid.UUID,
    "uuid4": uuid.UUID,
    "uuid7": uuid.UUID,
}


@pytest.mark.parametrize("name", KINDS)
@given(dice=dice)
def test_text_of_a_format_is_parsed_as_a_value(name: str, dice: random.Random) -> None:
    regex = text_of_format(name)
    assert regex is not None
    dfa = build_dfa(regex)
    for _ in range(5):
        value = msgspec.json.decode(walked(dfa, dice, max_bytes=60), type=KINDS[name])
        if name == "uuid4":
            assert (value.version, value.variant) == (4, uuid.RFC_4122)


@given(st.dates(datetime.date(1000, 1, 1)))
def test_every_day_from_the_year_1000_is_a_date(day: datetime.date) -> None:
    regex = text_of_format("date")
    assert regex is not None
    dfa = build_dfa(regex)
    assert dfa.matches(f'"{day.isoformat()}"'.encode())
    assert dfa.matches(b'"2000-02-29"')
    assert not any(dfa.matches(f'"{text}"'.encode()) for text in ("1900-02-29", "2023-02-29", "2023-04-31"))


@given(st.datetimes(datetime.datetime(1000, 1, 1), timezones=st.just(datetime.UTC)))
def test_every_moment_has_its_text(moment: datetime.datetime) -> None:
    dfas = {name: text_of_format(name) for name in ("date-time", "time")}
    for name, text in (("date-time", moment.isoformat()), ("time", moment.timetz().isoformat())):
        regex = dfas[name]
        assert regex is not None
        assert build_dfa(regex).matches(f'"{text}"'.encode()), text


def test_an_unknown_format_is_left_to_others() -> None:
    assert text_of_format("email") is None
