"""Clients of a soak run that disconnect, are slow, or send invalid data. Any answer is correct, as long as
the server releases their resources."""

from __future__ import annotations

import socket
import struct
from dataclasses import replace

import anyio
from anyio.abc import SocketStream
from websockets.asyncio.client import connect as connect_websocket
from websockets.exceptions import WebSocketException

import agentflow as af
from agentflow.errors import AgentflowError
from agentflow.protocol import ops
from agentflow.protocol.sampling import GenParams
from agentflow.protocol.wire import SESSION_PATH, VERSION, Hello, Ops, encode
from benchmarks.soak.clients import Scenario, Target
from benchmarks.soak.raw_http import Request, connect, read_all, reset

DONE = "let go"
# The time for which a slow client stays connected.
SLOW_S = 8.0
LONG = 400
_BAD_FRAMES: tuple[bytes | str, ...] = (b"\xc1", b"", "{}", encode(Ops(99, ()), binary=True))


async def _close(stream: SocketStream, target: Target) -> str:
    if target.random.random() < 0.5:
        reset(stream)
    await stream.aclose()
    return DONE


async def break_off(target: Target) -> str:
    """Closes or resets the connection: before anything is sent; within the request line, the headers or the
    body; after the request; or after the first bytes of the answer."""
    is_stream = target.random.random() < 0.7
    request = Request("POST", "/v1/chat/completions", target.chat(stream=is_stream, max_tokens=LONG))
    if target.random.random() < 0.3:
        request = replace(request, path="/v1/messages")
    whole = request.head + request.body
    ends = [0, 9, len(request.head) - 20, len(request.head) + 30, len(whole), len(whole)]
    phase = target.random.randrange(len(ends))
    stream = await connect(target.server.port)
    try:
        await stream.send(whole[: ends[phase]])
        if phase == len(ends) - 1:
            for _ in range(target.random.randrange(1, 8)):
                await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        pass
    return await _close(stream, target)


async def read_slowly(target: Target) -> str:
    """Reads a byte from time to time, or nothing at all, and disconnects."""
    stream = await anyio.connect_tcp("127.0.0.1", target.server.port)
    raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    request = Request("POST", "/v1/chat/completions", target.chat(stream=True, max_tokens=LONG))
    reads = target.random.random() < 0.5
    with anyio.move_on_after(SLOW_S):
        await stream.send(request.head + request.body)
        while True:
            await anyio.sleep(0.3)  # noqa: TID251  the client is slow
            if reads:
                await stream.receive(1)
    return await _close(stream, target)


async def talk_nonsense(target: Target) -> str:
    """Sends invalid requests."""
    post = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    nonsense = [
        target.random.randbytes(200),
        b"\r\n\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nHost" + b"x" * 70_000,
        f"{post}Content-Length: -5\r\n\r\n".encode(),
        f"{post}Content-Length: 20000000\r\n\r\n".encode() + b"{" * 5_000,
        f"{post}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
        f"{post}Content-Length: 9\r\n\r\n[[[[[[[[[".encode(),
        Request("POST", "/v1/chat/completions", b'{"model": "x", "messages": "none"}').head + b"{",
        Request("POST", "/v1/chat/completions", {"model": "none", "messages": []}).head,
        Request("DELETE", "/v1/chat/completions").head,
        Request("POST", "/v1/session").head,
        Request("GET", "/" + "a/" * 2_000).head,
        Request("POST", "/v1/completions", {"prompt": [[]] * 100}).head,
        b"GET /v1/session HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ]
    stream = await connect(target.server.port)
    with anyio.move_on_after(3):
        try:
            await stream.send(target.random.choice(nonsense))
            await read_all(stream)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            pass
    return await _close(stream, target)


async def abandon_session(target: Target) -> str:
    """Opens a session, and disconnects while it runs, or sends invalid frames."""
    url = f"{target.server.url}{SESSION_PATH}"
    gen = ops.Gen(1, 2, "tale", GenParams(max_tokens=LONG, ignore_eos=True))
    frames: list[bytes | str] = [
        encode(Ops(1, (ops.Open(1), ops.Text(1, (target.prompt(),)), gen)), binary=True),
        encode(Ops(4, (ops.Fork(1, (2, 3)), ops.Expect(2, 4, "never"))), binary=True),
        target.random.choice(_BAD_FRAMES),
    ]
    try:
        async with connect_websocket(url, compression=None, close_timeout=2, max_size=None) as connection:
            if target.random.random() < 0.8:
                await connection.send(encode(Hello(VERSION), binary=True))
                await connection.recv()
            for frame in frames[: target.random.randrange(len(frames) + 1)]:
                await connection.send(frame)
            match target.random.randrange(4):
                case 0:
                    with anyio.move_on_after(3):  # there may be no answer
                        await connection.recv()
                case 1:  # an invalid frame of the websocket protocol
                    connection.transport.write(target.random.randbytes(40))
                case 2:
                    raw = connection.transport.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                case _:
                    pass
            connection.transport.abort()
    except (WebSocketException, OSError):
        pass
    return DONE


async def leave_session(target: Target) -> str:
    """Opens a session, and closes it properly while its states run."""
    try:
        async with af.session(target.server.url) as flow, flow.state() as s:
            s += target.prompt()
            for branch in s.fork(4):
                branch += af.gen("tale", max_tokens=LONG)
            async for _ in s.fork(1)[0].add(af.gen("first", max_tokens=4))["first"]:
                break
    except AgentflowError as error:
        return f"refused {error.code}"
    return DONE


SCENARIOS: dict[Scenario, int] = {
    break_off: 8,
    read_slowly: 2,
    talk_nonsense: 5,
    abandon_session: 4,
    leave_session: 2,
}
"""The scenarios, with their weights."""
