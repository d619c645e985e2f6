"""Answers of Anthropic's API: the client assembles any stream into the whole answer."""

from __future__ import annotations

import functools
import itertools
import json

import anthropic
import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.protocol.events import Usage
from agentflow.server.anthropic.answer import AnswerEvents, AnswerFrame
from agentflow.server.completion.request import AnswerEnded, TextDelta, ToolArguments, ToolCallBegun

FRAME = AnswerFrame("msg_1", "fake", max_tokens=50, max_context=100)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
PARTS = st.lists(st.text(max_size=8) | st.dictionaries(st.text(max_size=4), VALUES, max_size=3), max_size=5)
ENDS = st.sampled_from(
    [
        AnswerEnded(0, "stop", Usage(20, 8, 7)),
        AnswerEnded(0, "length", Usage(20, 8, 50)),
        AnswerEnded(0, "stop", Usage(20, 0, 7), stop="END"),
        AnswerEnded(0, "tool_calls", Usage(20, 0, 7)),
    ]
)


def answer(request: httpx2.Request) -> httpx2.Response:
    """The stream that a request header selects."""
    headers = {"content-type": "text/event-stream"}
    return httpx2.Response(200, headers=headers, content=bytes.fromhex(request.headers["x-stream"]))


@functools.cache
def client() -> anthropic.Anthropic:
    """Created once: that takes longer than a request."""
    http_client = anthropic.DefaultHttpxClient(transport=httpx2.MockTransport(answer))
    return anthropic.Anthropic(api_key="any", http_client=http_client)


def read(stream: bytes):
    """The client's message from this stream."""
    asked = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}
    with client().messages.stream(**asked, extra_headers={"x-stream": stream.hex()}) as events:
        return events.get_final_message()


def deltas_of(parts, pieces, end):
    """Texts, and calls whose arguments come in pieces of the lengths ``pieces``."""
    deltas, num_calls, lengths = [], 0, iter(pieces)
    for part in parts:
        text = part if isinstance(part, str) else json.dumps(part)
        if not isinstance(part, str):
            deltas.append(ToolCallBegun(0, num_calls, f"call_{num_calls}", "weather"))
            num_calls += 1
        while text:
            length = next(lengths, len(text))
            piece, text = text[:length], text[length:]
            is_text = isinstance(part, str)
            deltas.append(TextDelta(0, piece) if is_text else ToolArguments(0, num_calls - 1, piece))
    return [*deltas, end]


def events_of(deltas, cuts=()):
    """All bytes of the stream, the deltas in batches that end at ``cuts``."""
    writer = AnswerEvents(FRAME)
    written = [writer.start(prompt_tokens=20)]
    places = sorted({0, *[cut % len(deltas) for cut in cuts], len(deltas)})
    written += [writer.write(deltas[a:b]) for a, b in itertools.pairwise(places)]
    written.append(writer.end(deltas[-1].usage))
    return b"".join(written)


@given(PARTS, st.lists(st.integers(1, 6)), ENDS, st.lists(st.integers(0, 50), max_size=3))
def test_a_stream_read_by_the_client_is_the_whole_answer(parts, pieces, end, cuts):
    deltas = deltas_of(parts, pieces, end)
    whole = json.loads(msgspec.json.encode(FRAME.whole(deltas)))
    streamed = read(events_of(deltas, cuts)).to_dict()
    assert streamed["content"] == whole["content"]
    for field in ("id", "model", "role", "type", "stop_reason", "stop_sequence", "usage"):
        assert streamed[field] == whole[field]
    # Consecutive texts are one block.
    expected = []
    for part in parts:
        if isinstance(part, dict):
            expected.append(part)
        elif part and expected and isinstance(expected[-1], str):
            expected[-1] += part
        elif part:
            expected.append(part)
    reported = [
        block["input"] if block["type"] == "tool_use" else block["text"] for block in whole["content"]
    ]
    assert reported == expected


@pytest.mark.parametrize("cut", range(1, 34))
def test_arguments_that_were_cut_go_as_far_as_they_go(cut):
    written = '{"city": "Oslo", "days": [1, 2.5]}'[:cut]
    end = AnswerEnded(0, "length", Usage(20, 0, 50))
    deltas = [ToolCallBegun(0, 0, "call_0", "weather"), ToolArguments(0, 0, written), end]
    [block] = FRAME.whole(deltas).content
    shown = json.loads(bytes(block.input))
    assert read(events_of(deltas)).content[0].input == shown
    assert set(shown) <= {"city", "days"}


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (AnswerEnded(0, "stop", Usage(20, 0, 7)), "end_turn", None),
        (AnswerEnded(0, "stop", Usage(20, 0, 7), stop="END"), "stop_sequence", "END"),
        (AnswerEnded(0, "stop", Usage(20, 0, 7), stop=5), "end_turn", None),
        (AnswerEnded(0, "length", Usage(20, 0, 50)), "max_tokens", None),
        (AnswerEnded(0, "length", Usage(50, 0, 50)), "max_tokens", None),
        (AnswerEnded(0, "length", Usage(60, 0, 40)), "model_context_window_exceeded", None),
        (AnswerEnded(0, "tool_calls", Usage(20, 0, 7)), "tool_use", None),
    ],
)
def test_an_answer_says_why_it_ended(end, reason, sequence):
    answer = FRAME.whole([end])
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


def test_the_bytes_of_a_delta_are_the_head_and_the_text():
    writer = AnswerEvents(FRAME)
    writer.write([TextDelta(0, "a")])
    assert writer.write([TextDelta(0, 'b"\n')]) == (
        b"event: content_block_delta\n"
        b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"b\\"\\n"}}\n\n'
    )
