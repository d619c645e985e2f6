"""Events as frames: nothing lost, nothing reordered, every frame within the limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.protocol.events import Delta, ErrorInfo, Event, Reached, StateFailed, Usage, Value, VarFailed
from agentflow.protocol.wire import Events, server_frames
from agentflow.server.websocket import frames
from agentflow.server.websocket.frames import event_frames

LIMIT = 4096
# Of up to twice the limit, and short ones.
texts = st.builds(lambda text, times: text * times, st.text(max_size=40), st.sampled_from([1, 1, 100, 200]))
events = st.one_of(
    st.builds(Delta, st.integers(1, 3), st.integers(0, 9), texts),
    st.builds(Delta, st.integers(1, 3), st.integers(0, 9), texts, texts, st.integers(0, 9)),
    st.builds(Value, st.integers(1, 3), st.integers(0, 9), texts, st.just("eos"), st.just(Usage(1, 2, 3))),
    st.builds(Reached, st.integers(1, 3), st.integers(1, 9)),
    st.builds(StateFailed, st.integers(1, 3), st.builds(ErrorInfo, st.just("run_failed"), texts)),
)


def _pieces(received: list[Event]) -> list[tuple[int, int, str]]:
    """Texts by variable and position, with adjacent texts joined."""
    found = [(event.var, event.at, event.text) for event in received if isinstance(event, Delta | Value)]
    return _merged([piece for piece in found if piece[2]])


def _reasoning(received: list[Event]) -> list[tuple[int, int, str]]:
    deltas = [event for event in received if isinstance(event, Delta)]
    return _merged([(one.var, one.reasoning_at, one.reasoning) for one in deltas if one.reasoning])


def _merged(pieces: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    merged: list[tuple[int, int, str]] = []
    for var, at, text in pieces:
        if merged and merged[-1][0] == var and merged[-1][1] + len(merged[-1][2]) == at and at:
            merged[-1] = (var, merged[-1][1], merged[-1][2] + text)
        else:
            merged.append((var, at, text))
    return merged


@given(st.lists(events, min_size=2, max_size=12), st.booleans())
def test_frames_carry_all_events_in_order_within_the_limit(given_events: list[Event], binary: bool) -> None:
    received: list[Event] = []
    for data in event_frames(7, given_events, frame_bytes=LIMIT, binary=binary):
        assert len(data) <= LIMIT
        frame = server_frames().decode(data if binary else data.decode())
        assert isinstance(frame, Events)
        assert frame.ack == 7
        received += frame.events
    assert _pieces(received) == _pieces(given_events)
    assert _reasoning(received) == _reasoning(given_events)
    # A cut Value becomes deltas and then itself; everything else stays one event.
    ends = [event for event in received if not isinstance(event, Delta)]
    expected = [event for event in given_events if not isinstance(event, Delta)]
    assert [type(event) for event in ends] == [type(event) for event in expected]
    for end, event in zip(ends, expected, strict=True):
        if isinstance(end, StateFailed) and isinstance(event, StateFailed):
            assert end.error.code == event.error.code
            assert end == event or event.error.message.startswith(
                end.error.message.removesuffix("… (shortened)")
            )


@pytest.mark.parametrize("binary", [True, False])
def test_much_text_is_sent_in_several_frames_that_fit_well(
    monkeypatch: pytest.MonkeyPatch, binary: bool
) -> None:
    monkeypatch.setattr(frames, "MAX_SENT_CHARS", 100)
    value = Value(2, 0, "b" * 1_000, "eos", Usage(1, 2, 3))
    sent: list[Event] = [Delta(1, 5, "a" * 150), value, Reached(1, 1), Delta(3, 0, "", "c" * 150, 7)]
    received: list[Event] = []
    for data in event_frames(7, sent, frame_bytes=10**6, binary=binary):
        frame = server_frames().decode(data if binary else data.decode())
        assert isinstance(frame, Events)
        texts = [one.text for one in frame.events if isinstance(one, Delta | Value)]
        texts += [one.reasoning for one in frame.events if isinstance(one, Delta)]
        assert sum(map(len, texts)) <= 100
        received += frame.events
    assert _pieces(received) == [(1, 5, "a" * 150), (2, 0, "b" * 1_000)]
    assert _reasoning(received) == [(3, 7, "c" * 150)]
    ends = [one for one in received if not isinstance(one, Delta)]
    assert [type(one) for one in ends] == [Value, Reached]


def test_few_events_are_one_frame() -> None:
    few: list[Event] = [Delta(1, 0, "a"), Reached(1, 1), Delta(2, 0, "b")]
    assert len(list(event_frames(1, few, frame_bytes=LIMIT, binary=True))) == 1
    assert len(list(event_frames(1, [], frame_bytes=LIMIT, binary=True))) == 1


def test_a_value_whose_choices_do_not_fit_fails_after_its_text() -> None:
    choices = {f"{number} {'x' * 100}": 0.0 for number in range(100)}
    value = Value(1, 0, "chosen", "choice", Usage(), None, choices)
    received: list[Event] = []
    for data in event_frames(1, [value], frame_bytes=LIMIT, binary=True):
        frame = server_frames().decode(data)
        assert isinstance(frame, Events)
        received += frame.events
    *pieces, failed = received
    text = "".join(piece.text for piece in pieces if isinstance(piece, Delta))
    assert "chosen".startswith(text)
    assert isinstance(failed, VarFailed)
    assert failed.error.code == "frame_too_large"
