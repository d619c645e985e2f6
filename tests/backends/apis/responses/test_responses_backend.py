"""OpenAI's responses API as a backend, against a fake server whose answers have types of OpenAI's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import TypeAdapter
from support.apis import openai_answers
from support.apis import responses_answers as answers
from support.apis.api_sessions import openai_session
from support.apis.fake_server import FakeServer, Script

import agentflow as af
from agentflow.backends.apis.openai import OpenAI
from agentflow.errors import (
    BadArgument,
    NotSupported,
)

pytestmark = pytest.mark.anyio

REQUESTS = TypeAdapter(ResponseCreateParamsStreaming)
HELLO = answers.text_stream("He", "llo")


@asynccontextmanager
async def opened(
    script: Script, model: str = "gpt-4o", **options: Any
) -> AsyncIterator[tuple[af.Session, FakeServer]]:
    """A session with OpenAI's backend on a fake server. All requests have the type of OpenAI's client."""
    async with openai_session(script, model, **{"api": "responses", **options}) as (flow, server):
        yield flow, server
    for request in server.received:
        if request.path == "/v1/responses":
            REQUESTS.validate_python(request.json)
            assert request.json.keys() <= ResponseCreateParamsStreaming.__annotations__.keys()


@pytest.mark.parametrize(
    ("model", "api", "path"),
    [
        ("gpt-4o", None, "/v1/chat/completions"),
        ("gpt-4o", "responses", "/v1/responses"),
        ("gpt-5-pro", None, "/v1/responses"),
    ],
)
async def test_the_api_that_serves_the_model_is_the_default(model: str, api: Any, path: str) -> None:
    script = [openai_answers.text_stream("Hi") if "chat" in path else answers.text_stream("Hi")]
    async with opened(script, model, api=api) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        assert await s["x"] == "Hi"
    assert server.last.path == path


async def test_an_api_that_does_not_serve_the_model_is_refused() -> None:
    with pytest.raises(NotSupported) as caught:
        async with opened([], "gpt-5-pro", api="chat"):
            pass
    assert caught.value.param == "model"
    with pytest.raises(BadArgument) as wrong:
        OpenAI("gpt-4o", api_key="sk-1", api="completions")  # type: ignore[arg-type]
    assert wrong.value.param == "api"


async def test_a_model_has_the_features_of_the_one_that_it_is_like() -> None:
    async with opened([HELLO], "my-deployment", like="gpt-4o") as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", temperature=0.5))
        await s
    assert (server.last.json["model"], server.last.json["temperature"]) == ("my-deployment", 0.5)
    for like in ("gpt-0", 7):
        with pytest.raises(BadArgument) as caught:
            OpenAI("m", api_key="sk-1", like=like)  # type: ignore[arg-type]
        assert caught.value.param == "like"


async def test_a_limit_ends_the_text() -> None:
    script = [answers.text_stream("He", incomplete="max_output_tokens")]
    async with opened(script) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", max_tokens=16))
        assert (await s["x"], s["x"].finish_reason) == ("He", "length")


@pytest.mark.parametrize(
    ("options", "param"),
    [({"seed": 3}, "seed"), ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"top_k": 3}, "top_k")],
)
async def test_parameters_that_the_api_does_not_have(options: dict[str, Any], param: str) -> None:
    async with opened([]) as (flow, server), flow.state() as s:
        with pytest.raises(NotSupported) as caught:
            s += af.user("Hi") + af.assistant(af.gen("x", **options))
    assert caught.value.param == param
    assert server.received == []


async def test_reasoning_is_given_back_as_it_was() -> None:
    first = answers.stream(
        answers.reasoning(["Hm", "m."], encrypted="gAAA"),
        answers.message("Look. ", index=1, phase="commentary"),
        answers.message("Yes", index=2, phase="final_answer"),
        answers.ending(usage=answers.usage(9, 8, reasoning=5)),
    )
    async with opened([first, HELLO], "gpt-5.5") as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", stream_reasoning=True)) + af.user("Go")
        assert "".join([delta async for delta in s["x"].reasoning_deltas()]) == "Hmm."
        s += af.assistant(af.gen("y"))
        await s
        assert (await s["x"], s["x"].reasoning) == ("Look. Yes", "Hmm.")
        assert s["x"].usage.reasoning_tokens == 5
    asked, again = (request.json for request in server.received)
    assert asked["include"] == again["include"] == ["reasoning.encrypted_content"]
    assert asked["reasoning"] == {"summary": "auto"}
    assert "reasoning" not in again
    reasoning, commentary, answer = again["input"][1:-1]
    assert reasoning == {
        "type": "reasoning",
        "id": "rs_0",
        "summary": [{"type": "summary_text", "text": "Hmm."}],
        "encrypted_content": "gAAA",
    }
    assert (commentary["phase"], answer["phase"]) == ("commentary", "final_answer")
    assert [part["text"] for part in answer["content"]] == ["Yes"]


def weather(city: str) -> str:
    """The weather in a city."""
    return f"12 degrees in {city}"


async def test_tools_are_called_and_their_results_sent() -> None:
    """A model that reasons calls tools, too; its reasoning goes back with the call."""
    called = answers.stream(
        answers.reasoning([], encrypted="gAAA"),
        answers.message("I ", "look.", index=1),
        answers.call("c1", "weather", '{"city"', ': "Oslo"}', index=2),
        answers.ending(),
    )
    async with opened([called, HELLO], "gpt-5.6") as (flow, server), flow.state() as s:
        s += af.user("How is it in Oslo?")
        assert await af.act(s, tools=[weather]) == "Hello"
    first, second = (request.json for request in server.received)
    [tool] = first["tools"]
    assert (tool["type"], tool["name"], tool["strict"]) == ("function", "weather", True)
    assert tool["parameters"]["additionalProperties"] is False
    reasoning, text, call, result = second["input"][1:]
    assert (reasoning["type"], text["content"][0]["text"]) == ("reasoning", "I look.")
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "c1", "weather")
    assert call["arguments"] == '{"city": "Oslo"}'
    assert result == {"type": "function_call_output", "call_id": "c1", "output": "12 degrees in Oslo"}


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ("auto", {}),
        ("required", {"tool_choice": "required"}),
        ("weather", {"tool_choice": {"type": "function", "name": "weather"}}),
    ],
)
async def test_a_choice_among_tools(choice: str, fields: dict[str, Any]) -> None:
    script = [answers.stream(answers.call("c1", "weather", "{}"), answers.ending()), HELLO]
    async with opened(script) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.reply("x", tools=[weather], choice=choice, parallel=False))
        await s["x"]
        s += af.user("Hi") + af.assistant(af.gen("y"))
        await s
    asked, last = (request.json for request in server.received)
    assert asked["parallel_tool_calls"] is False
    assert {"tool_choice": asked["tool_choice"]} == fields if fields else "tool_choice" not in asked
    assert last["tool_choice"] == "none"


async def test_select_takes_log_probabilities_or_lets_the_model_write_a_choice() -> None:
    scored = answers.stream(
        answers.message(answers.logprob("Well", -0.2, ("no", -1.5), ("yes", -2.5)), "!"),
        answers.ending("max_output_tokens"),
    )
    script = [scored, HELLO, answers.text_stream('{"value":"b"}')]
    async with opened(script) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.select("x", ["yes", "no"])) + af.user("And?")
        s += af.assistant(af.select("y", ["a", "b"]))
        assert (await s["x"], await s["y"]) == ("no", "b")
        assert s["x"].choices == {"yes": -2.5, "no": -1.5}
    asked, _, last = (request.json for request in server.received)
    assert asked["max_output_tokens"] == 16  # the fewest that the API accepts
    assert last["text"]["format"]["schema"]["properties"]["value"]["enum"] == ["a", "b"]
    assert last["input"][1] == {"role": "assistant", "content": "no"}


async def test_one_call_answers_several_gens_of_a_turn() -> None:
    async with opened([answers.text_stream("Name: ", "Ada\n", "Age: 36")]) as (flow, server):
        async with flow.state() as s:
            s += af.user("Who?")
            s += af.assistant("Name: ", af.gen("name", stop="\n"), "\nAge: ", af.gen("age"))
            assert [await s["name"], await s["age"]] == ["Ada", "36"]
        assert len(server.received) == 1
