"""Frames of a websocket's client are parsed in turns, and only as fast as its answers are read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.server.http_clients import only_asyncio
from uvicorn import Config
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from agentflow.server.http import protocol
from agentflow.server.http.protocol import TimedWebSocketProtocol

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]
anyio_backend = pytest.fixture(only_asyncio)

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
HIGH_WATER = 65_536
TOO_MANY = protocol.MAX_FRAGMENTS + protocol.WEBSOCKET_PIECE_BYTES


class Transport(asyncio.Transport):
    """A client that reads nothing until ``read``."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.protocol: Any = None
        self.is_reading_paused = self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data
        if len(self.written) > HIGH_WATER:
            self.protocol.pause_writing()

    def read(self) -> None:
        self.written.clear()
        self.protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


async def opened(
    received: list[Any], wait: asyncio.Event | None = None, codes: list[int] | None = None
) -> tuple[Any, Transport]:
    """A websocket after its handshake.

    Args:
        received: Gets the messages.
        wait: Before each message, the application waits for it.
        codes: Gets the code with which the websocket is closed.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while True:
            if wait is not None:
                await wait.wait()
            message = await receive()
            if message["type"] == "websocket.disconnect":
                if codes is not None:
                    codes.append(message["code"])
                return
            received.append(message.get("bytes") or message.get("text"))

    config = Config(app, log_level="critical", lifespan="off", ws_ping_interval=None)
    state = ServerState()
    made = TimedWebSocketProtocol(config, state, {}, on_lost=lambda: None, handshake_timeout_s=10)
    transport = Transport()
    transport.protocol = made
    made.connection_made(transport)
    made.data_received(HANDSHAKE)
    await until(lambda: made.handshake_complete)
    transport.written.clear()
    return made, transport


async def closed(made: Any) -> None:
    made.connection_lost(None)
    await asyncio.gather(*made.tasks)


def frame(opcode: Opcode, data: bytes = b"", *, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


async def turn() -> None:
    await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop, not a time


async def turns() -> None:
    for _ in range(2_000):
        await turn()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await turn()


@given(st.lists(st.integers(0, 5_000), min_size=1, max_size=8), st.integers(1, 3_000), st.integers(1, 40_000))
async def test_f27a_messages_between_frames_without_data_arrive_in_order(
    sizes: list[int], num_pongs: int, step: int
) -> None:
    received: list[Any] = []
    made, transport = await opened(received)
    sent = [bytes([65 + number]) * size + b"." for number, size in enumerate(sizes)]
    data = frame(Opcode.PONG) * num_pongs
    for message in sent:
        middle = len(message) // 2
        data += frame(Opcode.BINARY, message[:middle], fin=False) + frame(Opcode.PONG) * 3
        data += frame(Opcode.CONT, message[middle:]) + frame(Opcode.PONG) * num_pongs
    for start in range(0, len(data), step):
        await until(lambda: not transport.is_reading_paused)
        made.data_received(data[start : start + step])
    await until(lambda: len(received) == len(sent))
    assert received == sent
    await closed(made)


async def test_f27a_each_turn_of_the_loop_parses_one_piece_of_one_websocket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "TURN_S", -1.0)  # over after the first piece
    parsed: list[int] = []

    websockets = [await opened([]) for _ in range(8)]
    parse = TimedWebSocketProtocol._parse

    def noted(self: Any, data: bytes) -> None:
        parsed.append(len(data))
        parse(self, data)

    monkeypatch.setattr(TimedWebSocketProtocol, "_parse", noted)
    for made, transport in websockets:
        made.data_received(frame(Opcode.PONG) * 5_000)
        assert transport.is_reading_paused
    before = 0
    while any(transport.is_reading_paused for _, transport in websockets):
        await turn()
        assert len(parsed) - before <= 1
        before = len(parsed)
    assert sum(parsed) == 8 * 5_000 * len(frame(Opcode.PONG))
    for made, _ in websockets:
        await closed(made)


async def test_f28d_pings_are_answered_as_fast_as_the_answers_are_read() -> None:
    made, transport = await opened([])
    made.data_received(frame(Opcode.PING, b"x" * 100) * 10_000)
    await turns()
    assert HIGH_WATER < len(transport.written) < 2 * HIGH_WATER
    assert transport.is_reading_paused
    while transport.is_reading_paused:
        transport.read()
        await turns()
    await closed(made)


async def test_f28d_messages_wait_while_the_application_does_not_read() -> None:
    received: list[Any] = []
    go = asyncio.Event()
    made, transport = await opened(received, go)
    made.data_received(frame(Opcode.BINARY, b"x" * 5_000) * 100)
    await turns()
    assert made.queue.qsize() < 3
    assert transport.is_reading_paused
    go.set()
    await until(lambda: len(received) == 100)
    await turns()
    assert not transport.is_reading_paused
    await closed(made)


async def test_f27a_a_message_of_endless_frames_is_refused() -> None:
    made, transport = await opened([])
    made.data_received(frame(Opcode.BINARY, b"x", fin=False))
    made.data_received(frame(Opcode.CONT, b"", fin=False) * (protocol.MAX_FRAGMENTS + 10))
    await turns()
    assert transport.is_closed
    assert not made.frames
    await closed(made)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(Opcode.TEXT, b"a\xff"), 1007),
        (frame(Opcode.TEXT, b"\xc3", fin=False) + frame(Opcode.CONT, b"("), 1007),
        (frame(Opcode.TEXT, b"\xed\xa0\x80"), 1007),
        (frame(Opcode.BINARY, fin=False) + frame(Opcode.CONT, fin=False) * TOO_MANY, 1009),
    ],
    ids=["byte", "fragment", "surrogate", "many frames"],
)
async def test_f37_a_violation_closes_the_websocket_with_its_code_and_logs_nothing(
    data: bytes, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []
    received: list[Any] = []
    made, transport = await opened(received, codes=codes)
    made.data_received(frame(Opcode.TEXT, b"\xc3", fin=False) + frame(Opcode.CONT, b"\xa4"))
    await until(lambda: received == ["ä"])
    made.logger = logging.getLogger(__name__)
    made.data_received(data + frame(Opcode.TEXT, b"later"))
    await turns()
    assert transport.is_closed
    assert transport.written[2:4] == code.to_bytes(2)
    await closed(made)
    assert (received, codes) == (["ä"], [code])
    assert caplog.records == []


@pytest.mark.parametrize(
    "data",
    [frame(Opcode.CLOSE, b"\x03\xe8"), frame(Opcode.CLOSE), frame(Opcode.TEXT, b"\xff"), b"\xff\xff", b""],
    ids=["closed", "closed without a code", "no text", "no frame", "open"],
)
async def test_f37_a_server_ends_while_a_websocket_closes(data: bytes) -> None:
    """Before the transport reports the end of the connection."""
    made, transport = await opened([])
    if data:
        made.data_received(data)
    made.shutdown()
    assert transport.is_closed
    await closed(made)
