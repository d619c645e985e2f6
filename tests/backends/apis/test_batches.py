"""Maps whose generations run in batches of a vendor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from support.apis.batch_vendors import AnthropicVendor, FakeVendor, OpenAIVendor
from support.apis.fake_server import FakeServer, fake_server

import agentflow as af
from agentflow.backends.apis.batches import collector
from agentflow.errors import DataDependent, NotSupported, RequestRefused

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_POLL_S", "MAX_POLL_S", "FIRST_LOOK_S"):
        monkeypatch.setattr(collector, name, 0.001)


@dataclass
class Place:
    """A vendor, its server, and an open session on it."""

    vendor: FakeVendor
    server: FakeServer
    flow: af.Session


@asynccontextmanager
async def session_on(vendor: FakeVendor, **options: Any) -> AsyncIterator[Place]:
    async with fake_server(vendor) as server:
        backend: Any
        if isinstance(vendor, OpenAIVendor):
            backend = af.OpenAI("gpt-4.1-mini", base_url=f"{server.url}/v1", api_key="k", max_retries=0)
        else:
            backend = af.Anthropic("claude-opus-4-5", base_url=server.url, api_key="k", max_retries=0)
        async with af.session(backend=backend, **options) as flow:
            yield Place(vendor, server, flow)


@pytest.fixture(params=[OpenAIVendor, AnthropicVendor], ids=["openai", "anthropic"])
def vendor(request: pytest.FixtureRequest) -> FakeVendor:
    return request.param()  # type: ignore[no-any-return]


@af.program
async def ask(s: af.State, question: str) -> str:
    s += af.user(question) + af.assistant(af.gen("answer", max_tokens=8))
    return await s["answer"]


@af.program
async def ask_twice(s: af.State, question: str) -> list[str]:
    s += af.user(question) + af.assistant(af.gen("first", max_tokens=8))
    s += af.user("And?") + af.assistant(af.gen("second", max_tokens=8))
    return [await s["first"], await s["second"]]


@af.program
async def compare(s: af.State, question: str) -> str:
    """A fork, whose branches are of one stage, and a join: two stages."""
    s += af.user(question)
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += af.user(f"As person {number}.") + af.assistant(af.gen("view", max_tokens=8))
    s += af.user("Views:")
    for branch in branches:
        s += branch["view"]
    s += af.assistant(af.gen("verdict", max_tokens=8))
    return await s["verdict"]


async def test_all_inputs_are_one_batch(vendor: FakeVendor) -> None:
    questions = [f"Question {number}?" for number in range(20)]
    async with session_on(vendor) as place:
        plain = await place.flow.map(ask, questions)
        assert vendor.num_batches == 0
        assert await place.flow.map(ask, questions, batch=True) == plain
        assert sorted(vendor.prompts[0]) == sorted(questions)
        assert vendor.num_batches == 1


@pytest.mark.parametrize(("program", "depth"), [(ask_twice, 2), (compare, 2)], ids=["turns", "fork"])
async def test_there_is_one_batch_for_each_stage(vendor: FakeVendor, program: Any, depth: int) -> None:
    questions = [f"Question {number}?" for number in range(5)]
    async with session_on(vendor) as place:
        plain = await place.flow.map(program, questions)
        assert await place.flow.map(program, questions, batch=True) == plain
        assert vendor.num_batches == depth


async def test_typed_values_and_choices(vendor: FakeVendor) -> None:
    @af.program
    async def typed(s: af.State, question: str) -> list[Any]:
        s += af.user(question) + af.assistant(af.gen("number", schema=int))
        s += af.user("Which?") + af.assistant(af.select("choice", ["red", "green", "blue"]))
        return [await s["number"], await s["choice"]]

    async with session_on(vendor) as place:
        plain = await place.flow.map(typed, ["a", "b"])
        assert await place.flow.map(typed, ["a", "b"], batch=True) == plain


async def test_a_graph_and_arguments_of_other_types(vendor: FakeVendor) -> None:
    @af.program
    async def repeat(s: af.State, question: str, times: int, suffix: str = "!") -> str:
        for _ in range(times):
            s += af.user(question + suffix) + af.assistant(af.gen("answer", max_tokens=8))
        return await s["answer"]

    async with session_on(vendor) as place:
        inputs = [("a", 1), ("b", 3), {"question": "c", "times": 2, "suffix": "?"}]
        plain = await place.flow.map(repeat, inputs)
        assert await place.flow.map(repeat, inputs, batch=True) == plain
        assert [len(batch) for batch in vendor.prompts] == [3, 2, 1]
        graph = repeat.trace(times=1, suffix=".")
        assert await place.flow.map(graph, ["a"], batch=True) == await place.flow.map(graph, ["a"])


async def test_a_program_that_depends_on_values_is_refused_before_anything_is_sent(
    vendor: FakeVendor,
) -> None:
    async def peek(s: af.State, question: str) -> str:
        s += af.user(question) + af.assistant(af.gen("answer"))
        return "yes" if "w" in await s["answer"] else "no"

    async with session_on(vendor) as place:
        with pytest.raises(DataDependent) as raised:
            await place.flow.map(peek, ["a", "b"], batch=True, on_error="return")
        assert __file__.rpartition("/")[2] in str(raised.value)
        assert place.server.received == []


async def test_models_without_batches_are_refused() -> None:
    async with af.session(backend=af.Scripted("Hi.")) as flow:
        with pytest.raises(NotSupported) as raised:
            flow.map(ask, ["a"], batch=True)
        assert raised.value.param == "batch"
    backend = af.OpenAICompatible("http://127.0.0.1:9/v1", "m", flavour="vllm")
    async with af.session(backend=backend) as flow:
        with pytest.raises(NotSupported) as raised:
            flow.map(ask, ["a"], batch=True)
        assert raised.value.param == "batch"


async def test_a_refused_request_fails_its_input_only(vendor: FakeVendor) -> None:
    vendor.fate = lambda body: "refused" if "bad" in str(body["messages"]) else "answered"
    async with session_on(vendor) as place:
        found = await place.flow.map(ask, ["a", "bad", "c"], batch=True, on_error="return")
        assert isinstance(found[1], RequestRefused)
        assert [isinstance(one, str) for one in found] == [True, False, True]
        with pytest.raises(RequestRefused):
            await place.flow.map(ask, ["a", "bad", "c"], batch=True)


async def test_retries_send_expired_requests_again(vendor: FakeVendor) -> None:
    vendor.fate = lambda body: "expired" if vendor.num_batches == 1 else "answered"
    async with session_on(vendor) as place:
        found = await place.flow.map(ask, ["a", "b"], batch=True, on_error="return")
        assert all(isinstance(one, af.Overloaded) and vendor_id(vendor, 0) in str(one) for one in found)
        vendor.sent.clear()
        monkeyed = await place.flow.map(ask, ["a"], batch=True, retries=1)
        assert monkeyed == await place.flow.map(ask, ["a"])


def vendor_id(vendor: FakeVendor, number: int) -> str:
    assert isinstance(vendor, OpenAIVendor | AnthropicVendor)
    return vendor.batches[number].id


async def test_tokens_of_a_batch_cost_half(vendor: FakeVendor) -> None:
    name = "gpt-4.1-mini" if isinstance(vendor, OpenAIVendor) else "claude-opus-4-5"
    prices = {name: af.Price(input=2.0, output=10.0)}
    async with session_on(vendor, prices=prices) as place:
        await place.flow.map(compare, ["a"])
        plain = place.flow.runs[-1].usage
        await place.flow.map(compare, ["a"], batch=True)
        assert place.flow.runs[-1].usage.cost > 0
        [*_, run] = place.flow.runs
        assert run.usage.cost == pytest.approx(4 * (9 * 2.0 + 3 * 10.0) / 2 / 1e6)
        assert plain.cost == pytest.approx(2 * run.usage.cost)


async def test_a_cap_holds_before_a_batch_is_sent(vendor: FakeVendor) -> None:
    name = "gpt-4.1-mini" if isinstance(vendor, OpenAIVendor) else "claude-opus-4-5"
    async with session_on(vendor, prices={name: af.Price(input=2.0, output=1000.0)}, max_cost=0.01) as place:
        # Half the price of 8 tokens is $0.004, so two of the requests fit.
        found = await place.flow.map(ask, ["a", "b", "c", "d"], batch=True, on_error="return")
        assert sum(isinstance(one, af.BudgetExceeded) for one in found) == 2
        assert [len(batch) for batch in vendor.sent] == [2]


async def test_leaving_a_map_cancels_its_batches(vendor: FakeVendor) -> None:
    vendor.num_polls = 10**6
    async with session_on(vendor) as place:
        async with place.flow.map(ask, ["a"], batch=True):
            await place.server.wait_until(lambda: bool(vendor.num_asked))
        assert vendor.cancelled == [vendor_id(vendor, 0)]
