"""Messages from LangChain to agentflow and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from langchain_agentflow import Agentflow, AgentflowEmbeddings, AgentflowInvalidRequestError, ChatAgentflow
from langchain_agentflow.messages import to_agentflow
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

import agentflow as af

CALL = {"name": "weather", "args": {"city": "Tromsø", "days": 2}, "id": "c1", "type": "tool_call"}


def test_each_kind_of_message_is_a_turn():
    said = [
        SystemMessage("Be brief."),
        HumanMessage("Is it cold?", name="ann"),
        AIMessage("I look.", tool_calls=[CALL]),
        ToolMessage("3 degrees", tool_call_id="c1"),
        ChatMessage(role="developer", content="Now."),
        ChatMessage(role="user", content="So?"),
    ]
    assert to_agentflow(said) == [
        af.Message("system", "Be brief."),
        af.Message("user", "Is it cold?"),
        af.Message(
            "assistant",
            "I look.",
            tool_calls=(af.ToolCall("weather", {"city": "Tromsø", "days": 2}, "c1"),),
        ),
        af.Message("tool", "3 degrees", tool_call_id="c1"),
        af.Message("system", "Now."),
        af.Message("user", "So?"),
    ]


def test_blocks_of_text_are_put_together_and_what_was_reasoning_is_left_out():
    said = AIMessage(
        [
            {"type": "thinking", "thinking": "Hm."},
            {"type": "text", "text": "It is "},
            "cold.",
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {}},
        ]
    )
    assert to_agentflow([said]) == [af.Message("assistant", "It is cold.")]


def test_what_another_model_has_said_is_taken():
    """OpenAI's and Anthropic's have more in a content than text."""
    calls = [{"name": "weather", "args": {"city": "Oslo"}, "id": "c"}]
    said = AIMessage(
        [
            {"type": "reasoning", "summary": []},
            {"type": "text", "text": "I look."},
            {"type": "function_call", "name": "weather", "arguments": "{}", "call_id": "c"},
            {"type": "web_search_call", "id": "w"},
            {"type": "refusal", "refusal": " I do not."},
        ],
        tool_calls=calls,
    )
    [turn] = to_agentflow([said])
    assert (turn.role, turn.content) == ("assistant", "I look. I do not.")
    assert [call.name for call in turn.tool_calls] == ["weather"]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (
            HumanMessage([{"type": "image_url", "image_url": "x"}]),
            "type 'image",
        ),
        (
            HumanMessage([{"type": "reasoning", "reasoning": "x"}]),
            "type 'reasoning'",
        ),
        (FunctionMessage("x", name="f"), "type 'function'"),
        (ChatMessage(role="judge", content="x"), "role 'judge'"),
    ],
)
def test_what_is_no_text_is_refused(message, why):
    model = ChatAgentflow(backend=af.Scripted(["never asked"]))
    with pytest.raises(ModelInvalidRequestError) as caught:
        model.invoke([message])
    assert why in str(caught.value)
    assert type(caught.value) is AgentflowInvalidRequestError
    assert isinstance(caught.value, af.errors.BadArgument)


def test_an_answer_comes_with_its_calls_its_usage_and_its_reason():
    answer = af.Reply("I look.", (af.ToolCall("weather", {"city": "Oslo"}, "c1"),))
    said = ChatAgentflow(backend=af.Scripted([answer])).bind_tools([weather]).invoke("Is it cold?")
    assert said.content == "I look."
    assert said.tool_calls == [{"name": "weather", "args": {"city": "Oslo"}, "id": "c1", "type": "tool_call"}]
    assert said.usage_metadata == {
        "input_tokens": 3,
        "output_tokens": 2,
        "total_tokens": 5,
        "input_token_details": {"cache_read": 0},
    }
    assert said.response_metadata["finish_reason"] == "tool_calls"
    assert said.response_metadata["model_name"] == "scripted"
    assert said.response_metadata["model_provider"] == "agentflow"


def test_a_call_that_was_cut_off_is_an_invalid_one():
    answer = af.Reply("", (af.ToolCall("weather", {}, "c1", '{"city": "Os'),))
    said = ChatAgentflow(backend=af.Scripted([answer])).bind_tools([weather]).invoke("Is it cold?")
    assert said.tool_calls == []
    [call] = said.invalid_tool_calls
    assert (call["name"], call["args"]) == ("weather", '{"city": "Os')


@pytest.mark.parametrize("arguments", ["[1]", '"a"', "null", pytest.param("[" * 100_000, id="deep")])
def test_f37_arguments_that_are_no_object_are_an_invalid_call(arguments: str) -> None:
    call = af.ToolCall("weather", {}, "c1", arguments)
    said = ChatAgentflow(backend=af.Scripted([af.Reply("", (call,))])).bind_tools([weather]).invoke("Cold?")
    assert said.tool_calls == []
    assert [call["name"] for call in said.invalid_tool_calls] == ["weather"]


@pytest.mark.parametrize("kind", [ChatAgentflow, Agentflow, AgentflowEmbeddings])
def test_f37_a_deep_copy_has_the_same_connection(kind: Any) -> None:
    model = kind(backend=af.Scripted("same"))
    for other in (copy.deepcopy(model), model.model_copy(deep=True)):
        assert other.backend is model.backend
        connections = [getattr(one, "_connection", None) or one._own_connection for one in (model, other)]
        assert connections[0] is connections[1]


def test_the_last_chunk_is_marked_and_the_chunks_are_the_answer():
    answer = af.Reply("I look it up.", (af.ToolCall("weather", {"city": "Oslo"}, "c1"),))
    model = ChatAgentflow(backend=af.Scripted(lambda _: answer)).bind_tools([weather])
    chunks = list(model.stream("Is it cold?"))
    assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    said = model.invoke("Is it cold?")
    assert (whole.content, whole.tool_calls, whole.usage_metadata) == (
        said.content,
        said.tool_calls,
        said.usage_metadata,
    )
    assert whole.response_metadata == said.response_metadata


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"
