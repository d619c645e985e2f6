"""Messages and tools of requests, as chat templates are given them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.server.chat_message import CalledTool, Message, ToolSpec
from agentflow.server.completion_request import ToolChoice
from agentflow.server.openai_chat_types import ChatRequest
from agentflow.server.openai_conversation import conversation_of, tool_choice_of, tools_of

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


def read(**fields: Any) -> ChatRequest:
    """As it comes over the wire."""
    fields = {"messages": [{"role": "user", "content": "x"}]} | fields
    return msgspec.json.decode(msgspec.json.encode({"model": "m", **fields}), type=ChatRequest)


def turns(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return conversation_of(read(messages=messages).messages, "m")


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
    assert tools_of(read(tools=tools).tools or ()) == (
        ToolSpec("one", "D", schema),
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
    tools = (ToolSpec("one", "", {}),) if has_tools else ()
    assert tool_choice_of(body.tool_choice, tools, parallel) == meant
