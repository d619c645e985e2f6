"""From the messages of Anthropic's API to turns: calls and their results, and turns of one role joined."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.protocol.chat import CalledTool, Message, ToolChoice, ToolSpec
from agentflow.protocol.events import Capabilities
from agentflow.server.anthropic.conversation import read_conversation, read_tool_choice, read_tools
from agentflow.server.anthropic.types import MAX_BLOCKS, MAX_MESSAGES, CountRequest, InputMessage
from agentflow.server.errors import ApiError

WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
CLOCK = {"name": "clock", "description": "The time.", "input_schema": {"type": "object"}, "type": "custom"}

MODEL = Capabilities("fake")


def request(messages, **fields) -> CountRequest:
    body = {"model": "fake", "messages": messages, **fields}
    return msgspec.json.decode(json.dumps(body), type=CountRequest)


def turns(*messages, **fields):
    return read_conversation(request(list(messages), **fields), MODEL)[0]


def says(role, *content):
    return {"role": role, "content": list(content) if len(content) != 1 else content[0]}


def text(said):
    return {"type": "text", "text": said}


def calls(number, name="weather", **arguments):
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": arguments}


def result(number, *content, **fields):
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": [*content], **fields}


def test_calls_and_their_results_are_turns_of_their_own():
    made = turns(
        says("user", "Oslo?"),
        says("assistant", text("Let me see."), calls(1, city="Oslo"), calls(2, "clock")),
        says(
            "user", result(1, text("Sun"), text("ny")), result(2, is_error=True), text("And"), text(" now?")
        ),
        system="Be brief.",
    )
    assert made == (
        Message("system", "Be brief."),
        Message("user", "Oslo?"),
        Message(
            "assistant",
            "Let me see.",
            tool_calls=(
                CalledTool("toolu_1", "weather", '{"city":"Oslo"}'),
                CalledTool("toolu_2", "clock", "{}"),
            ),
        ),
        Message("tool", "Sunny", tool_call_id="toolu_1", name="weather"),
        Message("tool", "Error", tool_call_id="toolu_2", name="clock"),
        Message("user", "And now?"),
    )


def test_results_may_come_in_several_messages_and_in_any_order():
    made = turns(
        says("assistant", [calls(1)]),
        says("assistant", [calls(2, "clock")]),
        says("user", [result(2, text("noon"))]),
        says("user", [{**result(1), "content": "cold", "is_error": True}]),
    )
    assert [(turn.role, turn.content, turn.name) for turn in made[1:]] == [
        ("tool", "noon", "clock"),
        ("tool", "Error: cold", "weather"),
    ]
    assert [call.id for call in made[0].tool_calls] == ["toolu_1", "toolu_2"]
    assert (
        turns(says("assistant", [calls(1)]), says("user", [{**result(1), "content": None}]))[1].content == ""
    )


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([says("assistant", [calls(1)])], "messages", "invalid_value"),
        ([says("assistant", [calls(1)]), says("user", "So?")], "messages[1]", "invalid_value"),
        ([says("assistant", [calls(1)]), says("system", "So?")], "messages[1]", "invalid_value"),
        ([says("user", [result(1)])], "messages[0].content[0].tool_use_id", "invalid_value"),
        (
            [says("assistant", [calls(1)]), says("user", result(1), result(1))],
            "messages[1].content[1].tool_use_id",
            "invalid_value",
        ),
        (
            [says("assistant", calls(1), calls(2)), says("user", result(1), text("So?"))],
            "messages[1]",
            "invalid_value",
        ),
        (
            [says("assistant", [calls(1)]), says("user", text("So?"), result(1))],
            "messages[1].content[1]",
            "invalid_value",
        ),
        ([says("assistant", calls(1), calls(1))], "messages[0].content[1].id", "invalid_value"),
        ([says("assistant", [result(1)])], "messages[0].content[0]", "invalid_value"),
        ([says("user", [calls(1)])], "messages[0].content[0]", "invalid_value"),
        ([says("system", [calls(1)])], "messages[0]", "invalid_value"),
    ],
)
def test_calls_and_results_that_do_not_belong_together_are_refused(messages, param, code):
    with pytest.raises(ApiError) as caught:
        turns(*messages)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert caught.value.code == code


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.lists(st.text(), max_size=3))))
def test_no_two_turns_of_one_role_follow_each_other_and_no_text_is_lost(said):
    first = ("user", ["Hello"])
    made = turns(*[{"role": role, "content": [text(one) for one in texts]} for role, texts in [first, *said]])
    assert all(one.role != other.role for one, other in itertools.pairwise(made))
    joined: list[list[str]] = []
    last = None
    for role, texts in [first, *said]:
        if role == last:
            joined[-1] += ([] if role == "assistant" else ["\n\n"]) + texts
        else:
            joined.append([*texts])
        last = role
    assert [turn.content for turn in made] == ["".join(parts) for parts in joined]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_turn_of_many_messages_is_put_together_once(role):
    """The cost of each message depends on its own content, not on all messages before it."""
    message = InputMessage(role=role, content="x" * 50)
    [turn] = read_conversation(CountRequest(model="fake", messages=[message] * 50_000), MODEL)[0]
    assert len(turn.content) == 50_000 * 50 + (49_999 * 2 if role == "user" else 0)


def test_messages_and_blocks_are_limited():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "anthropic-api.md").read_text(encoding="utf-8")
    assert f"at most {MAX_MESSAGES:,} messages, with at most {MAX_BLOCKS:,} blocks each" in page
    full = request([says("user", [text("x")] * MAX_BLOCKS)] + [says("user", "x")] * (MAX_MESSAGES - 1))
    assert len(full.messages) == MAX_MESSAGES
    with pytest.raises(msgspec.ValidationError, match=f"length <= {MAX_MESSAGES} - at `\\$.messages`"):
        request([says("user", "x")] * (MAX_MESSAGES + 1))
    for content in ([text("x")] * (MAX_BLOCKS + 1), [result(1, *[text("x")] * (MAX_BLOCKS + 1))]):
        with pytest.raises(msgspec.ValidationError, match=f"length <= {MAX_BLOCKS}"):
            request([says("user", content)])


def test_tools_are_converted_unchanged():
    assert read_tools(request([says("user", "x")], tools=[WEATHER, CLOCK]).tools) == (
        ToolSpec("weather", "", {"type": "object"}, strict=False),
        ToolSpec("clock", "The time.", {"type": "object"}, strict=False),
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice("auto")),
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto", None, False)),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", None, False)),
        ({"type": "tool", "name": "clock"}, ToolChoice("required", "clock")),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_the_choice_of_tools_is_kept(choice, expected):
    body = request([says("user", "x")], tools=[WEATHER, CLOCK], tool_choice=choice)
    assert read_tool_choice(body) == expected


def test_without_tools_none_is_called():
    for choice in (None, {"type": "auto"}, {"type": "none"}):
        assert read_tool_choice(request([says("user", "x")], tool_choice=choice)) == ToolChoice("none")
