"""Ops in line for a server, against a server that is a list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.backends.op_queue import FRAME_OVERHEAD_BYTES, OpQueue
from agentflow.errors import BadArgument, FrameTooLarge, ProtocolError
from agentflow.protocol import ops
from agentflow.protocol.wire import UnreadOps, client_frames, op_reader

FRAME_BYTES = 256
actions = st.lists(
    st.one_of(
        st.builds(lambda n: ("add", n), st.integers(0, 150)),
        st.just(("send", 0)),
        st.just(("deliver", 0)),
        st.just(("ack", 0)),
        st.just(("break", 0)),
    ),
    max_size=60,
)


@given(actions, st.booleans())
def test_every_op_arrives_once_and_in_order(recorded: list[tuple[str, int]], binary: bool) -> None:
    queue = OpQueue(binary=binary, frame_bytes=FRAME_BYTES)
    read = op_reader(binary=binary)
    added: list[ops.Op] = []
    taken: list[ops.Op] = []  # by the server
    on_the_way: list[bytes] = []

    def deliver(data: bytes) -> None:
        assert len(data) <= FRAME_BYTES
        frame = client_frames().decode(data if binary else data.decode())
        assert isinstance(frame, UnreadOps)
        assert 1 <= frame.first <= len(taken) + 1
        taken.extend(map(read, frame.ops[len(taken) + 1 - frame.first :]))

    for action, number in [*recorded, ("break", 0), ("send all", 0)]:
        if action == "add":
            op = ops.Text(number, ("x" * number,))
            assert queue.add(queue.encoded(op)) == len(added) + 1
            added.append(op)
        elif action == "send" and (data := queue.next_frame()) is not None:
            on_the_way.append(data)
        elif action == "deliver" and on_the_way:
            deliver(on_the_way.pop(0))
        elif action == "ack":
            queue.acknowledge(len(taken))
            assert len(queue) == len(added) - len(taken)
            assert queue.is_acknowledged(len(taken))
            assert not queue.is_acknowledged(len(taken) + 1)
        elif action == "break":
            on_the_way.clear()
            queue.resume(len(taken))
        elif action == "send all":
            while (data := queue.next_frame()) is not None:
                deliver(data)
    assert taken == added


@given(st.integers(1, 40), st.booleans())
def test_frames_are_filled(num_ops: int, binary: bool) -> None:
    queue = OpQueue(binary=binary, frame_bytes=FRAME_BYTES)
    data = queue.encoded(ops.Seal(1))
    for _ in range(num_ops):
        queue.add(data)
    frames = []
    while (frame := queue.next_frame()) is not None:
        frames.append(frame)
    per_frame = (FRAME_BYTES - FRAME_OVERHEAD_BYTES + 1) // (len(data) + 1)
    assert len(frames) <= -(-num_ops // per_frame)


@pytest.mark.parametrize("binary", [True, False])
def test_the_largest_op_that_is_taken_makes_a_frame_within_the_limit(binary: bool) -> None:
    queue = OpQueue(binary=binary, frame_bytes=FRAME_BYTES)
    # Numbers as large as they get, so that the frame's own part is as large as it gets.
    queue._num_acked = 2**63
    largest = ops.Text(1, ("",))
    room = FRAME_BYTES - FRAME_OVERHEAD_BYTES
    while len(queue.encoded(largest)) < room:
        largest = ops.Text(1, (str(largest.parts[0]) + "x",))
    with pytest.raises(FrameTooLarge, match=r"text: .* 193 bytes.* 256 bytes"):
        queue.encoded(ops.Text(1, (str(largest.parts[0]) + "x",)))
    data = queue.encoded(largest)
    queue.add(data)
    frame = queue.next_frame()
    assert frame is not None
    assert FRAME_BYTES - FRAME_OVERHEAD_BYTES < len(frame) <= FRAME_BYTES


def test_an_op_that_cannot_be_encoded_is_a_bad_argument() -> None:
    queue = OpQueue(binary=True, frame_bytes=FRAME_BYTES)
    with pytest.raises(BadArgument):
        queue.encoded(ops.Text(1, ("\udfff",)))
    assert len(queue) == 0


def test_acknowledging_an_unsent_op_is_a_protocol_error() -> None:
    queue = OpQueue(binary=True, frame_bytes=FRAME_BYTES)
    queue.add(queue.encoded(ops.Seal(1)))
    with pytest.raises(ProtocolError, match=r"op 1.* 0 "):
        queue.acknowledge(1)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("num_bytes", [1, 1_000, 10_000, 50_001])
def test_an_upload_is_cut_to_the_frames_of_the_server(binary: bool, num_bytes: int):
    queue = OpQueue(binary=binary, frame_bytes=4_096)
    data = bytes(index % 251 for index in range(num_bytes))
    source = "sha256:" + "f" * 64
    parts = queue.fitting(ops.Upload(source, 2 * num_bytes, num_bytes, data, "video"))
    assert b"".join(part.data for part in parts) == data
    at = num_bytes
    for part in parts:
        assert part.at == at
        at += len(part.data)
    assert {(part.source, part.size, part.kind) for part in parts} == {(source, 2 * num_bytes, "video")}
    for part in parts:
        queue.encoded(part)  # fits
    text = ops.Text(1, ("x" * num_bytes,))
    assert queue.fitting(text) == (text,)


@given(st.text(max_size=3_000), st.booleans(), st.booleans())
def test_f37_a_provided_text_is_cut_to_the_frames_of_the_server(text: str, binary: bool, more: bool) -> None:
    queue = OpQueue(binary=binary, frame_bytes=FRAME_BYTES)
    parts = queue.fitting(ops.Provide(2**63, text, more=more))
    assert all(isinstance(part, ops.Provide) and part.var == 2**63 for part in parts)
    assert "".join(part.text for part in parts) == text
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [more]
    for part in parts:
        queue.encoded(part)  # fits
