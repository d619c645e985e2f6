"""Inputs of a map in batches that run again, in the same map or a later one: answers are paid once."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator
from support.apis.batch_programs import Step, program_of, programs
from support.apis.batch_sessions import MODELS, VENDORS, compare, session_on
from support.apis.batch_vendors import FakeVendor, Fate, OpenAIVendor, words_for
from support.examples import times
from support.programs import ask_twice

import agentflow as af
from agentflow.backends.apis.batches import collector
from agentflow.errors import RequestRefused

pytestmark = pytest.mark.anyio

QUESTIONS = ["a", "b", "c"]
ANSWER_COST = (9 * 2.0 + 3 * 10.0) / 2 / 1e6
"""The vendors report 9 tokens of input and 3 of output for each answer, at half of the prices below."""


def sizes(vendor: FakeVendor) -> list[int]:
    """The numbers of requests in the batches that were sent: all of them were paid, unless they expired."""
    return [len(batch) for batch in vendor.sent]


def expires_once(*parts: str) -> Callable[[dict[str, Any]], Fate]:
    """The first request with these parts in its messages, for each of its inputs, expires."""
    seen: set[str] = set()

    def fate(body: dict[str, Any]) -> Fate:
        messages = json.dumps(body["messages"])
        if messages in seen or not all(part in messages for part in parts):
            return "answered"
        seen.add(messages)
        return "expired"

    return fate


async def plain(vendor: FakeVendor, program: Any, inputs: list[str] = QUESTIONS) -> Any:
    async with session_on(type(vendor)()) as place:
        return await place.flow.map(program, inputs)


@pytest.mark.parametrize(
    ("program", "last", "sent"),
    [(ask_twice, "And?", [3, 3, 1]), (compare, "Views:", [9, 3, 1])],
    ids=["turns", "fork"],
)
async def test_a_retry_sends_the_failed_stage_alone(
    vendor: FakeVendor, program: Any, last: str, sent: list[int]
) -> None:
    questions = ["One?", "Two?", "Three?"]
    vendor.fate = expires_once(last, "Two?")
    async with session_on(vendor) as place:
        found = await place.flow.map(program, questions, batch=True, retries=1)
    assert found == await plain(vendor, program, questions)
    assert sizes(vendor) == sent


async def test_answers_of_branches_whose_sibling_failed_are_kept(vendor: FakeVendor) -> None:
    vendor.fate = expires_once("As person 1.")
    async with session_on(vendor) as place:
        found = await place.flow.map(compare, ["a"], batch=True, retries=1)
    assert found == await plain(vendor, compare, ["a"])
    assert sizes(vendor) == [3, 1, 1]


@pytest.mark.parametrize(
    ("program", "failing", "num_saved"),
    [(ask_twice, "And?", 3), (compare, "As person 0.", 0)],
    ids=["later stage", "sibling"],
)
async def test_each_answer_is_charged_once(
    vendor: FakeVendor, program: Any, failing: str, num_saved: int
) -> None:
    vendor.fate = expires_once(failing)
    prices = {MODELS[type(vendor)]: af.Price(input=2.0, output=10.0)}
    async with session_on(vendor, prices=prices) as place:
        await place.flow.map(program, QUESTIONS, batch=True, retries=1)
        usages = [run.usage for run in place.flow.runs]
        stats = await place.flow.stats()
    num_answered = sum(sizes(vendor)) - 3
    assert sum(usage.output_tokens for usage in usages) == num_answered * 3
    assert sum(usage.cost for usage in usages) == pytest.approx(num_answered * ANSWER_COST)
    assert stats.cost == pytest.approx(num_answered * ANSWER_COST)
    if num_saved:
        assert sum(usage.saved_calls for usage in usages) == num_saved
        assert sum(usage.saved_tokens for usage in usages) == num_saved * 9


def with_numbers(vendor: FakeVendor, *numbers: Any) -> None:
    """The vendor answers requests with "How many?" with these, one after the other."""
    left = list(numbers)

    def words(body: dict[str, Any]) -> str:
        if "How many?" not in json.dumps(body["messages"][-1]):
            return words_for(body)
        number = left.pop(0)
        has_schema = "response_format" in body or "output_config" in body
        return json.dumps({"value": number}) if has_schema else str(number)

    vendor.words = words


def refuse_odd(number: int) -> int:
    if number % 2:
        raise ValueError("it is odd")
    return number


@af.program
async def count(s: af.State, question: str) -> list[Any]:
    """Three stages, of which the second has a type that only Python checks."""
    s += af.user(question) + af.assistant(af.gen("first", max_tokens=8))
    even = af.gen("number", schema=Annotated[int, AfterValidator(refuse_odd)])
    s += af.user("How many?") + af.assistant(even)
    s += af.user("Why?") + af.assistant(af.gen("why", max_tokens=8))
    return [await s["first"], await s["number"], await s["why"]]


async def test_a_retry_after_an_invalid_value_asks_for_that_value_and_what_follows(
    vendor: FakeVendor,
) -> None:
    with_numbers(vendor, "many", 3, 4)
    async with session_on(vendor) as place:
        found = await place.flow.map(count, ["a"], batch=True, retries=2)
    assert found[0][1] == 4
    # One of the first stage, three of the second, and two of the last: "many" violates the constraint.
    assert sizes(vendor) == [1] * 6
    first = [body for [body] in vendor.sent if len(body["messages"]) == 1]
    assert len(first) == 1


async def test_a_later_map_does_not_take_the_answers_that_made_an_input_fail(
    vendor: FakeVendor, tmp_path: Path
) -> None:
    with_numbers(vendor, 3, 5, 4)
    options: Any = {"batch": True, "resume": tmp_path / "results.jsonl", "on_error": "return"}
    kinds: list[Any] = []
    for _ in range(3):
        async with session_on(vendor) as place:
            [found] = await place.flow.map(count, ["a"], **options)
        kinds.append(found[1] if isinstance(found, list) else type(found))
    assert kinds == [af.InvalidValue, af.InvalidValue, 4]
    first = [body for [body] in vendor.sent if len(body["messages"]) == 1]
    assert (len(first), vendor.num_batches) == (1, 7)


NUMBERED: Any = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("options", "constraint", "left", "expected"),
    [
        ({"on_unsupported": "retry"}, {"regex": "[0-9]+"}, ["none", "few", "some", "7"], "7"),
        # The vendor promises to keep the schema.
        ({}, {"schema": NUMBERED}, ['{"n": "seven"}', '{"n": 7}'], {"n": 7}),
    ],
)
async def test_answers_that_violate_a_constraint_are_not_taken_again(
    vendor: FakeVendor, options: Any, constraint: dict[str, Any], left: list[str], expected: Any
) -> None:
    @af.program
    async def constrained(s: af.State, question: str) -> Any:
        s += af.user(question) + af.assistant(af.gen("first", max_tokens=8))
        s += af.user("How many?") + af.assistant(af.gen("number", max_tokens=8, **constraint))
        return [await s["first"], await s["number"]]

    answers = list(left)

    def words(body: dict[str, Any]) -> str:
        return answers.pop(0) if "How many?" in json.dumps(body["messages"]) else words_for(body)

    vendor.words = words
    async with session_on(vendor, given=options) as place:
        [[_, number]] = await place.flow.map(constrained, ["a"], batch=True, retries=1)
    assert number == expected
    assert sizes(vendor) == [1] * (1 + len(left))


async def test_a_later_map_asks_again_where_an_answer_was_filtered(tmp_path: Path) -> None:
    vendor = OpenAIVendor()
    body_of = vendor._body
    is_filtered = True

    def filtered(asked: dict[str, Any]) -> Any:
        body = body_of(asked)
        if is_filtered and "And?" in str(asked["messages"]):
            body["choices"][0]["finish_reason"] = "content_filter"
        return body

    vendor._body = filtered  # type: ignore[method-assign]
    options: Any = {"batch": True, "resume": tmp_path / "results.jsonl", "on_error": "return"}
    async with session_on(vendor) as place:
        [found] = await place.flow.map(ask_twice, ["a"], **options)
    assert isinstance(found, RequestRefused)
    is_filtered = False
    async with session_on(vendor) as place:
        assert await place.flow.map(ask_twice, ["a"], **options) == await plain(vendor, ask_twice, ["a"])
    assert sizes(vendor) == [1, 1, 1]


async def test_a_later_map_is_not_charged_for_answers_that_an_earlier_one_received(
    vendor: FakeVendor, tmp_path: Path
) -> None:
    vendor.fate = expires_once("And?")
    prices = {MODELS[type(vendor)]: af.Price(input=2.0, output=10.0)}
    options: Any = {"batch": True, "resume": tmp_path / "results.jsonl", "on_error": "return"}
    costs: list[float] = []
    for _ in range(2):
        async with session_on(vendor, prices=prices) as place:
            await place.flow.map(ask_twice, ["a"], **options)
            costs.append((await place.flow.stats()).cost)
    assert costs == [pytest.approx(ANSWER_COST), pytest.approx(ANSWER_COST)]
    assert sizes(vendor) == [1, 1, 1]


def answered_requests(vendor: FakeVendor, expired: Counter[str]) -> Counter[str]:
    return Counter(_plain(body) for batch in vendor.sent for body in batch) - expired


def _plain(body: dict[str, Any]) -> str:
    return json.dumps({**body, "seed": None}, sort_keys=True)


@settings(max_examples=times(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=programs, seed=st.integers(0, 2**32))
def test_random_failures_pay_no_answer_twice(
    steps: list[Step], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant in ("FIRST_POLL_S", "MAX_POLL_S", "FIRST_LOOK_S"):
        monkeypatch.setattr(collector, constant, 0.001)
    rng, expired = random.Random(seed), Counter[str]()

    def fate(body: dict[str, Any]) -> Fate:
        if rng.random() < 0.7:
            return "answered"
        expired[_plain(body)] += 1
        return "expired"

    async def main() -> None:
        faultless, vendor = VENDORS["anthropic"](), VENDORS["anthropic"]()
        async with session_on(faultless) as place:
            expected = await place.flow.map(program_of(steps), ["a", "b"], batch=True)
        vendor.fate = fate
        async with session_on(vendor) as place:
            options: Any = {"batch": True, "retries": 1_000}
            assert await place.flow.map(program_of(steps), ["a", "b"], **options) == expected
        needed = answered_requests(faultless, Counter())
        assert answered_requests(vendor, expired) == needed

    anyio.run(main)
