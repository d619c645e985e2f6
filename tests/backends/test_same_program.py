"""One program on every kind of backend: canned answers, an engine here and on a server, and two APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from support.api_server import api_server
from support.apis import anthropic_answers, openai_answers
from support.apis.api_sessions import anthropic_session, openai_session
from support.apis.fake_server import AnyAnswer, Received
from support.fake_engine import ConstrainedEngine

import agentflow as af

pytestmark = pytest.mark.anyio

DIMENSIONS = ["clarity", "evidence", "style"]


class Report(BaseModel):
    grade: Literal["good", "bad", "none"]

    @classmethod
    def unrelated(cls) -> Report:
        return cls(grade="none")


@af.program
async def judge(s: af.State, essay: str, dimensions: list[str]) -> Report:
    s += af.system("You are a strict judge of essays.")
    s += af.user(f"Essay:\n{essay}\nIs it about science?")
    s += af.assistant(af.select("related", ["yes", "no"]))
    if await s["related"] == "no":
        return Report.unrelated()

    async with s.fork(len(dimensions)) as branches:
        for branch, dimension in zip(branches, dimensions):  # noqa: B905  # as programs are written
            branch += af.user(f"Judge its {dimension}.")
            branch += af.assistant(af.gen("judgment", max_tokens=64))

    s += af.user("Judgments:")
    for branch in branches:
        s += branch["judgment"]  # between the turns
    s += af.assistant(af.gen("report", schema=Report))
    report: Report = await s["report"]
    return report


def answer(prompt: str, write: Callable[[str], str] = str) -> str:
    """The answer to a prompt. ``write``: how the backend writes a choice."""
    if "Judgments:" in prompt:
        return '{"grade": "good"}'
    return "Fair." if "Judge its" in prompt else write("no" if "stones" in prompt else "yes")


def last_words(request: Received) -> str:
    """The messages of the user after the last answer."""
    said: list[Any] = request.json["messages"]
    found = [message["role"] for message in said]
    after = len(found) - found[::-1].index("assistant") if "assistant" in found else 0
    return str(said[after:])


def openai_answer(request: Received) -> AnyAnswer:
    has_form = "response_format" in request.json
    write = '{{"value": "{}"}}'.format if has_form else str
    return openai_answers.text_stream(answer(last_words(request), write))


def anthropic_answer(request: Received) -> AnyAnswer:
    has_form = "output_config" in request.json
    write = '{{"value": "{}"}}'.format if has_form else str
    return anthropic_answers.text_stream(answer(last_words(request), write))


@asynccontextmanager
async def scripted() -> AsyncIterator[af.Session]:
    script = af.Scripted(lambda prompt: answer(prompt.rpartition("</assistant>")[2]))
    async with af.session(backend=script) as flow:
        yield flow


@asynccontextmanager
async def embedded() -> AsyncIterator[af.Session]:
    async with af.session(backend=ConstrainedEngine(), seed=7) as flow:
        yield flow


@asynccontextmanager
async def on_a_server() -> AsyncIterator[af.Session]:
    with api_server(ConstrainedEngine()) as server:
        async with af.session(server.url.replace("http", "ws"), seed=7) as flow:
            yield flow


@asynccontextmanager
async def on_openai() -> AsyncIterator[af.Session]:
    async with openai_session(openai_answer) as (flow, _):
        yield flow


@asynccontextmanager
async def on_anthropic() -> AsyncIterator[af.Session]:
    async with anthropic_session(anthropic_answer) as (flow, _):
        yield flow


Opening = Callable[[], AbstractAsyncContextManager[af.Session]]


async def outcome(opening: Opening, essays: Sequence[str]) -> list[tuple[Report, dict[Any, str]]]:
    """The result of each essay, and the values of all variables. Awaited, streamed and mapped, the results
    are the same."""
    found: list[tuple[Report, dict[Any, str]]] = []
    async with opening() as flow:
        for essay in essays:
            values: dict[Any, str] = {}
            async for event in flow.stream(judge, essay, DIMENSIONS):
                if isinstance(event, af.VariableDone):
                    values[event.path, event.name] = event.value
                elif isinstance(event, af.RunDone):
                    found.append((event.result, values))
        results = [report for report, _ in found]
        assert [await flow.run(judge, essay, DIMENSIONS) for essay in essays] == results
        assert await flow.map(judge, [(essay, DIMENSIONS) for essay in essays], progress=True) == results
    return found


@pytest.mark.parametrize("opening", [scripted, on_openai, on_anthropic])
async def test_a_program_runs_on_canned_answers_and_on_apis(opening: Opening) -> None:
    judged, unrelated = await outcome(opening, ["Leaves run on light.", "On stones."])
    parts: dict[Any, str] = {((number,), "judgment"): "Fair." for number in range(3)}
    assert judged == (
        Report(grade="good"),
        {((), "related"): "yes", **parts, ((), "report"): '{"grade": "good"}'},
    )
    assert unrelated == (Report.unrelated(), {((), "related"): "no"})


async def test_a_program_gives_the_same_on_an_engine_here_and_on_a_server() -> None:
    essays = ["On light.", "On stones."]
    found = await outcome(embedded, essays)
    assert await outcome(on_a_server, essays) == found
    assert [len(values) for _, values in found] == [5, 1]  # the fake model finds one related
