"""The readers of OpenAI's streams return an answer or raise an agentflow error on any input."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import format as json_format

from agentflow.backends.apis.answers.answer import AnswerCollector
from agentflow.backends.apis.chat.chat_completions import ChatReader, ChunkReader
from agentflow.backends.apis.chat.completions import CompletionReader
from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.http.event_stream import ServerEvent
from agentflow.errors import AgentflowError
from agentflow.protocol.chat import read_reply
from agentflow.protocol.sampling import GenParams

_KEYS = st.sampled_from(
    [
        "choices", "usage", "error", "object", "index", "delta", "finish_reason", "logprobs", "stop_reason",
        "content", "text", "reasoning", "refusal", "tool_calls", "id", "function", "name", "arguments",
        "prompt_tokens", "completion_tokens", "prompt_tokens_details", "tokens", "token", "logprob", "bytes",
        "token_logprobs", "top_logprobs", "code", "message", "status", "unknown",
    ]
)  # fmt: skip
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 600),
    st.floats(-3, 3),
    st.sampled_from(["", "a", "{}", "stop", "length", "tool_calls", "content_filter", "error", "thinking"]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda parts: st.lists(parts, max_size=2) | st.dictionaries(_KEYS, parts, max_size=4),
    max_leaves=12,
)


def _chunks(arguments: st.SearchStrategy[Any], values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    function = st.fixed_dictionaries(
        {}, optional={"name": st.sampled_from(["f", "g"]), "arguments": arguments}
    )
    call = st.fixed_dictionaries(
        {"function": function},
        optional={"index": st.sampled_from([0, 1, None]), "id": st.sampled_from(["c1", "c2", ""])},
    )
    delta = st.fixed_dictionaries(
        {},
        optional={
            "content": st.sampled_from(["a", "b!", "", None]),
            "reasoning": values,
            "tool_calls": st.lists(call, max_size=2),
        },
    )
    choice = st.fixed_dictionaries(
        {"index": st.just(0), "delta": delta},
        optional={
            "text": st.sampled_from(["a", "b!"]),
            "finish_reason": st.sampled_from(["stop", "length", None]),
        },
    )
    return st.fixed_dictionaries({"choices": st.lists(choice, max_size=2)}, optional={"usage": values})


_SOUND = _chunks(st.sampled_from(["{}", '{"a":1}']), st.none())
_ANY = st.one_of(_chunks(_LEAVES, _VALUES), st.dictionaries(_KEYS, _VALUES, max_size=4), _VALUES)
_END = {"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]}
_STREAMS = st.one_of(
    st.lists(_SOUND, max_size=8).map(lambda chunks: [*chunks, _END]),
    st.lists(st.one_of(_SOUND, _SOUND, _ANY), max_size=8),
)


@pytest.mark.parametrize("kind", [ChatReader, CompletionReader])
@given(_STREAMS, st.booleans(), st.booleans())
def test_any_events_give_an_answer_or_an_error(
    kind: type[ChunkReader], chunks: list[Any], is_reply: bool, is_held: bool
) -> None:
    shown: list[str] = []
    answer = AnswerCollector(GenParams(stop=("!",)), shown.append, is_reply=is_reply, is_held=is_held)
    reader = kind(answer, ErrorMapping("server", "m"), 100)
    try:
        for chunk in chunks:
            reader.event(ServerEvent("", json.dumps(chunk).encode()))
            if reader.is_left:
                break
        else:
            reader.event(ServerEvent("", b"[DONE]"))
    except AgentflowError:
        return
    assert not (is_held and shown)
    generated = answer.deliver()
    assert generated.finish_reason in ("eos", "stop", "length")
    assert "!" not in answer.text
    if is_reply:
        reply = read_reply(generated.text)
        assert (reply.text, reply.tool_calls) == (answer.text, answer.calls)
        assert generated.text.startswith("".join(shown))
    else:
        assert generated.text == answer.text == "".join(shown)


def test_a_whole_completion_is_read_like_its_stream() -> None:
    answers_read: list[Any] = []
    for key, done in (("delta", [b"[DONE]"]), ("message", [])):
        calls = [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"a":1}'}},
        ]
        said = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": calls}
        usage = {"prompt_tokens": 9, "completion_tokens": 3}
        choice = {"index": 0, "finish_reason": "tool_calls", "logprobs": None, key: said}
        answer = AnswerCollector(GenParams(), lambda text: None, is_reply=True)
        sink = ChatReader(answer, ErrorMapping("a server", "m"), 10)
        for data in (json.dumps({"choices": [choice], "usage": usage}).encode(), *done):
            sink.event(ServerEvent("", data))
        sink.close()
        answers_read.append((answer.deliver(), answer.calls))
    assert answers_read[0] == answers_read[1]
    assert [call.name for call in answers_read[0][1]] == ["f", "g"]


ARGUMENTS = st.sampled_from(
    ["{}", '{"a": 1}', '{"a":1e999}', '{"a": 12345678901234567890123}', '{"b":"\u00e9"}']
)
WHOLE_CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "g"]), ARGUMENTS, st.booleans(), st.booleans()), min_size=1, max_size=3
)


@given(WHOLE_CALLS, st.sampled_from(["", "Hi"]))
def test_f37_calls_of_a_whole_completion_are_read_like_those_of_a_stream(
    made: list[tuple[str, str, bool, bool]], text: str
) -> None:
    """Some servers send no ids, or arguments as objects."""
    calls = [
        b'{"id": %b, "type": "function", "function": {"name": "%b", "arguments": %b}'
        % (
            b'"c%d"' % number if has_id else b"null",
            name.encode(),
            arguments.encode() if is_object else json.dumps(arguments).encode(),
        )
        for number, (name, arguments, has_id, is_object) in enumerate(made)
    ]
    said = b'{"role": "assistant", "content": "%b", "tool_calls": [%b]}'
    choice = b'{"choices": [{"index": 0, "finish_reason": %b, "%b": %b}]}'
    parts = [b'%b, "index": %d}' % (call, number) for number, call in enumerate(calls)]
    streamed = [
        choice % (b"null", b"delta", said % (text.encode() * (not n), part)) for n, part in enumerate(parts)
    ]
    whole = [choice % (b'"tool_calls"', b"message", said % (text.encode(), b"}, ".join(calls) + b"}"))]
    found: list[Any] = []
    for events in ([*streamed, choice % (b'"tool_calls"', b"delta", b"{}")], whole):
        answer = AnswerCollector(GenParams(), lambda text: None, is_reply=True)
        sink = ChatReader(answer, ErrorMapping("a server", "m"), 10)
        for data in events:
            sink.event(ServerEvent("", data))
        sink.close()
        found.append((answer.text, [(call.name, call.arguments) for call in answer.calls]))
    assert found[0] == found[1]
    compact = [(name, json_format(a.encode(), indent=-1).decode() if o else a) for name, a, _, o in made]
    assert found[0][1] == compact


@pytest.mark.parametrize(
    "arguments", [b"[1]", b"1", b'{"a": "\xff"}', b'"\xff"', b'"\\ud800"', b'{"a": "\xe2"}']
)
@pytest.mark.parametrize("key", [b"delta", b"message"])
def test_f37_arguments_that_are_no_text_are_an_error_of_the_server(arguments: bytes, key: bytes) -> None:
    call = b'{"index": 0, "id": "c", "function": {"name": "f", "arguments": %b}}' % arguments
    data = b'{"choices": [{"index": 0, "finish_reason": "stop", "%b": {"tool_calls": [%b]}}]}' % (key, call)
    sink = ChatReader(AnswerCollector(GenParams(), lambda text: None), ErrorMapping("a server", "m"), 10)
    with pytest.raises(AgentflowError):
        sink.event(ServerEvent("", data))
