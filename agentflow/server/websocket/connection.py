"""One websocket that serves one session: greeting, ops in, events out, and a close with the reason.

::

    expects Hello ──▶ reads Ops, until Bye ──▶ closed
          │                  │
          └── anything else: Refused with the expected and the received frame, and closed

An invalid op fails its state. A frame that cannot be decoded, or is unexpected, ends the session.

Reading does not wait for the ops to run. Writing waits for events and for the client to read, so a slow
client receives more events per frame.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, NoReturn, TypeAlias

import anyio
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentflow.errors import (
    AgentflowError,
    EngineFailed,
    FrameTooLarge,
    Overloaded,
    ProtocolError,
    RateLimited,
    incident,
)
from agentflow.protocol.events import ErrorInfo, Event
from agentflow.protocol.wire import (
    TAKEN_OVER,
    VERSION,
    Bye,
    Hello,
    Limits,
    ReceivedFrame,
    Refused,
    ServerFrame,
    UnreadOps,
    Welcome,
    client_frames,
    encode,
    frame_name,
    op_reader,
)
from agentflow.runtime.generator import ContextT, SessionModels
from agentflow.runtime.loop_turns import LoopTurn, end_loop_turn
from agentflow.server.websocket.frames import SMALL_FRAME_BYTES, check_frame, event_frames
from agentflow.server.websocket.sessions import IsValid, ServedSession, Sessions, always_valid, revoked

logger = logging.getLogger(__name__)

# An ack is sent with the next events. Without events it is sent alone after this many ops or bytes, so that a
# client that only sends can drop the ops that it keeps for a resume.
ACK_OPS = 64
ACK_BYTES = 64 * 1024
# The time limit for sending a client the reason why its connection ends.
LAST_WORDS_S = 1.0

NORMAL = 1000
SHUTS_DOWN = 1012
CLOSE_CODES: dict[type[AgentflowError], int] = {
    ProtocolError: 1002,
    FrameTooLarge: 1009,
    EngineFailed: 1011,
    Overloaded: 1013,
    RateLimited: 1013,
}
OTHER_ERROR = 1008
# Close codes of the websocket implementation for violations of the websocket protocol.
PROTOCOL_VIOLATIONS = {1002, 1007, 1009}


FindModels: TypeAlias = Callable[[str | None], SessionModels]
"""Finds the models of a session. The argument is the name of its default model, None: the server's default.
``UnknownModel`` if there is no such model."""


class WsSession(Generic[ContextT]):
    """Serves one websocket until it closes.

    Args:
        socket: The websocket, accepted or not.
        sessions: All sessions of the server.
        find_models: Finds the models of a session.
        tenant: The tenant's name.
        is_valid: Whether the API key still identifies the tenant.
        subprotocol: The selected subprotocol, among those that the client offers.
    """

    def __init__(
        self,
        socket: WebSocket,
        sessions: Sessions[ContextT],
        find_models: FindModels,
        *,
        tenant: str = "",
        is_valid: IsValid = always_valid,
        subprotocol: str | None = None,
    ) -> None:
        self._socket = socket
        self._subprotocol = subprotocol
        self._sessions = sessions
        self._find_models = find_models
        self._tenant = tenant
        self._is_valid = is_valid
        self._limits = sessions.limits
        self._decoder = client_frames()
        self._binary = True
        self._scope = anyio.CancelScope()
        self._has_received_bye = False
        self._num_acked = 0
        self._num_unacked_bytes = 0

    async def run(self) -> None:
        """Serves the websocket until it is closed. Errors of the client or the server end only its session
        and are not raised."""
        session: ServedSession[ContextT] | None = None
        error: AgentflowError | None = None
        has_hung_up = False
        try:
            with self._sessions.reserved_connection(self._tenant) as refusal, self._scope:
                await self._socket.accept(self._subprotocol)
                if refusal is not None:
                    await self._reject(refusal)
                session = await self._greet()
                if not self._is_valid():  # revoked since the websocket was accepted
                    raise revoked()
                await self._converse(session)
        except WebSocketDisconnect as disconnect:
            has_hung_up = True
            if session is not None and disconnect.code in PROTOCOL_VIOLATIONS:
                session.end()
        except AgentflowError as refusal:
            error = refusal
        except Exception as fault:
            error = incident(logger, "the websocket", fault)
        finally:
            if session is not None:
                if error is not None:
                    session.end()
                session.release(self._scope)
        if not has_hung_up:
            await self._close(session, error)

    async def _reject(self, refusal: Overloaded) -> NoReturn:
        """Waits briefly for a first frame, in order to answer in its format, and raises the error."""
        with anyio.move_on_after(min(LAST_WORDS_S, self._limits.hello_timeout_s)):
            await self._receive(first=True)
        raise refusal

    async def _greet(self) -> ServedSession[ContextT]:
        """Receives Hello and opens a session or resumes one."""
        hello: ReceivedFrame | None = None
        with anyio.move_on_after(self._limits.hello_timeout_s):
            hello = await self._receive(first=True)
        if not isinstance(hello, Hello):
            received = "nothing" if hello is None else f"a {frame_name(hello)} frame"
            timeout_s = self._limits.hello_timeout_s
            raise ProtocolError(f"expected a hello frame within {timeout_s} s, received {received}")
        if hello.version != VERSION:
            raise ProtocolError(
                f"the client uses version {hello.version} of the protocol and this server version {VERSION}: "
                "install the same version of agentflow on both sides"
            )
        if hello.resume is None:
            models = self._find_models(hello.model)
            return await self._sessions.open(
                models, self._scope, tenant=self._tenant, is_valid=self._is_valid
            )
        return await self._sessions.resume(
            hello.resume, self._scope, tenant=self._tenant, is_valid=self._is_valid
        )

    async def _converse(self, session: ServedSession[ContextT]) -> None:
        limits = Limits(self._limits.frame_bytes, self._limits.resume_grace_s)
        models = session.interpreter.models
        self._num_acked = session.num_taken
        await self._send(
            Welcome(
                VERSION,
                session.id,
                session.secret,
                model=next(iter(models)),
                models=models,
                limits=limits,
                ack=self._num_acked,
            )
        )
        faults: list[Exception] = []
        async with anyio.create_task_group() as group:
            group.start_soon(self._write, session, faults, group.cancel_scope)
            try:
                await self._read(session)
            except Exception as fault:
                faults.append(fault)
            group.cancel_scope.cancel()
        if faults:
            raise faults[0]

    async def _read(self, session: ServedSession[ContextT]) -> None:
        """Receives ops until Bye."""
        read_op = op_reader(binary=self._binary)
        while True:
            match await self._receive():
                case UnreadOps() as frame:
                    await session.submit(frame, read_op)
                    self._request_ack(session)
                case Bye():
                    self._has_received_bye = True
                    session.end()
                    return
                case frame:
                    raise ProtocolError(
                        f"expected ops or a bye, received a frame of type {frame_name(frame)!r}"
                    )

    async def _write(
        self, session: ServedSession[ContextT], faults: list[Exception], scope: anyio.CancelScope
    ) -> None:
        """Sends events and acknowledgements."""
        cursor = session.interpreter.events
        try:
            while True:
                events = await cursor.next()
                if events or session.num_taken > self._num_acked:
                    await self._send_events(session.num_taken, events)
        except WebSocketDisconnect:
            pass  # ``_read`` raises it, too, after the client's last frames
        except Exception as fault:
            faults.append(fault)
            scope.cancel()

    async def _send_events(self, ack: int, events: list[Event]) -> None:
        self._num_acked, self._num_unacked_bytes = ack, 0
        frames = event_frames(ack, events, frame_bytes=self._limits.frame_bytes, binary=self._binary)
        turn = LoopTurn()
        for frame in frames:
            await self._send_bytes(frame)
            await turn.pause()

    def _request_ack(self, session: ServedSession[ContextT]) -> None:
        if session.num_taken - self._num_acked >= ACK_OPS or self._num_unacked_bytes >= ACK_BYTES:
            session.interpreter.events.wake()

    async def _receive(self, *, first: bool = False) -> ReceivedFrame:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code") or 1006, message.get("reason"))
        data: bytes | str = message["bytes"] if message.get("bytes") is not None else message["text"]
        is_large = len(data) > SMALL_FRAME_BYTES
        if is_large:
            await end_loop_turn()  # receiving was one turn
        is_binary = not isinstance(data, str)
        if first:
            self._binary = is_binary
        encoded = data.encode(errors="surrogatepass") if isinstance(data, str) else data
        num_bytes = len(encoded)
        if is_large:
            await end_loop_turn()  # encoding was one turn
        if num_bytes > self._limits.frame_bytes:
            raise FrameTooLarge(
                f"a frame has {num_bytes:,} bytes, and the limit is {self._limits.frame_bytes:,}: "
                "send the ops in several frames, and long texts in several ops"
            )
        if is_binary != self._binary:
            raise ProtocolError(
                f"expected {_kind(self._binary)} as in the hello frame, received {_kind(is_binary)}"
            )
        self._num_unacked_bytes += num_bytes
        await check_frame(encoded, binary=is_binary)
        frame = self._decoder.decode(data)
        if is_large:
            await end_loop_turn()  # decoding was one turn
        return frame

    async def _send(self, frame: ServerFrame) -> None:
        await self._send_bytes(encode(frame, binary=self._binary))

    async def _send_bytes(self, data: bytes) -> None:
        content = {"bytes": data} if self._binary else {"text": data.decode()}
        try:
            await self._socket.send({"type": "websocket.send", **content})
        except RuntimeError as error:
            # uvicorn has closed the websocket, because the client violated its protocol.
            raise WebSocketDisconnect(1006) from error

    async def _close(self, session: ServedSession[ContextT] | None, error: AgentflowError | None) -> None:
        """Closes the websocket with the reason."""
        if session is not None:
            error = error or session.failure
        code = NORMAL
        if error is not None:
            code = CLOSE_CODES.get(type(error), OTHER_ERROR)
        elif not self._has_received_bye:
            code = SHUTS_DOWN if session is None or session.has_ended else TAKEN_OVER
        with anyio.move_on_after(LAST_WORDS_S, shield=True):
            try:
                if error is not None:
                    await self._send(Refused(ErrorInfo.of(error)))
                await self._socket.close(code, error.code if error is not None else None)
            except (WebSocketDisconnect, RuntimeError):
                pass  # it is already closed


def _kind(binary: bool) -> str:
    return "binary frames (msgpack)" if binary else "text frames (JSON)"
