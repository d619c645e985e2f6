"""A client's end of a websocket in memory: the ASGI messages that a web server would exchange with the
application, with nothing in between that buffers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import anyio
from starlette.types import Message
from starlette.websockets import WebSocket
from support.session_peer import HangingGenerator, Listener, count_words, gen

from agentflow.protocol import ops
from agentflow.protocol.events import Event
from agentflow.protocol.ops import Op
from agentflow.protocol.wire import (
    VERSION,
    Bye,
    ClientFrame,
    Events,
    Hello,
    Ops,
    Refused,
    Resume,
    ServerFrame,
    Welcome,
    encode,
    server_frames,
)
from agentflow.runtime.generator import SessionModels
from agentflow.runtime.task_group import open_task_group
from agentflow.server.config.limits import ServerLimits
from agentflow.server.websocket.connection import WsSession
from agentflow.server.websocket.sessions import Sessions, open_sessions


class AsgiPeer:
    """One websocket. Messages of the server wait until the test receives them."""

    def __init__(self, *, binary: bool = True) -> None:
        self.binary = binary
        self.has_returned = anyio.Event()
        self.num_sent = 0
        self._to_server, self._at_server = anyio.create_memory_object_stream[Message](float("inf"))
        self._from_server, self._at_client = anyio.create_memory_object_stream[Message](0)
        self._is_gone = anyio.Event()
        self._decoder = server_frames()
        self._to_server.send_nowait({"type": "websocket.connect"})

    # The server's side.

    async def receive(self) -> Message:
        return await self._at_server.receive()

    async def send(self, message: Message) -> None:
        if self._is_gone.is_set():
            raise OSError("the client is gone")
        try:
            await self._from_server.send(message)
        except anyio.BrokenResourceError:
            raise OSError("the client is gone") from None

    # The client's side.

    def put(self, frame: ClientFrame) -> None:
        """Sends a frame."""
        self.put_data(encode(frame, binary=self.binary))

    def put_data(self, data: bytes | str) -> None:
        """Sends a message of any content: binary from bytes (in a JSON session: as text)."""
        if isinstance(data, bytes) and not self.binary:
            data = data.decode()
        self.put_message(data)

    def put_message(self, data: bytes | str) -> None:
        """Sends a message of the data's type, in a session of any type."""
        kind = "text" if isinstance(data, str) else "bytes"
        self._to_server.send_nowait({"type": "websocket.receive", kind: data})

    def put_ops(self, first: int, *recorded: Op) -> None:
        """Sends an ops frame."""
        self.put(Ops(first, recorded))

    async def message(self) -> Message:
        """The next thing that the server does."""
        message = await self._at_client.receive()
        self.num_sent += 1
        return message

    async def frame(self) -> ServerFrame:
        """The next frame from the server."""
        message = await self.message()
        if message["type"] == "websocket.accept":
            message = await self.message()
        assert message["type"] == "websocket.send", message
        data = message["bytes"] if self.binary else message["text"]
        return self._decoder.decode(data)

    async def greet(self, resume: Resume | None = None) -> Welcome:
        """Sends hello and returns the welcome."""
        self.put(Hello(VERSION, resume))
        frame = await self.frame()
        assert isinstance(frame, Welcome), frame
        return frame

    async def events(self, holds: Callable[[list[Event]], bool]) -> list[Event]:
        """All events until ``holds``."""
        events: list[Event] = []
        while not holds(events):
            frame = await self.frame()
            assert isinstance(frame, Events), frame
            events += frame.events
        return events

    async def refusal(self) -> tuple[Refused, int]:
        """The Refused frame (after any events) and the close code."""
        frame = await self.frame()
        while isinstance(frame, Events):
            frame = await self.frame()
        assert isinstance(frame, Refused), frame
        return frame, await self.close_code()

    async def close_code(self) -> int:
        """The code of the server's close."""
        message = await self.message()
        while message["type"] == "websocket.send":
            message = await self.message()
        assert message["type"] == "websocket.close", message
        return int(message["code"])

    def hang_up(self, code: int = 1006) -> None:
        """The connection breaks."""
        self._is_gone.set()
        self._at_client.close()
        self._to_server.send_nowait({"type": "websocket.disconnect", "code": code})

    def bye(self) -> None:
        """Ends the session."""
        self.put(Bye())

    def close_streams(self) -> None:
        """At the end of a test."""
        for stream in (self._to_server, self._at_server, self._from_server, self._at_client):
            stream.close()


@asynccontextmanager
async def connected(
    server: Bench, *, binary: Sequence[bool] = (True,), tenant: str = "", greets: bool = False
) -> AsyncIterator[list[AsgiPeer]]:
    """Peers with served websockets. ``greets``: each has been welcomed. Connections that are open at the end
    break."""
    peers = [AsgiPeer(binary=is_binary) for is_binary in binary]

    async def serve(peer: AsgiPeer) -> None:
        scope = {"type": "websocket", "path": "/v1/session", "headers": []}
        socket = WebSocket(scope, peer.receive, peer.send)
        await WsSession(socket, server.sessions, server.find, tenant=tenant).run()
        peer.has_returned.set()

    try:
        async with open_task_group() as group:
            for peer in peers:
                group.start_soon(serve, peer)
            for peer in peers if greets else ():
                await peer.greet()
            yield peers
            for peer in peers:
                if not peer.has_returned.is_set():
                    peer.hang_up()
    finally:
        for peer in peers:
            peer.close_streams()


FOREVER = ServerLimits(resume_grace_s=1e6, hello_timeout_s=1e6)
NO_GRACE = ServerLimits(resume_grace_s=0, hello_timeout_s=1e6)


@dataclass
class Bench:
    """A server's inside."""

    generator: Any
    sessions: Sessions[Any]

    def find(self, model: str | None) -> Any:
        """The only one."""
        return SessionModels(self.generator)

    async def is_idle(self) -> None:
        """Waits until no session is left, and checks that nothing of them is."""
        await self.sessions.wait_until_empty()
        assert (self.generator.num_open, self.generator.num_running) == (0, 0)


@asynccontextmanager
async def bench(limits: ServerLimits = FOREVER) -> AsyncIterator[Bench]:
    generator = HangingGenerator()
    async with open_sessions(limits) as sessions:
        yield Bench(generator, sessions)


async def check_still_served(peer: AsgiPeer, ids: count[int], first_op: int = 1) -> None:
    """A session answers as if nothing had happened."""
    state, var = next(ids), next(ids)
    peer.put_ops(first_op, ops.Open(state), ops.Text(state, ("say #3",)), gen(state, var))
    listener = Listener()
    while var not in listener.ends:
        frame = await peer.frame()
        assert isinstance(frame, Events)
        listener.deliver(frame.events)
    assert listener.texts[var] == count_words("say #3")
