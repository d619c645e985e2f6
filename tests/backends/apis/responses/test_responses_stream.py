"""The reader of the streams and whole answers of OpenAI's responses API: stops, and ends that are errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.apis import responses_answers as answers

from agentflow.backends.apis.answers.answer import AnswerCollector
from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.http.event_stream import EventReader
from agentflow.backends.apis.responses.responses_stream import ResponsesReader, response_events
from agentflow.errors import AgentflowError, EngineFailed, ProtocolError, RequestRefused, ServerLost
from agentflow.protocol.chat import read_reply
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import Generated

ERRORS = ErrorMapping("OpenAI", "gpt-5.1")


def read(events: list[bytes], *, is_reply: bool = True, params: GenParams | None = None) -> Generated:
    """The answer of a stream."""
    shown: list[str] = []
    answer = AnswerCollector(params or GenParams(), shown.append, is_reply=is_reply)
    sink = ResponsesReader(answer, ERRORS, 100)
    for event in EventReader().push(b"".join(events)):
        if not (sink.is_over or sink.is_left):
            sink.event(event)
    if not (sink.is_over or sink.is_left):
        sink.close()
    generated = answer.deliver()
    assert generated.text.startswith("".join(shown))
    return generated


def read_whole(response: bytes, *, params: GenParams | None = None) -> AnswerCollector:
    """The answer in a whole response, as batches have it."""
    answer = AnswerCollector(params or GenParams(), lambda text: None, is_reply=True)
    sink = ResponsesReader(answer, ERRORS, 100)
    for event in response_events(response):
        sink.event(event)
    sink.close()
    return answer


@pytest.mark.parametrize(
    "parts",
    [
        (
            answers.reasoning(["Lét ", "me."], ["Then."], encrypted="gAAA"),
            answers.message("Grüße, ", "Wörld 🎉", index=1),
            answers.call("c1", "find", '{"ä":', ' "ö"}', index=2),
            answers.ending(usage=answers.usage(28, 9, cached=16, reasoning=4)),
        ),
        (answers.message("He", phase="final_answer"), answers.ending("max_output_tokens")),
        (answers.ending(),),
    ],
    ids=["items", "incomplete", "nothing"],
)
def test_a_whole_response_is_read_like_its_stream(parts: tuple[Any, ...]) -> None:
    found = read_whole(answers.whole(*parts))
    assert found.deliver() == read(answers.events(answers.beginning(), *parts))
    native = AnswerCollector(GenParams(), lambda text: None, is_reply=True)
    sink = ResponsesReader(native, ERRORS, 100)
    for event in EventReader().push(b"".join(answers.events(*parts))):
        sink.event(event)
    assert found.native == native.native


def test_a_whole_response_is_cut_at_stops_and_charged() -> None:
    response = answers.whole(
        answers.message("one two"),
        answers.message("three", index=1),
        answers.ending(usage=answers.usage(9, 7)),
    )
    found = read_whole(response, params=GenParams(stop=("two",)))
    assert (found.text, found.finish_reason) == ("one ", "stop")
    assert found.usage.output_tokens == 7


@pytest.mark.parametrize("text", ["", "First. "])
def test_f37_a_refusal_in_a_whole_response_is_an_error(text: str) -> None:
    """It may follow other text, as in a stream."""
    content = [
        {"type": "output_text", "text": text, "annotations": []},
        {"type": "refusal", "refusal": "No."},
    ]
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}
    with pytest.raises(RequestRefused, match=r"No\."):
        read_whole(json.dumps({"status": "completed", "output": [item]}).encode())


def test_whole_responses_have_log_probabilities() -> None:
    part = {"token": "yes", "logprob": -0.5, "top_logprobs": [{"token": "yes", "logprob": -0.5}]}
    content = [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": [part]}]
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}
    response = json.dumps({"status": "completed", "output": [item]}).encode()
    found = read_whole(response, params=GenParams(top_logprobs=1))
    assert [(token.text, token.logprob) for token in found.tokens] == [("yes", -0.5)]
    assert found.text == "yes"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (answers.whole(answers.refusal("No."), answers.ending()), RequestRefused),
        (answers.whole(answers.failed("server_error", "Sorry.")), EngineFailed),
        (b'{"status": "cancelled", "output": []}', ServerLost),
        (b'{"status": "completed", "output": 3}', ProtocolError),
        (b'{"status": "completed", "output": [{"type": "message", "content": 3}]}', ProtocolError),
        (b"no JSON", ProtocolError),
    ],
)
def test_whole_responses_without_an_answer(response: bytes, expected: type[AgentflowError]) -> None:
    with pytest.raises(expected):
        read_whole(response)


def test_items_may_come_all_at_once() -> None:
    message, call = answers.message("Hello"), answers.call("c1", "find", '{"a": 1}', index=1)
    whole = answers.events(message[0], message[-1], call[0], call[-1], answers.ending())
    reply = read_reply(read(whole).text)
    assert (reply.text, reply.tool_calls[0].arguments) == ("Hello", '{"a": 1}')


def test_unknown_events_and_items_are_ignored() -> None:
    unknown = [
        {"type": "response.brand_new", "delta": 3},
        {"type": "response.output_item.added", "output_index": 0, "item": {"type": "new_call"}},
        {"type": "response.output_item.done", "output_index": 0, "item": {"type": "new_call", "content": 3}},
    ]
    events = answers.events(answers.beginning(), unknown, answers.message("Hi", index=1), answers.ending())
    assert read(events, is_reply=False).text == "Hi"


def test_a_stop_ends_the_text_before_the_server_does() -> None:
    events = answers.events(answers.beginning(), answers.message("one <", "/end> two"))
    found = read(events, is_reply=False, params=GenParams(stop=("</end>",)))
    assert (found.text, found.finish_reason) == ("one ", "stop")
    assert found.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (answers.ending("content_filter"), RequestRefused),
        (answers.ending("max_messages"), EngineFailed),
        (answers.failed("server_error", "Oh"), EngineFailed),
        (answers.failed("invalid_prompt", "No."), RequestRefused),
    ],
)
def test_ends_that_are_errors(last: Any, error: type[AgentflowError]) -> None:
    with pytest.raises(error):
        read(answers.events(answers.message("Hi"), last), is_reply=False)
