"""Tools with OpenAI's own client: its stream helper, its typed helpers, and the chunks of calls."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from support.api_server import MODEL, ApiServer
from support.server.apis import CHAT, ask
from support.server.http_clients import CLIENTS, ClientKind, only_asyncio
from support.server.module_servers import module_fixture
from support.server.openai_peer import any_text_server, async_client, called, sync_client
from support.server.scripted_model import scripted_server

ASKED: list[Any] = [{"role": "user", "content": "How is the weather?"}]
CITY = {"enum": ["Oslo", "Rome"]}
PLACE = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
CALLS = (
    'Let me look.\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    '\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
)
REPORT = "Oslo: sunny. Rome: rain."


class Weather(pydantic.BaseModel):
    """Returns the weather."""

    city: Literal["Oslo", "Rome"]
    exact: bool


class Report(pydantic.BaseModel):
    """What it is like."""

    is_sunny: bool


anyio_backend = pytest.fixture(only_asyncio)


server = module_fixture(scripted_server, lambda before: REPORT if "sunny" in before else CALLS)
"""Its model calls the tool twice, and repeats its result."""


any_text = pytest.fixture(any_text_server, scope="module")


@pytest.mark.anyio
async def test_a_loop_of_the_stream_helper(server: ApiServer) -> None:
    messages = [*ASKED]
    async with async_client(server) as client:
        async with client.chat.completions.stream(model=MODEL, messages=messages, tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            message = (await stream.get_final_completion()).choices[0].message
        calls = message.tool_calls or ()
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
        messages += [message, *results]
        async with client.chat.completions.stream(model=MODEL, messages=messages, tools=[WEATHER]) as stream:
            second = await stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "content.delta"} <= set(kinds)
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Oslo", "Rome"]
    assert second.choices[0].message.content == REPORT


@pytest.mark.parametrize("is_required", [False, True])
def test_the_chunks_of_calls(server: ApiServer, any_text: ApiServer, is_required: bool) -> None:
    more: Any = {"tool_choice": "required", "seed": 1} if is_required else {}
    with sync_client(any_text if is_required else server) as client:
        create = client.chat.completions.create
        chunks = list(create(model=MODEL, messages=ASKED, tools=[WEATHER], stream=True, **more))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
    begun = [(part.index, part.type, part.function.name) for part in parts if part.id and part.function]
    assert begun == [(index, "function", "weather") for index in range(len(begun))]
    for index in range(len(begun)):
        arguments = [part.function.arguments for part in parts if part.index == index and part.function]
        assert json.loads("".join(one or "" for one in arguments))["city"] in CITY["enum"]
    if is_required:  # a stream of nothing but calls has no content
        assert choices[0].delta.role == "assistant"
        assert {choice.delta.content for choice in choices} == {None}
    else:
        assert len(begun) == 2
        assert "<tool_call>" not in "".join(choice.delta.content or "" for choice in choices)


@pytest.mark.parametrize("way", ["parse", "stream"])
@pytest.mark.parametrize("kind", CLIENTS)
def test_arguments_are_parsed_to_a_model(any_text: ApiServer, kind: ClientKind, way: str) -> None:
    asked: Any = {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required"}
    asked |= {"model": MODEL, "messages": ASKED, "parallel_tool_calls": False, "seed": 1}
    [choice] = called(any_text, kind, f"chat.completions.{way}", **asked).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


@pytest.mark.parametrize("way", ["parse", "stream"])
def test_either_calls_or_the_requested_format(any_text: ApiServer, way: str) -> None:
    asked: Any = {"tools": [openai.pydantic_function_tool(Weather)], "response_format": Report}
    asked |= {"model": MODEL, "messages": ASKED, "parallel_tool_calls": False}
    reported = set()
    for seed in range(12):
        [choice] = called(any_text, "sync", f"chat.completions.{way}", **asked, seed=seed).choices
        message = choice.message
        if message.tool_calls:
            assert (choice.finish_reason, message.content) == ("tool_calls", None)
            assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)
        else:
            assert choice.finish_reason == "stop"
            assert isinstance(message.parsed, Report)
        reported.add(bool(message.tool_calls))
    assert reported == {True, False}


SELF_REFERRING = {
    "of its definitions": {"$ref": "#/$defs/Place", "$defs": {"Place": PLACE}},
    "of its root": {"type": "object", "properties": {"city": CITY, "inner": {"$ref": "#"}}},
    "of its members": {
        "type": "object",
        "properties": {"city": CITY, "other": {"$ref": "#/properties/city"}},
        "required": ["other"],
    },
}


@pytest.mark.parametrize("which", SELF_REFERRING)
def test_a_schema_that_is_a_reference_or_has_one_to_itself(any_text: ApiServer, which: str) -> None:
    schema = SELF_REFERRING[which]
    tools = [{"name": "look", "parameters": schema}]
    answer = ask(any_text, CHAT, ASKED, tools=tools, choice="required", seed=1, max_tokens=200)
    for call in answer.calls:
        assert call.name == "look"
        if answer.reason != "length":
            jsonschema.validate(call.arguments, schema)
