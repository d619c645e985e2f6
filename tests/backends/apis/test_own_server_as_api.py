"""Programs give the same on an engine and on the OpenAI API of a server that runs the same engine."""

from __future__ import annotations

import re
from typing import Any, Literal

import anyio
import pytest
from support.api_server import MODEL, ApiServer
from support.fake_engine import FakeEngine
from support.logit_runner import logit_runner
from support.server.module_servers import module_server

import agentflow as af
from agentflow.backends.apis.compatible import OpenAICompatible
from agentflow.backends.apis.openai import OpenAI
from agentflow.errors import DeadlineExceeded, PromptTooLong

pytestmark = pytest.mark.anyio


def engine() -> FakeEngine:
    return FakeEngine(runner=logit_runner(max_context=1024))


server = module_server(engine)


def client(server: ApiServer, flavour: Any = "vllm", **options: Any) -> OpenAICompatible:
    return OpenAICompatible(f"{server.url}/v1", flavour=flavour, **{"max_retries": 0, **options})


def openai(server: ApiServer, api: Literal["chat", "responses"]) -> OpenAI:
    return OpenAI(MODEL, api=api, like="gpt-4o", base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def greedy(name: str, **options: Any) -> Any:
    return af.gen(name, **{"max_tokens": 12, "temperature": 0.0, **options})


@af.program
async def turns(s: af.State) -> list[Any]:
    s += af.system("Be brief.") + af.user("What do plants do?") + af.assistant(greedy("first"))
    s += af.user("And then: ", s["first"]) + af.assistant(greedy("second", max_tokens=5))
    return [await s["first"], await s["second"], s["second"].finish_reason]


@af.program
async def branches(s: af.State) -> list[Any]:
    s += af.system("You are a judge.")
    async with s.fork(3) as judges:
        for number, judge in enumerate(judges):
            judge += af.user(f"Judge part {number}.") + af.assistant(greedy("judgment"))
    s += af.user("Judgments:", *[judge["judgment"] for judge in judges])
    s += af.assistant(greedy("report"))
    return [await s["report"], *[await judge["judgment"] for judge in judges]]


@af.program
async def continued(s: af.State) -> list[Any]:
    s += af.user("Describe it.")
    s += af.assistant("Name: ", greedy("name", max_tokens=4), "\nAge: ", greedy("age", max_tokens=4))
    return [await s["name"], await s["age"]]


@af.program
async def stopped(s: af.State) -> list[Any]:
    s += af.user("Count.") + af.assistant(greedy("whole", max_tokens=30))
    whole = await s["whole"]
    async with s.fork(1) as [other]:
        stop = whole[len(whole) // 2 :][:2] or "x"
        other += af.user("Count.") + af.assistant(greedy("part", max_tokens=30, stop=stop))
        return [whole, await other["part"]]


@af.program
async def plain(s: af.State) -> list[Any]:
    s += "Once upon a time"
    s += greedy("more", top_logprobs=2)
    s += " and " + greedy("end")
    text = await s["more"]
    tops = [[(top.text, round(top.logprob, 3)) for top in token] for token in s["more"].top_logprobs]
    return [text, await s["end"], tops]


@af.program
async def scored(s: af.State) -> list[Any]:
    s += af.user("Say something.") + af.assistant(greedy("word", max_tokens=6, top_logprobs=3))
    text = await s["word"]
    return [text, [round(one, 3) for one in s["word"].logprobs if one is not None][:3]]


PROGRAMS = [turns, branches, continued, stopped, plain, scored]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
async def test_programs_give_the_same_as_on_the_engine(server: ApiServer, program: Any) -> None:
    async with af.session(backend=engine()) as flow:
        expected = await flow.run(program)
    async with af.session(backend=client(server)) as flow:
        assert await flow.run(program) == expected


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("program", [turns, branches, stopped, scored], ids=lambda program: program.__name__)
async def test_openais_apis_give_the_same_as_the_engine(
    server: ApiServer, program: Any, api: Literal["chat", "responses"]
) -> None:
    async with af.session(backend=engine()) as flow:
        expected = await flow.run(program)
    async with af.session(backend=openai(server, api)) as flow:
        assert await flow.run(program) == expected


async def test_the_responses_api_streams_and_calls_tools(server: ApiServer) -> None:
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather in a city."""
        return f"12 degrees in {city}"

    async with af.session(backend=openai(server, "responses")) as flow, flow.state() as s:
        s += af.user("How is it?")
        s += af.assistant(af.reply("call", tools=[weather], choice="weather", temperature=0.0))
        [call] = (await s["call"]).tool_calls
        s += af.tool_result("12 degrees", call=call)
        s += af.assistant(greedy("x"))
        assert "".join([delta async for delta in s["x"]]) == await s["x"]
        assert 0 < s["x"].usage.output_tokens <= 12
        s += af.user("Right?") + af.assistant(af.select("y", ["yes", "no"]))
        s += af.user("How many?") + af.assistant(greedy("z", schema=bool, max_tokens=40))
        assert await s["y"] in ("yes", "no")
        assert isinstance(await s["z"], bool)


async def test_constraints_hold(server: ApiServer) -> None:
    async with af.session(backend=client(server)) as flow:
        async with flow.state() as s:
            s += af.user("How many?") + af.assistant(greedy("count", regex="[0-9]{1,3}", max_tokens=20))
            s += af.user("Which?") + af.assistant(greedy("flags", schema=bool, max_tokens=40))
            assert (await s["count"]).isdigit()
            assert await s["flags"] in (True, False)
        async with flow.state() as s:
            s += "Once " + greedy("word", regex="[a-z]{3}")
            s += " upon " + af.select("a", ["time", "place"])
            s += " there " + greedy("verb", grammar='start: ("was" | "is") LETTER?\nLETTER: /[a-z]/')
            assert len(await s["word"]) == 3
            assert await s["a"] in ("time", "place")
            assert re.fullmatch("(was|is)[a-z]?", await s["verb"])


async def test_the_generic_flavour_streams_and_counts(server: ApiServer) -> None:
    async with af.session(backend=client(server, "generic")) as flow, flow.state() as s:
        s += af.user("What do plants do?") + af.assistant(greedy("x"))
        assert "".join([delta async for delta in s["x"]]) == await s["x"]
        assert s["x"].usage.prompt_tokens > 0
        assert 0 < s["x"].usage.output_tokens <= 12


async def test_a_fork_finds_its_prefix_in_the_cache(server: ApiServer) -> None:
    async with af.session(backend=client(server)) as flow, flow.state() as s:
        s += af.system("A prefix of some length, which all the branches of this state share.")
        async with s.fork(4) as judges:
            for number, judge in enumerate(judges):
                judge += af.user(f"{number}") + af.assistant(greedy("x"))
        await s
        usages = [judge["x"].usage for judge in judges if await judge["x"] is not None]
    assert sum(usage.cached_tokens > usage.prompt_tokens // 2 for usage in usages) >= 3


async def test_select_writes_a_choice(server: ApiServer) -> None:
    async with af.session(backend=client(server)) as flow, flow.state() as s:
        s += af.user("Which?") + af.assistant("It is ", af.select("x", ["red", "green", "blue"]))
        assert await s["x"] in ("red", "green", "blue")
        s += af.user("Why?") + af.assistant(greedy("why"))
        await s


async def test_cancelling_aborts_the_request(server: ApiServer) -> None:
    async with af.session(backend=client(server)) as flow, flow.state() as s:
        s += af.user("Go on.") + af.assistant(af.gen("x", max_tokens=900, ignore_eos=True))
        async for _ in s["x"]:
            break
        s.cancel()
        await anyio.to_thread.run_sync(server.wait_until, lambda: server.service.calls.num == 0)


async def test_a_deadline_ends_a_request(server: ApiServer) -> None:
    async with af.session(backend=client(server)) as flow, flow.state() as s:
        s.limit(deadline_s=0.0)
        s += af.user("Go on.") + af.assistant(af.gen("x", max_tokens=900, ignore_eos=True))
        with pytest.raises(DeadlineExceeded):
            await s["x"]


@pytest.mark.parametrize("flavour", ["vllm", None])
async def test_a_prompt_that_is_too_long_is_refused(server: ApiServer, flavour: Any) -> None:
    async with af.session(backend=client(server, flavour)) as flow, flow.state() as s:
        assert flavour is not None or flow.capabilities.max_context == 1024
        s += af.user("word " * 5000) + af.assistant(greedy("x"))
        with pytest.raises(PromptTooLong):
            await s["x"]
