"""A map in batches sends nothing else, and no request of a batch twice."""

from __future__ import annotations

from typing import Any

import pytest
from support.apis.batch_sessions import VENDORS, Place, ask, backend_at, compare, session_on
from support.apis.batch_vendors import FakeVendor, OpenAIVendor
from support.apis.fake_server import fake_server
from support.programs import ask_twice

import agentflow as af
from agentflow.errors import DataDependent, NotSupported

pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {"spam": bool, "tone": ["calm", "angry"], "stars": range(1, 4)}
LONG = "Plants live on light. " * 400


def outside(place: Place) -> list[str]:
    """The paths of the requests that are not about batches."""
    return [
        request.path
        for request in place.server.received
        if "/batches" not in request.path and "/files" not in request.path
    ]


@af.program
async def judge(s: af.State, question: str) -> list[Any]:
    s += af.user(question)
    found = s.decide(ASKED)
    s += af.user("Why?") + af.assistant(af.gen("why", max_tokens=8))
    return [await found, await s["why"]]


async def test_all_questions_of_decisions_are_one_stage(vendor: FakeVendor) -> None:
    async with session_on(vendor) as place:
        found = await place.flow.map(judge, ["a", "b"], batch=True)
        assert outside(place) == []
        if isinstance(vendor, OpenAIVendor):  # by letters
            assert [answers["tone"].value for answers, _ in found] == ["angry", "angry"]
        else:  # by answers that the model writes
            plain = await place.flow.map(judge, ["a", "b"])
            assert found == plain
    assert [len(batch) for batch in vendor.sent] == [6, 2]


async def test_many_questions_are_one_stage() -> None:
    asked = {f"q{number}": bool for number in range(40)}

    async def ask_many(s: af.State, text: str) -> Any:
        s += af.user(text)
        return await s.decide(asked)

    vendor = VENDORS["anthropic"]()
    async with session_on(vendor) as place:
        await place.flow.map(ask_many, ["a"], batch=True)
    assert [len(batch) for batch in vendor.sent] == [40]


async def test_the_endpoint_for_decisions_is_not_asked() -> None:
    vendor = OpenAIVendor()
    async with fake_server(vendor) as server:
        backend = af.OpenAI("gpt-6-luna", base_url=f"{server.url}/v1", api_key="k", max_retries=0)
        async with af.session(backend=backend) as flow:
            await flow.map(judge, ["a", "b"], batch=True, on_error="return")
        assert outside(Place(server, flow)) == []


@pytest.mark.parametrize("program", [ask, ask_twice, compare])
async def test_the_responses_api_has_batches(program: Any) -> None:
    vendor = OpenAIVendor()
    async with session_on(vendor, given={"api": "responses"}) as place:
        plain = await place.flow.map(program, ["a", "b"])
        num_plain = len(outside(place))
        assert set(outside(place)) == {"/v1/responses"}
        assert await place.flow.map(program, ["a", "b"], batch=True) == plain
        assert len(outside(place)) == num_plain
    assert {batch.endpoint for batch in vendor.batches} == {"/v1/responses"}
    assert len(vendor.sent) == (1 if program is ask else 2)


async def test_no_request_of_a_batch_is_hedged(vendor: FakeVendor) -> None:
    async with session_on(vendor, given={"hedge_after_s": 0}) as place:
        await place.flow.map(ask, ["a", "b"], batch=True)
        assert outside(place) == []
        assert (await place.flow.stats()).hedged_calls == 0
    assert vendor.prompts == [["a", "b"]]


async def test_no_prefix_of_a_batch_is_warmed(vendor: FakeVendor) -> None:
    async with session_on(vendor) as place:
        await place.flow.map(compare, [LONG], batch=True)
        assert outside(place) == []
    assert [len(batch) for batch in vendor.sent] == [3, 1]


async def test_a_fallback_has_no_batches(vendor: FakeVendor) -> None:
    async with fake_server(vendor) as server:
        model = backend_at(type(vendor), server.url)
        async with af.session(backend=af.Fallback(model, model)) as flow:
            with pytest.raises(NotSupported) as raised:
                flow.map(ask, ["a"], batch=True)
        assert raised.value.param == "batch"
        assert server.received == []


async def test_embeddings_are_refused_in_a_map_in_batches() -> None:
    vendor = OpenAIVendor()
    async with session_on(vendor, given={"embed_model": "text-embedding-3-small"}) as place:

        async def near(s: af.State, text: str) -> str:
            await place.flow.embed(text)
            return await ask(s, text)

        with pytest.raises(DataDependent):
            await place.flow.map(near, ["a", "b"], batch=True)
        assert place.server.received == []


async def test_a_model_that_only_embeds_is_refused() -> None:
    async with session_on(OpenAIVendor(), max_retries=0) as place:
        backend = af.OpenAI("text-embedding-3-small", base_url=f"{place.server.url}/v1", api_key="k")
        async with af.session(backend=backend) as flow:
            with pytest.raises(NotSupported):
                await flow.map(ask, ["a"], batch=True)
        assert place.server.received == []
