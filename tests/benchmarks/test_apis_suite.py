"""The benchmark of the API backends at its smallest size: its parts run against its server, and report the
figures that are followed over time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from benchmarks.apis import suite
from benchmarks.apis.forms import FIELDS, PEOPLE, form_of, page_of, person_on, tokens_of
from benchmarks.apis.overhead import Calls
from benchmarks.report import Report

SMALLEST = suite.Size(
    rounds=1,
    calls=Calls(1, 1),
    tokens=Calls(1, 5),
    num_streams=3,
    stream_tokens=2,
    stall_rounds=1,
    prefix_words=40,
    questions=3,
    text_words=20,
)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("measure", "names"),
    [
        (suite.measure_speculation, ["calls_share", "input_token_share", "output_token_share"]),
        (suite.measure_calls, ["call_overhead_ms", "bare_call_ms"]),
        (suite.measure_tokens, ["token_overhead_us", "bare_token_us"]),
        (suite.measure_stalls, ["max_stall_ms"]),
        pytest.param(suite.measure_prefixes, ["fork_prefix_hits"], marks=pytest.mark.full),
    ],
)
async def test_the_parts_report_their_figures(
    anyio_backend: Any,
    measure: Callable[[Report, suite.Size], Awaitable[None]],
    names: list[str],
) -> None:
    report = Report("small")
    await measure(report, SMALLEST)
    assert [result.id for result in report.results] == [f"apis.{name}" for name in names]


@pytest.mark.parametrize("person", range(len(PEOPLE)))
def test_a_form_has_the_person_of_the_page(person: int) -> None:
    assert person_on(page_of(person)) == person
    lines = form_of(person).splitlines()
    assert lines == [f"{field}: {value}" for field, value in zip(FIELDS, PEOPLE[person], strict=True)]


@pytest.mark.parametrize("text", [page_of(0), form_of(1), "a\tb_c\n\n 12345 …"])
def test_the_tokens_of_a_text_are_all_of_it(text: str) -> None:
    assert "".join(tokens_of(text)) == text
