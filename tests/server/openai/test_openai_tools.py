"""Tools with OpenAI's own client: calls whole and streamed, loops that answer them, the typed helpers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import httpx2
import jsonschema
import openai
import pydantic
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine
from support.logit_runner import logit_runner
from support.server.http_clients import CLIENTS, ClientKind, only_asyncio
from support.server.openai_peer import async_client, called, sync_client
from support.server.scripted_model import scripted_server

ASKED: list[Any] = [{"role": "user", "content": "How is the weather?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
CALLS = (
    'Let me look.\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    '\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
)
REPORT = "Oslo: sunny. Rome: rain."
ANSWERS = {"Oslo": "sunny", "Rome": "rain"}


class Weather(pydantic.BaseModel):
    """Returns the weather."""

    city: Literal["Oslo", "Rome"]
    exact: bool


class Report(pydantic.BaseModel):
    """What it is like."""

    is_sunny: bool


def scripted(before: str) -> str:
    """Calls the weather tool, and repeats its result."""
    return REPORT if "sunny" in before else CALLS


anyio_backend = pytest.fixture(only_asyncio)


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """Its model follows the script."""
    with scripted_server(scripted) as running:
        yield running


@pytest.fixture(scope="module")
def any_text() -> Iterator[ApiServer]:
    """Its model writes any text."""
    with api_server(FakeEngine(runner=logit_runner(max_context=1024))) as running:
        yield running


def results_of(calls: Any) -> list[Any]:
    """What an application does with calls."""
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": ANSWERS[json.loads(call.function.arguments)["city"]],
        }
        for call in calls
    ]


@pytest.mark.parametrize("way", ["create", "stream"])
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_loop(server: ApiServer, kind: ClientKind, way: str) -> None:
    ask = partial(called, server, kind, f"chat.completions.{way}", model=MODEL, tools=[WEATHER, NOW])
    messages = [*ASKED]
    first = ask(messages=messages)
    message = first.choices[0].message
    messages += [message, *results_of(message.tool_calls)]
    second = ask(messages=messages)
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is not None
    assert message.content.strip() == "Let me look."
    assert message.tool_calls is not None
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 2
    assert all(call.type == "function" and call.function.name == "weather" for call in message.tool_calls)
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
        {"city": "Oslo"},
        {"city": "Rome"},
    ]
    assert second.choices[0].message.content == REPORT
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason == "stop"


@pytest.mark.anyio
async def test_a_loop_of_streams(server: ApiServer) -> None:
    messages = [*ASKED]
    async with async_client(server) as client:
        async with client.chat.completions.stream(model=MODEL, messages=messages, tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            message = (await stream.get_final_completion()).choices[0].message
        messages += [message, *results_of(message.tool_calls)]
        async with client.chat.completions.stream(model=MODEL, messages=messages, tools=[WEATHER]) as stream:
            second = await stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "content.delta"} <= set(kinds)
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls or ()] == [
        "Oslo",
        "Rome",
    ]
    assert second.choices[0].message.content == REPORT


def test_the_chunks_of_calls(server: ApiServer) -> None:
    with sync_client(server) as client:
        chunks = list(
            client.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER], stream=True)
        )
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    begun = [part for part in parts if part.id is not None]
    assert [(part.index, part.type, part.function.name) for part in begun if part.function] == [
        (0, "function", "weather"),
        (1, "function", "weather"),
    ]
    for index, city in enumerate(ANSWERS):
        arguments = [part.function.arguments for part in parts if part.index == index and part.function]
        assert json.loads("".join(one or "" for one in arguments)) == {"city": city}
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["tool_calls"]
    assert "<tool_call>" not in "".join(delta.content or "" for delta in deltas)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "Weather"}}], ids=["required", "named"]
)
@pytest.mark.parametrize("way", ["parse", "stream"])
@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_parsed_arguments_are_always_valid(
    any_text: ApiServer, choice: Any, seed: int, kind: ClientKind, way: str
) -> None:
    parsed = called(
        any_text,
        kind,
        f"chat.completions.{way}",
        model=MODEL,
        messages=ASKED,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice=choice,
        parallel_tool_calls=False,
        seed=seed,
    )
    assert parsed.choices[0].finish_reason == "tool_calls"
    message = parsed.choices[0].message
    assert message.content is None
    [call] = message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)


@pytest.mark.parametrize("way", ["parse", "stream"])
def test_either_calls_or_the_requested_format(any_text: ApiServer, way: str) -> None:
    reported = []
    for seed in range(12):
        parsed = called(
            any_text,
            "sync",
            f"chat.completions.{way}",
            model=MODEL,
            messages=ASKED,
            tools=[openai.pydantic_function_tool(Weather)],
            response_format=Report,
            parallel_tool_calls=False,
            seed=seed,
        )
        message, reason = parsed.choices[0].message, parsed.choices[0].finish_reason
        if message.tool_calls:
            assert (reason, message.content) == ("tool_calls", None)
            assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)
        else:
            assert reason == "stop"
            assert isinstance(message.parsed, Report)
        reported.append(bool(message.tool_calls))
    assert set(reported) == {True, False}


PLACE = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
SELF_REFERRING = {
    "of its definitions": {"$ref": "#/$defs/Place", "$defs": {"Place": PLACE}},
    "of its root": {"type": "object", "properties": {"city": {"enum": ["Oslo"]}, "inner": {"$ref": "#"}}},
    "of its members": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "other": {"$ref": "#/properties/city"}},
        "required": ["other"],
    },
}


@pytest.mark.parametrize("which", SELF_REFERRING)
def test_a_schema_that_is_a_reference_or_has_one_to_itself(any_text: ApiServer, which: str) -> None:
    schema = SELF_REFERRING[which]
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": schema}}
    with sync_client(any_text) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=ASKED, tools=[tool], tool_choice="required", seed=1, max_tokens=200
        )
    for call in answer.choices[0].message.tool_calls or ():
        if answer.choices[0].finish_reason != "length":
            jsonschema.validate(json.loads(call.function.arguments), schema)
        assert call.function.name == "look"


def test_a_truncated_answer_is_taken_back(server: ApiServer) -> None:
    cut = set()
    with sync_client(server) as client:
        for max_tokens in range(1, len(TOKENIZER.encode(CALLS)), 2):
            ask = partial(client.chat.completions.create, model=MODEL, tools=[WEATHER, NOW])
            choice = ask(messages=ASKED, max_tokens=max_tokens).choices[0]
            assert choice.finish_reason == "length"
            assert "Let me look.".startswith((choice.message.content or "").strip())
            calls: Any = choice.message.tool_calls or []
            results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
            answer = ask(messages=[*ASKED, choice.message, *results], max_tokens=5)
            assert answer.usage is not None
            cut.update(call.function.arguments for call in calls)
    assert {"{", '{"city": "Oslo"}'} <= {text[:1] for text in cut} | cut


def test_a_stream_of_nothing_but_a_call_has_no_content(any_text: ApiServer) -> None:
    with sync_client(any_text) as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=ASKED, tools=[WEATHER], tool_choice="required", stream=True, seed=1
            )
        )
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert (deltas[0].role, deltas[0].content) == ("assistant", None)
    assert all(delta.content is None for delta in deltas)


@pytest.mark.parametrize("way", ["create", "stream"])
@pytest.mark.parametrize("kind", CLIENTS)
def test_tools_that_may_not_be_called(server: ApiServer, kind: ClientKind, way: str) -> None:
    asked: Any = {"messages": ASKED, "tools": [WEATHER], "tool_choice": "none"}
    whole = called(server, kind, f"chat.completions.{way}", model=MODEL, **asked)
    assert whole.choices[0].message.tool_calls is None
    assert whole.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stop", ["Oslo", '"', "}", "}}"])
@pytest.mark.parametrize("stream", [False, True])
def test_f31b_no_stop_applies_inside_a_call(server: ApiServer, stop: str, stream: bool) -> None:
    """Half of a call would be another call."""
    with sync_client(server) as client:
        way = "stream" if stream else "create"
        answer: Any = called(
            server,
            CLIENTS[0],
            f"chat.completions.{way}",
            model=MODEL,
            tools=[WEATHER],
            messages=ASKED,
            stop=[stop],
        )
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        arguments = [json.loads(call.function.arguments) for call in choice.message.tool_calls]
        assert arguments == [{"city": "Oslo"}, {"city": "Rome"}]
        prose = client.chat.completions.create(model=MODEL, tools=[WEATHER], messages=ASKED, stop=["me"])
        assert prose.choices[0].finish_reason == "stop"
        assert prose.choices[0].message.content == "Let "
        assert not prose.choices[0].message.tool_calls


@pytest.mark.parametrize("num_tokens", range(2, 40, 3))
def test_f31b_a_call_that_is_cut_is_no_call(server: ApiServer, num_tokens: int) -> None:
    """In no API: its ending says so, and Ollama's calls are whole."""
    asked = {"model": MODEL, "messages": ASKED, "tools": [WEATHER]}
    with httpx2.Client(base_url=server.url) as client:
        fields = {**asked, "stream": False, "options": {"num_predict": num_tokens}}
        shown = client.post("/api/chat", json=fields).json()
        for call in shown["message"].get("tool_calls") or []:
            assert call["function"]["arguments"] in ({"city": "Oslo"}, {"city": "Rome"})
        openais = client.post("/v1/chat/completions", json={**asked, "max_tokens": num_tokens}).json()
        [choice] = openais["choices"]
        calls = choice["message"].get("tool_calls") or []
        is_whole = all(call["function"]["arguments"].endswith("}") for call in calls)
        assert choice["finish_reason"] == ("length" if not is_whole else choice["finish_reason"])
