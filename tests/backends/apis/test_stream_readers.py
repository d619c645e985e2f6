"""The readers of the streams of all APIs: a wrong order, wrong values, and unrequested fields of any content.
The numbers of tokens are read under the names of several providers, and estimated if there are none."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.apis import anthropic_answers, openai_answers, responses_answers

from agentflow.backends.apis.answers.answer import AnswerCollector
from agentflow.backends.apis.answers.reported_usage import MAX_COUNT, usage_in
from agentflow.backends.apis.chat.chat_completions import DONE, ChatReader
from agentflow.backends.apis.chat.completions import CompletionReader
from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.http.event_stream import EventReader, ServerEvent
from agentflow.backends.apis.messages.anthropic_stream import AnthropicErrors, MessagesReader
from agentflow.backends.apis.responses.responses_stream import ResponsesReader
from agentflow.errors import AgentflowError, EngineFailed, ProtocolError, ServerLost
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import GenParams

ERRORS = ErrorMapping("a server", "m")
READERS: dict[str, Callable[[AnswerCollector], Any]] = {
    "chat": lambda answer: ChatReader(answer, ERRORS, 400),
    "completions": lambda answer: CompletionReader(answer, ERRORS, 400),
    "responses": lambda answer: ResponsesReader(answer, ERRORS, 400),
    "messages": lambda answer: MessagesReader(answer, AnthropicErrors("a server", "m"), num_sent=400),
}


def events(*frames: bytes) -> list[ServerEvent]:
    return EventReader().push(b"".join(frames))


STREAMS: dict[str, list[ServerEvent]] = {
    "chat": events(
        *[
            openai_answers.event(chunk)
            for chunk in (
                *openai_answers.reasoning_chunks("Let me", "\n\nThen"),
                *openai_answers.text_chunks("gr", "ün 🎉"),
                *openai_answers.call_chunks(("c1", "find", ['{"ä":', "1}"])),
                *openai_answers.ending("tool_calls", openai_answers.usage(28, 9, cached=16, reasoning=4)),
            )
        ],
        openai_answers.DONE,
    ),
    "completions": events(
        *[
            openai_answers.event({"object": "text_completion", "choices": [{"index": 0, **choice}]})
            for choice in ({"text": "gr"}, {"text": "ün 🎉"}, {"text": "", "finish_reason": "length"})
        ],
        openai_answers.DONE,
    ),
    "responses": events(
        *responses_answers.events(
            responses_answers.beginning(),
            responses_answers.reasoning(["Let me"], ["Then"]),
            responses_answers.message("gr", "ün 🎉", index=1),
            responses_answers.call("c1", "find", '{"ä":', "1}", index=2),
            responses_answers.ending(usage=responses_answers.usage(28, 9, cached=16, reasoning=4)),
        )
    ),
    "messages": events(
        *[
            anthropic_answers.event(part)
            for part in (
                anthropic_answers.beginning(4, cached=16, written=8),
                *anthropic_answers.thinking_block("Let me", "\n\nThen"),
                *anthropic_answers.text_block("gr", "ün 🎉", index=1),
                *anthropic_answers.call_block("c1", "find", '{"ä":', "1}", index=2),
                *anthropic_answers.ending("tool_use", 9, thinking=4),
            )
        ]
    ),
}
# The fields by the name of the object that has them: "" is the event itself.
UNASKED = {
    "chat": {
        "": ("usage", "object", "id", "created", "model", "x"),
        "choices": ("logprobs", "x"),
        "delta": ("role", "x"),
    },
    "completions": {"": ("usage", "object", "id", "x"), "choices": ("logprobs", "x")},
    "responses": {
        "": ("logprobs", "sequence_number", "item_id", "content_index", "x"),
        "response": ("usage", "model", "output", "x"),
    },
    "messages": {
        "": ("usage", "x"),
        "message": ("usage", "content", "model", "x"),
        "delta": ("citation", "x"),
    },
}
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**30), 10**30),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(["", "a", "12"]),
    ),
    lambda parts: (
        st.lists(parts, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens"]
            ),
            parts,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def read(api: str, stream: Iterable[ServerEvent]) -> tuple[Any, ...]:
    """The parts of an answer, and its usage at the end."""
    shown: list[str] = []
    answer = AnswerCollector(GenParams(), shown.append, is_reply=api != "completions")
    reader = READERS[api](answer)
    for event in stream:
        if not reader.is_over:
            reader.event(event)
    if not reader.is_over:
        reader.close()
    generated = answer.deliver()
    assert generated.text.startswith("".join(shown))
    calls = [(call.id, call.name, call.arguments) for call in answer.calls]
    return answer.text, answer.reasoning, calls, generated.finish_reason, answer.usage


EACH_EVENT = pytest.mark.parametrize(
    ("api", "number"), [(api, number) for api, stream in STREAMS.items() for number in range(len(stream))]
)
UNREPEATED = (
    "message_start",
    "content_block_start",
    "response.output_item.added",
    "response.output_item.done",
)


@pytest.mark.parametrize("api", READERS)
def test_a_stream_is_read(api: str) -> None:
    *found, usage = read(api, STREAMS[api])
    if api == "completions":
        assert found == ["grün 🎉", "", [], "length"]
    else:
        assert found == ["grün 🎉", "Let me\n\nThen", [("c1", "find", '{"ä":1}')], "eos"]
        assert usage == Usage(28, 16, 9, reasoning_tokens=4)


@EACH_EVENT
def test_a_duplicated_event_is_an_error_or_harmless(api: str, number: int) -> None:
    events = [*STREAMS[api][: number + 1], *STREAMS[api][number:]]
    if events[number].name in UNREPEATED:
        with pytest.raises(ProtocolError):
            read(api, events)
    else:
        read(api, events)


@EACH_EVENT
def test_a_missing_event_is_an_error_or_harmless(api: str, number: int) -> None:
    """No call or text appears in the place of another."""
    try:
        text, _, calls, *_ = read(api, [*STREAMS[api][:number], *STREAMS[api][number + 1 :]])
    except (ProtocolError, ServerLost):
        return
    assert text in ("grün 🎉", "gr", "ün 🎉")
    assert [name for _, name, _ in calls] == ([] if api == "completions" else ["find"])


@pytest.mark.parametrize("api", READERS)
@given(data=st.data())
def test_no_order_of_events_breaks_the_reader(api: str, data: st.DataObject) -> None:
    with suppress(AgentflowError):
        read(api, data.draw(st.permutations(STREAMS[api])))


def places(value: Any) -> list[tuple[Any, Any]]:
    """The containers and keys of all values in a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, one in inner for place in ((value, key), *places(one))]


ERROR = ServerEvent(
    "error",
    b'{"type": "error", "error": {"type": "invalid_request_error", "message": "max: No.", "code": "c"}}',
)
KINDS = ["failed", "incomplete", "reasoning_text.delta", "refusal.delta", "output_item.done"]
OTHERS = [..., None, True, -5, "", "x", [], {}, [None], {"x": 1}, *[f"response.{kind}" for kind in KINDS]]


@pytest.mark.parametrize("api", READERS)
def test_a_value_that_is_wrong_or_missing_is_an_error_of_the_server_or_harmless(api: str) -> None:
    """Each value of each event, and each type of event in the place of another."""
    sound = [event for event in STREAMS[api] if event.data != DONE]
    others = [*OTHERS, *{json.loads(event.data).get("type") for event in sound}]
    for stream in (sound, [sound[0], ERROR]):
        for number, event in enumerate(stream):
            for (at, _), value in itertools.product(enumerate(places(json.loads(event.data))), others):
                fields = json.loads(event.data)
                container, key = places(fields)[at]
                if value is ...:
                    del container[key]
                else:
                    container[key] = value
                changed = event._replace(data=json.dumps(fields).encode())
                with suppress(AgentflowError):
                    read(api, [*stream[:number], changed, *stream[number + 1 :]])


def replaced(api: str, data: bytes, choose: Callable[[], Any]) -> bytes:
    """An event in which ``choose`` sets the value of each unrequested field."""
    if data == DONE:
        return data
    fields = json.loads(data)
    for place, names in UNASKED[api].items():
        inner = [fields] if not place else fields.get(place) or []
        for one in [inner] if isinstance(inner, dict) else inner:
            for name in names:
                if (value := choose()) is not ...:
                    one[name] = value
    return json.dumps(fields).encode()


@pytest.mark.parametrize("api", READERS)
@given(data=st.data())
def test_fields_that_nobody_asked_for_may_have_any_content(api: str, data: st.DataObject) -> None:
    values = st.one_of(st.just(...), st.just(...), VALUES)
    stream = [
        event._replace(data=replaced(api, event.data, lambda: data.draw(values))) for event in STREAMS[api]
    ]
    *found, usage = read(api, stream)
    *expected, _ = read(api, STREAMS[api])
    assert found == expected
    for tokens in (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens):
        assert isinstance(tokens, int)
        assert 0 <= tokens <= 4 * MAX_COUNT


@pytest.mark.parametrize("api", READERS)
def test_tokens_that_nobody_counts_are_estimated(api: str) -> None:
    stream = [event._replace(data=replaced(api, event.data, lambda: "none")) for event in STREAMS[api]]
    usage = read(api, stream)[-1]
    assert usage.prompt_tokens == 100
    assert 2 <= usage.output_tokens <= 8


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (None, Usage(7, 0, 5)),
        ({"prompt_tokens": 10}, Usage(10, 0, 5)),
        ({"prompt_tokens": 10.0, "completion_tokens": 3, "total_tokens": 13}, Usage(10, 0, 3)),
        ({"prompt_tokens": -1, "completion_tokens": True}, Usage(7, 0, 5)),
        ({"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": None}, Usage(10, 0, 3)),
        # DeepSeek
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 3,
                "prompt_cache_hit_tokens": 8,
                "prompt_cache_miss_tokens": 2,
            },
            Usage(10, 8, 3),
        ),
        ({"prompt_tokens": 10, "completion_tokens": 3, "cached_tokens": 8}, Usage(10, 8, 3)),  # Moonshot
        # OpenAI: the reasoning is part of the output
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 30,
                "total_tokens": 40,
                "completion_tokens_details": {"reasoning_tokens": 20},
            },
            Usage(10, 0, 30, reasoning_tokens=20),
        ),
        # xAI: it is not
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 3,
                "total_tokens": 33,
                "completion_tokens_details": {"reasoning_tokens": 20},
            },
            Usage(10, 0, 23, reasoning_tokens=20),
        ),
        # Google: neither is it, and nothing else says so
        (
            {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 33},
            Usage(10, 0, 23, reasoning_tokens=20),
        ),
    ],
)
def test_usage_of_several_providers(reported: Any, expected: Usage) -> None:
    assert usage_in(reported, Usage(7, 0, 5)).usage == expected


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("stop", "eos"), ("eos_token", "eos"), ("stop_sequence", "stop"), ("model_length", "length")],
)
def test_the_ends_of_answers_by_other_names(reason: str, expected: str) -> None:
    """Some servers send an empty reason until the end."""
    parts = [{"delta": {"content": "a"}, "finish_reason": ""}, {"delta": {}, "finish_reason": reason}]
    stream = [ServerEvent("", json.dumps({"choices": [part]}).encode()) for part in parts]
    text, *_, found, _ = read("chat", [*stream, ServerEvent("", b"[DONE]")])
    assert (text, found) == ("a", expected)


def test_white_space_after_the_last_event() -> None:
    ended = [event for event in STREAMS["chat"] if event.data != b"[DONE]"]
    assert read("chat", [*ended, ServerEvent("", b"[DONE] ")]) == read("chat", STREAMS["chat"])


def test_an_unknown_end_of_an_answer_is_an_error() -> None:
    chunk = {"choices": [{"delta": {"content": "a"}, "finish_reason": "insufficient_system_resource"}]}
    with pytest.raises(EngineFailed):
        read("chat", [ServerEvent("", json.dumps(chunk).encode())])
