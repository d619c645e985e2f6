"""Messages and tools of requests, as chat templates are given them."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.protocol.chat import CalledTool, Message, ToolChoice, ToolSpec
from agentflow.server.errors import ApiError
from agentflow.server.openai.chat import check_chat_fields
from agentflow.server.openai.request import read_conversation, read_tool_choice, read_tools
from agentflow.server.openai.types import ChatRequest

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


def read(**fields: Any) -> ChatRequest:
    """Decodes a request with these fields, like the server."""
    fields = {"messages": [{"role": "user", "content": "x"}]} | fields
    return msgspec.json.decode(msgspec.json.encode({"model": "m", **fields}), type=ChatRequest)


def turns(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return read_conversation(read(messages=messages).messages, "m")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["system", "developer", "user", "assistant"]),
            st.one_of(TEXTS, st.lists(TEXTS, min_size=1, max_size=3)),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_texts_and_parts(said: list[tuple[str, Any]]) -> None:
    messages = [
        {
            "role": role,
            "content": content
            if isinstance(content, str)
            else [{"type": "text", "text": text} for text in content],
        }
        for role, content in said
    ]
    assert turns(*messages) == tuple(
        Message("system" if role == "developer" else role, "".join(content)) for role, content in said
    )


def test_calls_and_their_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": ' {"at": "x"} '}}
    empty = {"id": "c2", "function": {"name": "now", "arguments": ""}}
    assert turns(
        {"role": "user", "content": "Look.", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call, empty]},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "noon"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "a cat"},
        {"role": "assistant", "refusal": "No.", "content": None, "annotations": [], "tool_calls": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
    ) == (
        Message("user", "Look."),
        Message(
            "assistant",
            "",
            tool_calls=(CalledTool("c1", "look", '{"at": "x"}'), CalledTool("c2", "now", "{}")),
        ),
        Message("tool", "noon", tool_call_id="c2", name="now"),
        Message("tool", "a cat", tool_call_id="c1", name="look"),
        Message("assistant", "No."),
        Message("assistant", "Never."),
    )


def test_tools() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": "one", "description": "D", "parameters": schema}},
        {"type": "function", "function": {"name": "two", "strict": True}},
    ]
    assert read_tools(read(tools=tools).tools or ()) == (
        ToolSpec("one", "D", schema, strict=False),
        ToolSpec("two", "", {"type": "object", "properties": {}, "additionalProperties": False}),
    )


NAMED = {"type": "function", "function": {"name": "one"}}


@pytest.mark.parametrize(
    ("choice", "has_tools", "parallel", "meant"),
    [
        (None, False, None, ToolChoice("none")),
        (None, True, None, ToolChoice("auto")),
        ("auto", False, None, ToolChoice("auto")),
        ("auto", True, True, ToolChoice("auto")),
        ("none", True, None, ToolChoice("none")),
        ("required", True, False, ToolChoice("required", parallel=False)),
        (NAMED, True, None, ToolChoice("required", "one")),
    ],
)
def test_which_tools_are_called(
    choice: Any, has_tools: bool, parallel: bool | None, meant: ToolChoice
) -> None:
    body = read(**({} if choice is None else {"tool_choice": choice}))
    assert read_tool_choice(body.tool_choice, has_tools=has_tools, parallel=parallel) == meant


UNREAD = {
    "prediction": {"prediction": None},
    "parsed": {"messages": [{"role": "assistant", "content": "x", "parsed": None}]},
    "parsed_arguments": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "function": {"name": "f", "arguments": "{}", "parsed_arguments": None}}
                ],
            }
        ]
    },
    "audio": {"audio": None},
    "image_url": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": None}]}]},
}


@pytest.mark.parametrize("field", UNREAD)
def test_of_what_is_not_read_nothing_is_built(field: str) -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | UNREAD[field]
    many = f'"{field}":[{"[]," * 100_000}[]]'
    body = msgspec.json.encode(fields).decode().replace(f'"{field}":null', many).encode()
    num_before = len(gc.get_objects())
    asked = msgspec.json.decode(body, type=ChatRequest)
    assert len(gc.get_objects()) - num_before < 1000
    assert asked.model == "m"


def test_f37_an_empty_suffix_is_no_suffix() -> None:
    check_chat_fields(read(suffix=""), 1)


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    body = read(audio=None, functions=None, suffix=None, prediction=None)
    check_chat_fields(body, 1)
    message = {"role": "assistant", "content": "x", "audio": None, "function_call": None, "parsed": None}
    assert turns(message) == (Message("assistant", "x"),)
    for field in ("audio", "functions", "suffix"):
        with pytest.raises(ApiError) as caught:
            check_chat_fields(read(**{field: []}), 1)
        assert caught.value.param == field
    with pytest.raises(ApiError) as caught:
        turns(message | {"audio": {"id": "a"}})
    assert caught.value.param == "messages[0].audio"
