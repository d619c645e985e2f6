"""The request that has a provider cache the prefix of forks that come next."""

from __future__ import annotations

from typing import Any, Literal

import anyio
import pytest
from anyio.lowlevel import checkpoint
from support.apis import anthropic_answers, openai_answers, responses_answers
from support.apis.api_sessions import (
    ApiSession,
    anthropic_session,
    compatible_session,
    openai_session,
)
from support.apis.fake_server import Answer, FakeServer, Hold, Received, Script

import agentflow as af

pytestmark = pytest.mark.anyio

LONG = "Plants live on light. " * 400
Api = Literal["chat", "responses", "messages"]
APIS: list[Api] = ["chat", "responses", "messages"]
MODELS = {"chat": "gpt-4o", "responses": "gpt-4o", "messages": "claude-sonnet-4-5"}
PRICE = af.Price(input=1_000_000.0, output=0.0)


def opened(script: Script, api: Api, **session: Any) -> ApiSession:
    session = {"prices": {MODELS[api]: PRICE}, **session}
    if api == "messages":
        return anthropic_session(script, MODELS[api], session=session)
    return openai_session(script, MODELS[api], session=session, api=api)


def answer(api: Api, *, prompt: int = 9) -> Answer:
    """An answer with a text of one piece."""
    match api:
        case "chat":
            return openai_answers.text_stream("Hello", usage=openai_answers.usage(prompt, 1))
        case "responses":
            return responses_answers.text_stream("Hello", usage=responses_answers.usage(prompt, 1))
        case "messages":
            return anthropic_answers.stream(
                anthropic_answers.beginning(prompt),
                anthropic_answers.text_block("Hello"),
                anthropic_answers.ending(output=1),
            )


def held(api: Api, hold: Hold) -> Answer:
    """An answer that waits before it begins."""
    whole = answer(api)
    assert not isinstance(whole.body, bytes)
    return Answer([hold, *whole.body], content_type=whole.content_type)


def limit(request: Received) -> int:
    """The limit of the output."""
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    return next(int(request.json[name]) for name in names if name in request.json)


def messages(request: Received) -> list[Any]:
    sent = request.json.get("messages", request.json.get("input"))
    assert isinstance(sent, list)
    return sent


@pytest.mark.parametrize("api", APIS)
async def test_the_prefix_is_warmed_while_the_forks_wait_for_something_else(api: Api) -> None:
    hold = Hold()
    async with opened([held(api, hold), *[answer(api)] * 2], api) as (flow, server), flow.state() as s:
        s += af.user(LONG)
        s.hint(forks=2)
        branches = s.fork(2)
        await server.wait_for_requests(1)
        assert limit(server.last) == (16 if api == "responses" else 1)
        for number, branch in enumerate(branches):
            branch += af.user(f"Question {number}") + af.assistant(af.gen("x", max_tokens=99))
        await hold.reached.wait()
        assert len(server.received) == 1  # they wait for the prefix
        hold.go_on()
        assert [await branch["x"] for branch in branches] == ["Hello"] * 2
    warming, *others = server.received
    if api == "messages":
        assert all(b"cache_control" in request.body for request in server.received)
    shared = warming.body[: warming.body.index(LONG.encode()) + len(LONG)]
    assert all(request.body.startswith(shared) for request in others)


@pytest.mark.parametrize("api", APIS)
async def test_the_first_answer_is_charged_with_it(api: Api) -> None:
    script = [answer(api, prompt=100), *[answer(api, prompt=10)] * 2]
    async with opened(script, api) as (flow, _):

        async def program(s: af.State) -> list[af.Usage]:
            s += af.user(LONG)
            s.hint(forks=2)
            with anyio.fail_after(20):
                while (await flow.stats()).prompt_tokens < 100:
                    await checkpoint()
            async with s.fork(2) as branches:
                for number, branch in enumerate(branches):
                    branch += af.user(f"Question {number}") + af.assistant(af.gen("x", max_tokens=9))
                await branches
            return [branch["x"].usage for branch in branches]

        usages = await flow.run(program)
        assert sorted(usage.prompt_tokens for usage in usages) == [10, 110]
        stats = await flow.stats()
        assert (stats.prompt_tokens, stats.cost) == (120, 120.0)
        assert flow.runs[-1].usage.cost == 120.0


@pytest.mark.parametrize("api", APIS)
async def test_a_limit_of_output_tokens_does_not_count_it(api: Api) -> None:
    async with opened(lambda _: answer(api), api) as (flow, _), flow.state() as s:
        s.limit(output_tokens=1)
        s += af.user(LONG)
        s.hint(forks=2)
        with anyio.fail_after(20):
            while not (await flow.stats()).prompt_tokens:
                await checkpoint()
        [branch] = s.fork(1)
        branch += af.user("Hi") + af.assistant(af.gen("x", max_tokens=1))
        assert await branch["x"] == "Hello"
        assert branch["x"].usage.output_tokens == 1
        assert (await flow.stats()).generated_tokens == 2


async def silent(flow: af.Session, server: FakeServer, api: Api) -> None:
    """Nothing was sent ahead: the next request is the one for a gen."""
    before = len(server.received)
    async with flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", max_tokens=50))
        await s
    assert len(server.received) == before + 1
    assert limit(server.last) == 50


@pytest.mark.parametrize("api", APIS)
async def test_nothing_is_sent_where_it_does_not_pay(api: Api) -> None:
    async with opened(lambda _: answer(api), api) as (flow, server):
        async with flow.state() as s:  # a short prefix
            s += af.user("Hi")
            s.hint(forks=3)
            s.fork(3)
            await silent(flow, server, api)
        async with flow.state() as s:  # one fork
            s += af.user(LONG)
            s.hint(forks=1)
            await silent(flow, server, api)
        async with flow.state() as s:  # no hint
            s += af.user(LONG)
            s.fork(3)
            await silent(flow, server, api)
        async with flow.state() as s:  # a gen has sent the prefix
            s += af.user(LONG) + af.assistant(af.gen("x", max_tokens=20)) + af.user("Go")
            await s
            s.hint(forks=3)
            await silent(flow, server, api)
        async with flow.state() as s:  # in the middle of a turn
            async with s.user():
                s += LONG
                s.hint(forks=3)
            await silent(flow, server, api)
        async with flow.state() as s:
            s += LONG  # plain text
            s.hint(forks=3)
            await silent(flow, server, api)


@pytest.mark.parametrize("flavour", ["vllm", "llamacpp", "generic"])
async def test_nothing_is_sent_to_compatible_servers(flavour: Any) -> None:
    opening = compatible_session(lambda _: answer("chat"), flavour)
    async with opening as (flow, server), flow.state() as s:
        s += af.user(LONG)
        s.hint(forks=3)
        await silent(flow, server, "chat")


@pytest.mark.parametrize("api", APIS)
async def test_a_prefix_is_warmed_once(api: Api) -> None:
    async with opened(lambda _: answer(api), api) as (flow, server), flow.state() as s:
        s += af.user(LONG)
        s.hint(forks=3)
        await server.wait_for_requests(1)
        s.hint(forks=3)
        async with s.fork(2) as branches:
            for branch in branches:
                branch.hint(forks=2)
                branch += af.user("Hi") + af.assistant(af.gen("x", max_tokens=9))
            await branches
        assert len(server.received) == 3


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("turns", [af.system(LONG), af.user("Hi") + af.assistant(LONG)])
async def test_a_prefix_that_no_user_ends_is_warmed(api: Api, turns: Any) -> None:
    async with opened([answer(api)], api) as (flow, server), flow.state() as s:
        s += turns
        s.hint(forks=3)
        await server.wait_for_requests(1)
        last = messages(server.last)[-1]
        assert (last["role"], "." in str(last["content"])) == ("user", True)


@pytest.mark.parametrize("api", APIS)
async def test_forks_do_without_a_request_that_fails(api: Api) -> None:
    script = [openai_answers.BROKEN, *[answer(api)] * 2]
    async with opened(script, api) as (flow, server), flow.state() as s:
        s += af.user(LONG)
        s.hint(forks=2)
        await server.wait_for_requests(1)
        branches = s.fork(2)
        for branch in branches:
            branch += af.user("Hi") + af.assistant(af.gen("x", max_tokens=9))
        assert [await branch["x"] for branch in branches] == ["Hello"] * 2


@pytest.mark.parametrize("api", APIS)
async def test_tools_are_part_of_the_prefix(api: Api) -> None:
    def weather(city: str) -> str:
        """The weather in a city."""
        return city

    async with opened([answer(api)] * 3, api) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.reply("x", tools=[weather], max_tokens=9)) + af.user(LONG)
        await s
        s.hint(forks=2)
        await server.wait_for_requests(2)
        [branch] = s.fork(1)
        branch += af.user("And?") + af.assistant(af.reply("y", max_tokens=9))
        await branch
    reply, warming, last = (request.json for request in server.received)
    assert reply["tools"] == last["tools"]
    assert [tool["name"] for tool in warming["tools"]] == ["weather"] if api != "chat" else True
    assert warming.get("tool_choice") == last.get("tool_choice")


@pytest.mark.parametrize("api", APIS)
async def test_a_cap_on_the_costs_includes_it(api: Api) -> None:
    """The highest cost of the extra request exceeds the cap, so it is not sent."""
    async with opened([], api, max_cost=1.0) as (flow, server), flow.state() as s:
        s += af.user(LONG)
        s.hint(forks=2)
        await s
        assert server.received == []
        assert (await flow.stats()).cost == 0
