"""The limits that providers report are kept: by simulated providers that count exactly."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.apis.rate_vendor import Counting, Job, Limit, Vendor, simulate

from agentflow.backends.apis.http.rate_limits import Demand, RateLimits, read_headers, reset_s
from agentflow.protocol.events import Usage

STYLES: list[Literal["go", "seconds", "rfc"]] = ["go", "seconds", "rfc"]


def latency(rng: random.Random) -> float:
    return rng.choice([0.0, 1.0, rng.uniform(0, 3)])


@pytest.mark.parametrize("seed", range(60))
def test_requests_are_never_refused_in_whatever_order_they_and_their_answers_arrive(seed: int) -> None:
    rng = random.Random(seed)
    jobs = [
        Job(up_s=latency(rng), down_s=latency(rng), lasts_s=latency(rng)) for _ in range(rng.randint(1, 40))
    ]
    limit, per_s = rng.randint(1, 30), rng.choice([60.0, 3600.0])
    found = simulate(Vendor(Limit(limit, per_s), style=STYLES[seed % 3]), jobs, is_checked=True)
    assert found.num_refused == 0
    assert found.lowest_margin > -1e-6  # the client never counts on more than the vendor has
    best_s = max(0.0, len(jobs) - limit) * per_s / limit
    assert found.took_s <= 1.1 * best_s + 2 * per_s / limit + 20


@pytest.mark.parametrize("seed", range(30))
def test_prompts_are_never_refused(seed: int) -> None:
    rng = random.Random(seed)
    limit = rng.randint(100, 3000)
    jobs = [
        Job(prompt=rng.randint(1, limit), up_s=latency(rng), down_s=latency(rng), lasts_s=latency(rng))
        for _ in range(rng.randint(1, 40))
    ]
    vendor = Vendor(Limit(1000), Limit(limit), style=STYLES[seed % 3])
    assert simulate(vendor, jobs).num_refused == 0


def load(count: int, *, max_tokens: int | None = 800, lasts_s: float = 4.0, seed: int = 1) -> list[Job]:
    rng = random.Random(seed)
    return [
        Job(
            prompt=rng.randint(50, 400),
            output=rng.randint(20, 300),
            max_tokens=max_tokens,
            up_s=rng.uniform(0.02, 0.3),
            down_s=rng.uniform(0.05, 1.0),
            lasts_s=rng.uniform(0.5, 2 * lasts_s),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("counting", ["ahead", "ahead, corrected", "at the end"])
@pytest.mark.parametrize(("max_tokens", "lasts_s"), [(800, 4.0), (300, 90.0)])
def test_a_crowd_uses_the_rate_of_tokens_nearly_without_refusals(
    counting: Counting, style: Literal["go", "rfc"], max_tokens: int, lasts_s: float
) -> None:
    jobs = load(300, max_tokens=max_tokens, lasts_s=lasts_s)
    limit = 30_000
    vendor = Vendor(Limit(10_000), Limit(limit), counting, style)
    found = simulate(vendor, jobs)
    assert found.num_refused <= 0.02 * len(jobs), found
    taken = sum([job.prompt + (max_tokens if counting == "ahead" else job.output) for job in jobs])
    best_s = (taken - limit) / limit * 60
    # The tokens on their way are held back, at most half of a minute's tokens.
    assert found.took_s <= 1.1 * best_s + 3 * lasts_s, (found, best_s)


@pytest.mark.parametrize("style", STYLES)
def test_a_window_is_found_out(style: Literal["go", "rfc"]) -> None:
    """Its reports look like a token bucket's until two of them are compared."""
    jobs = [Job(up_s=0.05, down_s=0.1, lasts_s=1.0)] * 600
    found = simulate(Vendor(Limit(100, is_window=True), style=style), jobs)
    assert found.num_refused <= 6
    assert found.took_s <= 7 * 60


def test_keys_and_models_have_separate_limits_and_an_output_is_learned() -> None:
    one, other = RateLimits(), RateLimits()
    headers = {"x-ratelimit-limit-tokens": "1000", "x-ratelimit-remaining-tokens": "1000"}
    demand = Demand(400, None, lambda: Usage(100, 0, 50))
    for _ in range(60):
        sent = one.send(demand, 0.0)
        one.answered(sent, headers, 0.0)
        one.end(sent, 0.0)
    first, later = RateLimits(), one
    for limits in (first, later):
        limits.answered(limits.send(Demand(0, 0), 0.0), headers, 0.0)
    # Before the first answer, 256 tokens are expected, and then about 50.
    assert first.wait_s(demand, 0.0, 3) > 0
    assert later.wait_s(demand, 0.0, 6) == 0
    assert other.wait_s(demand, 0.0, 1000) == 0


NONSENSE = st.one_of(
    st.sampled_from(
        ["", "0", "-1", "1", "nan", "inf", "-inf", "1e999", "1,5", "∞", "100;w=60", "٣", "9" * 400]
    ),
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["6m0s", "1s", "0s", "9999999h", "1800000000", "1800000000000", "9999-12-31T23:59:59Z"]),
)
NAMES = [
    f"{prefix}{part}"
    for prefix, parts in (
        (
            "x-ratelimit-",
            [
                f"{value}{of}"
                for value in ("limit", "remaining", "reset")
                for of in ("", "-requests", "-tokens")
            ],
        ),
        (
            "anthropic-ratelimit-",
            [
                f"{of}-{value}"
                for value in ("limit", "remaining", "reset")
                for of in ("requests", "input-tokens")
            ],
        ),
    )
    for part in parts
]


@given(
    answers=st.lists(st.dictionaries(st.sampled_from([*NAMES, "date"]), NONSENSE), max_size=12),
    steps=st.lists(st.floats(0, 50), min_size=12, max_size=12),
)
@settings(deadline=None, max_examples=40)
def test_nonsense_raises_nothing_and_each_wait_has_an_end(
    answers: list[dict[str, str]], steps: list[float]
) -> None:
    limits, now = RateLimits(), 0.0
    for headers, step in zip(answers, steps, strict=False):
        sent = limits.send(Demand(10, 10, lambda: Usage(3, 0, 4)), now)
        now += step
        limits.answered(sent, headers, now)
        limits.end(sent, now)
        assert 0.0 <= limits.wait_s(Demand(10, 10), now) < math.inf


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, {}),
        ({"x-ratelimit-remaining-requests": "5"}, {"requests": (5, 5, None)}),
        ({"x-ratelimit-limit-requests": "-1", "x-ratelimit-remaining-requests": "-1"}, {}),
        ({"x-ratelimit-limit-requests": "0", "x-ratelimit-remaining-requests": "0"}, {}),
        ({"x-ratelimit-limit-tokens": "9", "x-ratelimit-remaining-tokens": "-3"}, {"tokens": (9, 0, None)}),
        (
            {
                "anthropic-ratelimit-output-tokens-limit": "8000",
                "anthropic-ratelimit-output-tokens-remaining": "7000",
                "anthropic-ratelimit-output-tokens-reset": "2026-11-28T03:00:10Z",
                "date": "Sat, 28 Nov 2026 03:00:00 GMT",
            },
            {"output": (8000, 7000, 10)},
        ),
        (
            {"x-ratelimit-limit": "20", "x-ratelimit-remaining": "19", "x-ratelimit-reset": "250ms"},
            {"requests": (20, 19, 0.25)},
        ),
    ],
)
def test_headers(headers: dict[str, str], expected: dict[str, tuple[float, float, float | None]]) -> None:
    found = read_headers(headers)
    assert {name: (one.limit, one.remaining, one.reset_s) for name, one in found.items()} == expected


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1s", 1),
        ("6m0s", 360),
        ("1h2m3.5s", 3723.5),
        ("2m59.56s", 179.56),
        ("1d2h", 93_600),
        ("120ms", 0.12),
        ("1.5ms", 0.0015),
        ("250µs", 0.00025),
        ("2m", 120),
        ("7", 7),
        ("0.25", 0.25),
        ("-3", 0),
        ("1800000060", 60),
        ("1800000060000", 60),
        ("2027-01-15T08:01:00Z", 60),
        ("2027-01-15T09:01:00.5+01:00", 60.5),
        ("2027-01-15T08:01:00.123456789Z", pytest.approx(60.123456)),
        ("2020-01-01T00:00:00Z", 0),
        ("2020-01-01T00:00:00", None),  # without a zone
        ("", None),
        ("x", None),
        ("nan", None),
        ("5 s", None),
        ("1s2", None),
    ],
)
def test_times_until_a_reset(value: str, seconds: float | None) -> None:
    assert reset_s(value, 1_800_000_000.0) == seconds


def test_a_time_is_relative_to_the_clock_by_default() -> None:
    later = datetime.now(UTC) + timedelta(seconds=3000)
    found = reset_s(later.isoformat())
    assert found is not None
    assert 2900 < found <= 3000
