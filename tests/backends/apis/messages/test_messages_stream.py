"""The reader of Anthropic's streams and whole messages: white space, counts, and arguments."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock, Usage
from hypothesis import given
from hypothesis import strategies as st
from support.apis import anthropic_answers as answers

from agentflow.backends.apis.answers.answer import AnswerCollector
from agentflow.backends.apis.http.event_stream import EventReader, ServerEvent
from agentflow.backends.apis.messages.anthropic_stream import AnthropicErrors, MessagesReader, message_events
from agentflow.errors import AgentflowError, ProtocolError
from agentflow.protocol.chat import read_reply
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import Generated

MODEL = "claude-opus-4-5"
ERRORS = AnthropicErrors("Anthropic", MODEL)


def encoded(*parts: Any) -> list[bytes]:
    """The events of parts."""
    body = answers.stream(*parts).body
    assert not isinstance(body, bytes)
    return [step for step in body if isinstance(step, bytes)]


EVENTS = encoded(
    answers.beginning(4, cached=16, written=8),
    answers.thinking_block("Lét ", "me."),
    answers.text_block("Grüße, ", "Wörld 🎉", index=1),
    answers.call_block("toolu_1", "find", '{"ä":', ' "ö"}', index=2),
    answers.ending("tool_use", 9),
)
MESSAGE = Message(
    id="msg_1",
    type="message",
    role="assistant",
    model=MODEL,
    content=[
        ThinkingBlock(type="thinking", thinking="Lét me.", signature="c2lnbmVk"),
        TextBlock(type="text", text="Grüße, Wörld 🎉"),
        ToolUseBlock(type="tool_use", id="toolu_1", name="find", input={"ä": "ö"}),
    ],
    stop_reason="tool_use",
    usage=Usage(input_tokens=4, cache_read_input_tokens=16, cache_creation_input_tokens=8, output_tokens=9),
)


def read(events: list[bytes], *, lead: str = "", is_reply: bool = True) -> Generated:
    """The answer of a stream."""
    shown: list[str] = []
    answer = AnswerCollector(GenParams(), shown.append, is_reply=is_reply)
    sink = MessagesReader(answer, ERRORS, lead=lead)
    for event in EventReader().push(b"".join(events)):
        sink.event(event)
    if not sink.is_over:
        sink.close()
    generated = answer.deliver()
    assert generated.text.startswith("".join(shown))
    return generated


@given(lead=st.text(" \n", max_size=5), pieces=st.lists(st.text("a \n", max_size=4), max_size=5))
def test_white_space_of_the_context_is_not_repeated(lead: str, pieces: list[str]) -> None:
    events = encoded(answers.beginning(), answers.text_block(*pieces), answers.ending())
    text = "".join(pieces)
    num_equal = next(
        (at for at in range(min(len(lead), len(text))) if lead[at] != text[at]), min(len(lead), len(text))
    )
    assert read(events, lead=lead, is_reply=False).text == text[num_equal:]


def test_a_call_may_have_its_arguments_at_once_or_none() -> None:
    begun = answers.call_block("toolu_1", "find")
    whole = begun[0].model_copy(deep=True)
    whole.content_block.input = {"a": [1]}
    for first, expected in ((begun[0], "{}"), (whole, '{"a":[1]}')):
        events = encoded(answers.beginning(), first, begun[1], answers.ending("tool_use"))
        assert read_reply(read(events).text).tool_calls[0].arguments == expected


def test_later_counts_replace_earlier_ones() -> None:
    events = encoded(
        answers.beginning(4, cached=1, written=2, output=1),
        answers.text_block("x"),
        answers.ending(output=30, input_tokens=5, cache_read_input_tokens=7, cache_creation_input_tokens=0),
    )
    usage = read(events).usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (12, 7, 30)


def test_a_whole_message_is_read_like_its_stream() -> None:
    answers_read: list[Any] = []
    for events in (EventReader().push(b"".join(EVENTS)), message_events(MESSAGE.to_json().encode())):
        answer = AnswerCollector(GenParams(), lambda text: None, is_reply=True)
        sink = MessagesReader(answer, ERRORS)
        for event in events:
            sink.event(event)
        assert sink.is_over
        found = answer.deliver()
        calls = [msgspec.structs.replace(call, arguments="") for call in answer.calls]
        arguments = [json.loads(call.arguments) for call in answer.calls]
        native = json.loads(answer.native or b"{}")
        answers_read.append((answer.text, calls, arguments, found.reasoning, found.usage, native))
    assert answers_read[0] == answers_read[1]


@pytest.mark.parametrize(
    "arguments",
    ["{}", "{ }", '{"a": 1e999}', '{"a": [1.10, 12345678901234567890123]}', '{"\u00e4": "\u00f6"}'],
)
def test_f37_arguments_in_one_piece_are_those_of_a_stream(arguments: str) -> None:
    """The model may write numbers that are no floats."""
    begun = '{"type": "tool_use", "id": "toolu_1", "name": "find", "input": %s}'
    start = '{"type": "content_block_start", "index": 0, "content_block": %s}'
    part = {"type": "input_json_delta", "partial_json": arguments}
    ending = [
        json.dumps({"type": "message_delta", "delta": {"stop_reason": "tool_use"}}),
        '{"type": "message_stop"}',
    ]
    streamed = [
        start % (begun % "{}"),
        json.dumps({"type": "content_block_delta", "index": 0, "delta": part}),
        *ending,
    ]
    whole = '{"content": [%s], "stop_reason": "tool_use"}' % (begun % arguments)
    found = []
    for events in ([ServerEvent("", one.encode()) for one in streamed], message_events(whole.encode())):
        answer = AnswerCollector(GenParams(), lambda text: None, is_reply=True)
        sink = MessagesReader(answer, ERRORS)
        for event in events:
            sink.event(event)
        found.append([(call.name, call.arguments.replace(" ", "") or "{}") for call in answer.calls])
    assert found == [[("find", arguments.replace(" ", ""))]] * 2


@pytest.mark.parametrize("arguments", [b"[1]", b"1", b'"{}"', b'{"a": "\xff"}'])
def test_f37_arguments_that_are_no_object_are_an_error_of_the_server(arguments: bytes) -> None:
    block = b'{"type": "tool_use", "id": "toolu_1", "name": "find", "input": %b}' % arguments
    start = b'{"type": "content_block_start", "index": 0, "content_block": %b}' % block
    sink = MessagesReader(AnswerCollector(GenParams(), lambda text: None), ERRORS)
    with pytest.raises(AgentflowError):
        sink.event(ServerEvent("", start))


NESTED = b'{"content": ' + b"[" * 50_000


@pytest.mark.parametrize(
    "message", [b"{}", b"[]", b"x", b'{"content": [1], "stop_reason": "end_turn"}', NESTED], ids=range(5)
)
def test_a_message_that_is_not_of_the_api_is_an_error(message: bytes) -> None:
    sink = MessagesReader(AnswerCollector(GenParams(), lambda text: None), ERRORS)

    def read_all() -> None:
        for event in message_events(message):
            sink.event(event)

    with pytest.raises(ProtocolError):
        read_all()
