"""Graphs mapped over inputs and streamed: the same results as the program gives."""

from __future__ import annotations

import pytest
from observed_backends import Noted, assert_left_nothing

import agentflow as af
from agentflow import ops

pytestmark = pytest.mark.anyio


@af.program
async def ask(s: af.State, topic: str, tone: str) -> list[str]:
    s += f"{topic} in a {tone} tone: " + af.gen("first")
    async with s.fork(2) as branches:
        for number, branch in enumerate(branches):
            branch += f"branch {number}: " + af.gen("inner", temperature=1.0)
    s += branches[0]["inner"] + af.gen("last")
    return [await s["first"], await branches[1]["inner"], await s["last"]]


@af.program
async def quiet(s: af.State, topic: str) -> None:
    s += topic + af.gen("first")


def answer(prompt: str) -> str:
    return f"<{len(prompt)} {prompt[:3]}>"


async def test_a_mapped_graph_gives_what_the_program_gives() -> None:
    inputs = [("tea", "dry"), {"tone": "warm", "topic": "rain"}, ("ink", "flat")]
    backend = Noted(af.Scripted(answer))
    async with af.session(backend=backend, seed=1) as flow:
        graph = ask.trace()
        results = await flow.map(graph, inputs)
        assert [op.ops[0].objective for op in backend.of(ops.Submit)] == ["throughput"] * 3
    async with af.session(backend=af.Scripted(answer), seed=1) as flow:
        assert results == await flow.map(ask, inputs)


@pytest.mark.parametrize("bad", [("tea",), ("a", "b", "c"), {"topic": "a"}, {"topic": "a", "tone": 5}])
async def test_arguments_that_do_not_fit_fail_their_input(bad) -> None:
    async with af.session(backend=af.Scripted(answer)) as flow:
        found = await flow.map(ask.trace(), [bad, ("tea", "dry")], on_error="return")
        assert isinstance(found[0], af.BadArgument)
        assert isinstance(found[1], list)


async def test_a_streamed_graph_has_the_values_of_the_program_and_its_result() -> None:
    async def events_of(stream: af.ProgramStream) -> tuple[set, set, object]:
        texts: dict[tuple, str] = {}
        done = set()
        result: object = None
        async for event in stream:
            if isinstance(event, af.TextDelta):
                texts[event.path, event.name] = texts.get((event.path, event.name), "") + event.text
            elif isinstance(event, af.VariableDone):
                done.add((event.path, event.name, event.value))
            else:
                result = event.result
        return {(path, name, text) for (path, name), text in texts.items()}, done, result

    async with af.session(backend=af.Scripted(answer), seed=1) as flow:
        of_graph = await events_of(flow.stream(ask.trace(), "tea", tone="dry"))
        of_program = await events_of(flow.stream(ask, "tea", "dry"))
    assert of_graph == of_program
    assert {path for path, _, _ in of_graph[1]} == {(), (0,), (1,)}


async def test_a_streamed_graph_that_is_left_is_cancelled() -> None:
    backend = af.Scripted(answer)
    async with af.session(backend=backend) as flow, flow.stream(ask.trace(), "tea", "dry") as events:
        async for _ in events:
            break
    assert_left_nothing(backend)


async def test_a_graph_without_a_result_runs_to_its_end() -> None:
    async with af.session(backend=af.Scripted(answer)) as flow:
        assert await flow.submit(quiet.trace(), {"topic": "tea"}) is None
        assert (await flow.stats()).generated_tokens > 0
