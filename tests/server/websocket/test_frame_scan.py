"""The values of a websocket frame are counted before it is decoded, without blocking the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.asgi_peer import bench, check_still_served, connected

from agentflow.backends.op_queue import USUAL_FRAME_BYTES
from agentflow.errors import FrameTooLarge
from agentflow.protocol import ops
from agentflow.protocol.bounds.json_bounds import JsonBounds, TooMuchJson
from agentflow.protocol.chat import Conversation, Message, ToolSpec
from agentflow.protocol.events import Reached, Value
from agentflow.protocol.wire import MAX_FRAME_BYTES, Ops, encode
from agentflow.runtime import loop_turns
from agentflow.server.websocket import connection
from agentflow.server.websocket import frames as frame_scan
from agentflow.server.websocket.frames import FRAME_BOUNDS, SMALL_FRAME_BYTES, check_frame

pytestmark = pytest.mark.anyio

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=60,
)


def parts_of(value: Any) -> int:
    """Objects (with one more for each member), lists, texts and the like."""
    if isinstance(value, dict):
        return 1 + sum(1 + parts_of(key) + parts_of(member) for key, member in value.items())
    if isinstance(value, list):
        return 1 + sum(map(parts_of, value))
    return 0 if value is None or isinstance(value, bool | int | float) else 1


def fits(data: bytes, **bounds: int) -> bool:
    given = JsonBounds(**{"values": 10**6, "parts": 10**6, **bounds})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_scan, "FRAME_BOUNDS", given)
        try:
            list(frame_scan._counting_msgpack(data))
        except TooMuchJson:
            return False
    return True


@given(values)
def test_msgpack_is_counted_as_its_decoder_finds_it(value: Any) -> None:
    data, parts = msgspec.msgpack.encode(value), parts_of(value)
    assert fits(data, parts=parts)
    assert parts == 0 or not fits(data, parts=parts - 1)


@pytest.mark.parametrize("num_bytes", [1, 2, 4, 8, 16, 3, 300, 70_000])
def test_extensions_are_stepped_over(num_bytes: int) -> None:
    data = msgspec.msgpack.encode([msgspec.msgpack.Ext(1, b"\x90" * num_bytes), [], []])
    is_fixed = num_bytes in (1, 2, 4, 8, 16)
    assert fits(data, parts=3 + (not is_fixed))
    assert not fits(data, parts=2 + (not is_fixed))


@given(st.binary(max_size=400))
def test_bytes_that_are_no_msgpack_are_counted(data: bytes) -> None:
    fits(data)


def frames(parts: int) -> Iterator[bytes | str]:
    """The frames of a conversation whose tool has ``parts`` lists."""
    tool = ToolSpec("f", "", {"enum": [[]] * parts})
    frame = Ops(1, (ops.Converse(1, Conversation((Message("user", "Hi"),), (tool,))),))
    yield encode(frame, binary=True)
    yield encode(frame, binary=False).decode()


async def check(data: bytes | str) -> None:
    is_binary = isinstance(data, bytes)
    await check_frame(data if is_binary else data.encode(), binary=is_binary)


async def test_a_frame_of_too_many_values_is_refused_in_pieces() -> None:
    for data in frames(FRAME_BOUNDS.parts):
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await anyio.lowlevel.checkpoint()
                turns += 1

        async with anyio.create_task_group() as group:
            group.start_soon(turn)
            with pytest.raises(FrameTooLarge):
                await check(data)
            group.cancel_scope.cancel()
        assert turns >= 1
    for data in frames(FRAME_BOUNDS.parts - 100):
        await check(data)


async def test_a_large_frame_is_received_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    num_turns = 0

    async def end_turn() -> None:
        nonlocal num_turns
        num_turns += 1
        await loop_turns.end_loop_turn()

    monkeypatch.setattr(connection, "end_loop_turn", end_turn)
    text = "д" * SMALL_FRAME_BYTES
    frame = Ops(1, (ops.Open(1), ops.Set(1, 1, "v", (text,)), ops.Await(1, 1)))
    for is_binary in (True, False):
        async with bench() as server, connected(server, binary=[is_binary], greets=True) as [peer]:
            num_turns = 0
            data = encode(frame, binary=is_binary)
            peer.put_data(data if is_binary else data.decode())
            events = await peer.events(lambda received: Reached(1, 1) in received)
            assert [event.text for event in events if isinstance(event, Value)] == [text]
            assert num_turns == 3  # received, encoded and decoded
            peer.bye()
            await server.is_idle()


async def test_a_converse_of_too_many_values_ends_its_session_alone() -> None:
    for is_binary, data in zip((True, False), frames(FRAME_BOUNDS.parts), strict=True):
        async with bench() as server, connected(server, binary=[is_binary, True], greets=True) as [bad, good]:
            bad.put_data(data)
            refused, code = await bad.refusal()
            assert (refused.error.code, code) == ("frame_too_large", 1009)
            await check_still_served(good, count(1))
            good.bye()
            await server.is_idle()


def test_no_frame_of_the_clients_small_ops_is_refused() -> None:
    """For any size of ops: a part takes two bytes at least, except in a list of numbers."""
    assert FRAME_BOUNDS.parts >= USUAL_FRAME_BYTES // 2
    assert SMALL_FRAME_BYTES < USUAL_FRAME_BYTES < MAX_FRAME_BYTES
