"""The reader of server-sent events gives the same events however the bytes are split."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.backends.apis.http.event_stream import EventReader, ServerEvent
from agentflow.errors import ProtocolError


def read(*chunks: bytes, limit: int = 10_000) -> list[ServerEvent]:
    reader = EventReader(limit)
    return [event for chunk in chunks for event in reader.push(chunk)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [("", b"a")]),
        (b"data:a\n\n", [("", b"a")]),
        (b"data:  a\n\n", [("", b" a")]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [("", b"a"), ("", b"b"), ("", b"c")]),
        (b"data: a\ndata: b\n\n", [("", b"a\nb")]),
        (b"data\n\n", [("", b"")]),
        (b"event: error\ndata: {}\n\ndata: x\n\n", [("error", b"{}"), ("", b"x")]),
        (b"event: lost\n\ndata: x\n\n", [("", b"x")]),
        (b": keep-alive\n\nid: 7\nretry: 10\nunknown: x\nnothing\ndata: a\n\n", [("", b"a")]),
        (b"\xef\xbb\xbfdata: a\n\n", [("", b"a")]),
        ('data: {"text":"Grüße"}\n\n'.encode(), [("", '{"text":"Grüße"}'.encode())]),
        (b"data: a\n", []),  # the event never ends
    ],
)
def test_fields_of_events(stream, events):
    assert read(stream) == events


_LINES = st.sampled_from([b"data: a", "data: ü".encode(), b"data", b"event: e", b": c", b"id: 1", b"x", b""])
_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(_LINES, _ENDS), max_size=30), st.lists(st.integers(0, 200), max_size=20))
def test_splits_do_not_change_events(lines, splits):
    stream = b"".join([line + end for line, end in lines])
    places = sorted({0, len(stream), *[place for place in splits if place < len(stream)]})
    chunks = [stream[start:end] for start, end in itertools.pairwise(places)]
    assert read(*chunks) == read(stream)
    assert read(*[bytes([byte]) for byte in stream]) == read(stream)


@pytest.mark.parametrize(
    "stream",
    [b"data: " + b"x" * 200, b"data: xxxxxxxx\n" * 20, b"unknown: xxxxxxxx\n" * 20, b"x" * 200],
)
def test_events_above_the_limit_are_refused(stream):
    with pytest.raises(ProtocolError):
        read(stream, limit=100)
    with pytest.raises(ProtocolError):
        read(*[bytes([byte]) for byte in stream], limit=100)


def test_the_limit_counts_one_event_without_comments():
    stream = b"data: " + b"x" * 60 + b"\n\n"
    assert len(read(stream * 5, limit=100)) == 5
    assert len(read(b": comment of some length\n" * 50 + stream, limit=100)) == 1
