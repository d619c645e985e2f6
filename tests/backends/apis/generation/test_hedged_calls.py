"""A call whose answer does not begin in time is made a second time; the answer that begins first is kept."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from support.apis import anthropic_answers, openai_answers
from support.apis.api_sessions import ApiSession, anthropic_session, openai_session
from support.apis.fake_server import (
    Answer,
    AnyAnswer,
    Close,
    Hold,
    RawAnswer,
    Script,
    fake_server,
)

import agentflow as af
from agentflow.errors import BadArgument, RequestRefused, ServerLost

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]

NOW = 0.0
NEVER = 1e6
PRICE = af.Price(input=0.0, output=10.0)


def said(text: str, *before: Hold) -> AnyAnswer:
    return openai_answers.stream(*before, [*openai_answers.text_chunks(text), *openai_answers.ending()])


def opened(script: Script, hedge_after_s: float | None = NOW, **options: Any) -> ApiSession:
    return openai_session(script, "m", hedge_after_s=hedge_after_s, **options)


async def asked(flow: af.Session, **params: Any) -> str:
    async with flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", **params))
        return await s["x"]


async def test_the_second_request_wins_and_the_first_is_cancelled() -> None:
    async with opened([RawAnswer([Hold()]), said("second"), said("third")]) as (flow, server):
        assert await asked(flow) == "second"
        await server.wait_until_gone()
        assert server.received[0].body == server.received[1].body
        stats = await flow.stats()
        assert (stats.hedged_calls, stats.running) == (1, 0)


@pytest.mark.parametrize("second", [None, Answer(b"{}", 500), RawAnswer([])])
async def test_the_first_request_wins_if_it_begins_first_or_the_second_fails(
    second: AnyAnswer | None,
) -> None:
    first = Hold()
    async with (
        opened([said("first", first), second or RawAnswer([Hold()])]) as (flow, server),
        flow.state() as s,
    ):
        s += af.user("Hi") + af.assistant(af.gen("x"))
        await server.wait_for_requests(2)
        first.go_on()
        assert await s["x"] == "first"
        if second is None:
            await server.wait_until_gone()
        assert (await flow.stats()).running == 0


async def test_an_answer_that_has_begun_is_waited_for() -> None:
    hold = Hold()
    begun = openai_answers.stream(openai_answers.text_chunks("a"), hold, openai_answers.ending())
    async with opened([RawAnswer([Hold()]), begun]) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        await hold.reached.wait()
        await server.wait_until_gone()
        hold.go_on()
        assert await s["x"] == "a"
        assert len(server.received) == 2


@pytest.mark.parametrize("hedge_after_s", [None, NEVER])
async def test_without_need_there_is_one_request(hedge_after_s: float | None) -> None:
    async with opened([said("first")], hedge_after_s) as (flow, server):
        assert await asked(flow) == "first"
        assert len(server.received) == 1
        assert (await flow.stats()).hedged_calls == 0


async def test_a_refusal_before_the_time_is_raised() -> None:
    async with opened([Answer(b"{}", 400)], NEVER) as (flow, server):
        with pytest.raises(RequestRefused):
            await asked(flow)
        assert len(server.received) == 1


async def test_the_first_error_is_raised_if_both_fail() -> None:
    hold = Hold()
    broken = openai_answers.stream(hold, Close())
    async with opened([broken, Answer(b"{}", 500)]) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        await server.wait_for_requests(2)
        hold.go_on()
        with pytest.raises(ServerLost):
            await s["x"]


async def test_a_lost_answer_is_no_reason_for_another_after_it_was_visible() -> None:
    cut = openai_answers.stream(openai_answers.text_chunks("a"), Close())
    async with opened([RawAnswer([Hold()]), cut]) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        with pytest.raises(ServerLost):
            await s["x"]
        assert len(server.received) == 2


async def test_many_calls_have_the_text_of_one_request_each() -> None:
    served = 0

    def script(request: Any) -> AnyAnswer:
        nonlocal served
        served += 1
        number = served
        return openai_answers.text_stream(*[f"{number} "] * 5)

    async with opened(script) as (flow, _):

        async def ask(s: af.State, question: str) -> str:
            s += af.user(question) + af.assistant(af.gen("x"))
            return "".join([delta async for delta in s["x"]])

        for text in await flow.map(ask, [str(number) for number in range(40)], concurrency=8):
            assert len(set(text.split())) == 1
            assert len(text.split()) == 5
        assert (await flow.stats()).running == 0


async def test_both_requests_are_reserved_and_charged() -> None:
    hold = Hold()
    usage = openai_answers.usage(0, 100_000)
    whole = openai_answers.stream(
        hold, [*openai_answers.text_chunks("a"), *openai_answers.ending(usage=usage)]
    )
    session = {"prices": {"m": PRICE}, "max_cost": 2.5}
    async with opened([RawAnswer([Hold()]), whole, said("b")], session=session) as (flow, server):
        async with flow.state() as s, flow.state() as other:
            s += af.user("Hi") + af.assistant(af.gen("x", max_tokens=100_000))  # at most $1, twice
            await hold.reached.wait()
            other += af.user("Hi") + af.assistant(af.gen("x", max_tokens=100_000))
            with pytest.raises(af.BudgetExceeded):
                await other["x"]
            hold.go_on()
            await s["x"]
            assert s["x"].usage.cost == pytest.approx(1.0)
        assert len(server.received) == 2
        assert (await flow.stats()).cost == pytest.approx(1.0)  # the prompt is free


async def test_a_second_request_that_could_exceed_the_cap_is_not_sent() -> None:
    hold = Hold()
    session = {"prices": {"m": PRICE}, "max_cost": 1.5}
    async with opened([said("a", hold)], session=session) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", max_tokens=100_000))
        await hold.reached.wait()
        hold.go_on()
        assert await s["x"] == "a"
        assert len(server.received) == 1
        assert (await flow.stats()).hedged_calls == 0


async def test_a_left_request_costs_its_prompt() -> None:
    session = {"prices": {"m": af.Price(input=1000.0, output=0.0)}}
    async with opened([RawAnswer([Hold()]), said("a")], session=session) as (flow, _), flow.state() as s:
        s += af.user("Hi " * 1000) + af.assistant(af.gen("x"))
        await s["x"]
        assert (await flow.stats()).cost > s["x"].usage.cost


async def test_a_cancelled_state_leaves_both() -> None:
    holds = Hold(), Hold()
    async with opened([said("a", holds[0]), said("b", holds[1])]) as (flow, server):
        async with flow.state() as s:
            s += af.user("Hi") + af.assistant(af.gen("x"))
            for hold in holds:
                await hold.reached.wait()
            s.cancel()
        await server.wait_until_gone(2)
        assert (await flow.stats()).running == 0


async def test_the_first_branch_goes_ahead_with_two_requests() -> None:
    """The second request does not wait for the first one at the gate of their prefix."""
    prompt = "Light. " * 2000
    served = 0

    def script(request: Any) -> AnyAnswer:
        nonlocal served
        served += 1
        return RawAnswer([Hold()]) if served == 1 else anthropic_answers.text_stream("a")

    async with anthropic_session(script, hedge_after_s=NOW) as (flow, _), flow.state() as s:
        s += af.user(prompt)
        branches = s.fork(3)
        for branch in branches:
            branch += af.assistant(af.gen("x"))
        with anyio.fail_after(20):
            assert [await branch["x"] for branch in branches] == ["a"] * 3


async def test_the_next_model_answers_if_both_fail() -> None:
    async with fake_server([said("b")]) as other, fake_server(lambda _: Answer(b"{}", 503)) as server:
        first = af.OpenAI("m0", base_url=f"{server.url}/v1", api_key="k", hedge_after_s=NOW)
        second = af.OpenAI("m1", base_url=f"{other.url}/v1", api_key="k")
        async with af.session(backend=first, fallback=[second]) as flow:
            assert await asked(flow) == "b"


@pytest.mark.parametrize("value", [-1, "1", float("nan")])
def test_a_time_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(BadArgument) as raised:
        af.OpenAI("m", api_key="k", hedge_after_s=value)
    assert raised.value.param == "hedge_after_s"
