"""Forwards websockets: messages in both directions, unchanged.

A websocket that resumes a session goes to the target that has the session, whose id is in the URL or among
the subprotocols. The gateway learns the target from the answer to the first handshake, or from the first
message of agentflow's own sessions, which has the id; it reads no other message. If the target is unknown, a
target without the session may reject the handshake, and the next target is tried. A websocket with a ticket
goes to the target that issued the ticket, and one whose URL has a model to a target with the model.

A target that does not respond, because of a network partition or because it hangs, keeps its sessions for a
while. Their websockets are closed with a code at which clients resume. A handshake for such a session goes to
no other target, which would have to reject the session for good.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from urllib.parse import parse_qs

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from agentflow.protocol.wire import SESSION_PATH
from agentflow.runtime.task_group import open_task_group
from agentflow.server.errors import ApiError
from agentflow.server.gateway.http_proxy import REFUSALS, answer_headers, raw_path, request_headers
from agentflow.server.gateway.request_facts import RequestFacts, model_in
from agentflow.server.gateway.target import CONNECT_TIMEOUT_S, HeaderList, Target
from agentflow.server.gateway.target_choice import TargetChoice

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The limit of a message, in either direction; ``frame_bytes`` of a server should not be larger."""
HANDSHAKE_S = 8.0
"""The time for a target's answer to a handshake, once it has accepted the connection. A server that shares a
store with others may wait 7 s for it: it is not down. Clients wait 10 s, in which another target must be
tried if this one hangs."""
MAX_QUEUED = 4
"""The limit of messages that wait while a client does not read."""
CLOSE_S = 2.0
PING_S = 4.0
"""The interval of pings to a target, and the time that it has to answer. Both together are less than the time
for which a server keeps a session without a connection."""
TARGET_LOST = 1013  # "try again later": clients resume their session
"""The close code for a target that is lost."""
_UNSENDABLE = (1005, 1006, 1015)
_HANDSHAKE = b"sec-websocket-"
SESSION = "session"
"""The query parameter, and the part of a subprotocol, with the id of a session."""
MAX_NAMES = 4
"""The limit of ids that are read from one handshake."""
MAX_WELCOME_BYTES = 4_096
_ID = rb"([A-Za-z0-9._-]{8,250})"
_SESSION = re.compile(rb'"session":"' + _ID + rb'"|\xa7session(?:[\xa0-\xbf]|\xd9.)' + _ID, re.DOTALL)
SESSION_HEADER = "x-agentflow-session"
"""The header of a handshake's answer with the id of the session that it opens."""


class WebSocketProxy:
    """The proxy of all websockets.

    Args:
        placement: Chooses the targets.
        via: The gateway's entry in the header ``via``.
    """

    def __init__(self, placement: TargetChoice, via: str) -> None:
        self._placement = placement
        self._via = via.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one websocket until it closes."""
        socket = WebSocket(scope, receive, send)
        names = session_names(scope)
        model = self._placement.resolve(model_in(scope.get("query_string", b"").decode("latin-1")))
        asked, tried = RequestFacts(model, names=names), list[Target]()
        refusal: Response | None = None
        owner = self._placement.owner(session_names(scope, (SESSION,)))
        while True:
            if owner is not None and _is_silent(owner) and owner not in tried:
                refusal = Response("the server with this session does not answer", 503)
                break
            try:
                if refusal is not None and not self._placement.candidates(asked, tried):
                    break
                assignment = await self._placement.place(asked, tried)
            except ApiError as error:
                refusal = Response(error.message, error.status, error.headers, "text/plain")
                break
            target = assignment.target
            assignment.ended()  # counted as a websocket below, not as a request
            tried.append(target)
            attempt = target.circuit.attempt()
            try:
                connection = await self._connect(scope, target)
            except InvalidStatus as error:
                attempt.succeeded()
                shown = error.response
                headers = [(name.encode(), value.encode()) for name, value in shown.headers.raw_items()]
                denial = Response(bytes(shown.body or b""), shown.status_code)
                denial.raw_headers = answer_headers(headers)
                refusal = denial
                if shown.status_code not in REFUSALS:
                    break
                continue
            except (OSError, TimeoutError, InvalidHandshake, EOFError) as error:
                is_gone = isinstance(error, ConnectionRefusedError)
                self._placement.failed(target, attempt, str(error) or type(error).__name__, is_gone=is_gone)
                refusal = Response("the server does not answer", 502, media_type="text/plain")
                if target is owner and not is_gone:
                    break
                continue
            finally:
                attempt.left()
            attempt.succeeded()
            given = connection.response.headers.get(SESSION_HEADER) if connection.response else None
            sessions = [given[:256]] if given else []
            self._own(names, sessions, target)

            def welcomed(message: str | bytes, target: Target = target, known: list[str] = sessions) -> None:
                if (name := welcomed_session(message)) is not None:
                    known.append(name)
                    self._own((), known, target)

            target.num_websockets += 1
            try:
                await _join(socket, connection, welcomed if scope["path"] == SESSION_PATH else None)
            finally:
                target.num_websockets -= 1
                # Many other objects may have come since. Now the client may resume.
                self._own(session_names(scope, (SESSION,)), sessions, target)
            return
        await socket.send_denial_response(refusal)

    def _own(self, asked: Sequence[str], sessions: Sequence[str], target: Target) -> None:
        """Records the target of a session. ``asked``: names that the client wrote; ``sessions``: names
        that the target wrote."""
        for name in sessions:
            self._placement.own(name, target)
        for name in asked:
            self._placement.own(name, target, is_sure=False)

    async def _connect(self, scope: Scope, target: Target) -> ClientConnection:
        url = target.url(raw_path(scope), scope.get("query_string", b""))
        scheme = "wss" if url.scheme == "https" else "ws"
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in request_headers(scope, target, self._via)
            if name != b"host" and not name.startswith(_HANDSHAKE)
        ]
        limit: anyio.CancelScope

        class Connection(ClientConnection):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                limit.deadline = asyncio.get_running_loop().time() + HANDSHAKE_S
                super().connection_made(transport)

        with anyio.fail_after(CONNECT_TIMEOUT_S) as limit:
            return await connect(
                str(url.copy_with(scheme=scheme)),
                additional_headers=headers,
                subprotocols=[Subprotocol(name) for name in scope.get("subprotocols", [])] or None,
                compression=None,
                user_agent_header=None,
                proxy=None,
                open_timeout=None,
                create_connection=Connection,
                close_timeout=CLOSE_S,
                ping_interval=PING_S,
                ping_timeout=PING_S,
                max_size=MAX_MESSAGE_BYTES,
                max_queue=MAX_QUEUED,
            )


def _is_silent(target: Target) -> bool:
    return not target.circuit.is_ready and not target.is_gone


def session_names(scope: Scope, kinds: Collection[str] = (SESSION, "ticket")) -> tuple[str, ...]:
    """The ids of sessions and tickets in the query or the subprotocols of a websocket."""
    found = parse_qs(scope.get("query_string", b"").decode("latin-1")).get(SESSION, [])
    for subprotocol in scope.get("subprotocols", []):
        head, _, name = subprotocol.removeprefix("agentflow.").partition(".")
        if head in kinds and name:
            found.append(name)
    return tuple(name[:256] for name in found[:MAX_NAMES])


def _handshake_headers(connection: ClientConnection) -> HeaderList:
    """The target's headers for the answer to a handshake, without the headers of the handshake itself."""
    assert connection.response is not None
    headers = [(name.encode(), value.encode()) for name, value in connection.response.headers.raw_items()]
    return [one for one in answer_headers(headers) if not one[0].startswith((_HANDSHAKE, b"content-"))]


def welcomed_session(message: str | bytes) -> str | None:
    """The id of a session in the first message of a server of agentflow, in JSON or msgpack."""
    data = message.encode() if isinstance(message, str) else message
    found = _SESSION.search(data[:MAX_WELCOME_BYTES])
    return None if found is None else (found[1] or found[2]).decode()


async def _join(
    socket: WebSocket, connection: ClientConnection, on_first: Callable[[str | bytes], None] | None
) -> None:
    """Forwards messages until one side closes, which closes the other. ``on_first``: called with the target's
    first message."""
    code: int | None = None
    try:
        await socket.accept(connection.subprotocol, _handshake_headers(connection))
        async with open_task_group() as group:
            group.start_soon(_pass_back, socket, connection, on_first, group.cancel_scope)
            try:
                while True:
                    message = await socket.receive()
                    if message["type"] == "websocket.disconnect":
                        code = message.get("code")
                        break
                    data = message.get("text")
                    await connection.send(message["bytes"] if data is None else data)
            except (ConnectionClosed, OSError):
                return  # the other task closes the client's websocket
            group.cancel_scope.cancel()
    except (WebSocketDisconnect, OSError):
        pass
    finally:
        with anyio.CancelScope(shield=True):
            if code is None or code in _UNSENDABLE:  # the client is lost, and the target must see that, too
                connection.transport.abort()
            else:
                with suppress(ConnectionClosed, OSError, ValueError):
                    await connection.close(code)


async def _pass_back(
    socket: WebSocket,
    connection: ClientConnection,
    on_first: Callable[[str | bytes], None] | None,
    scope: anyio.CancelScope,
) -> None:
    try:
        while True:
            data = await connection.recv()
            if on_first is not None:
                on_first(data)
                on_first = None
            if isinstance(data, str):
                await socket.send_text(data)
            else:
                await socket.send_bytes(data)
    except ConnectionClosed as closed:
        frame = closed.rcvd
        code = TARGET_LOST if frame is None or frame.code in _UNSENDABLE else frame.code
        with suppress(RuntimeError, OSError, WebSocketDisconnect):
            await socket.close(code, "" if frame is None else frame.reason)
    except (RuntimeError, OSError, WebSocketDisconnect):
        pass  # the client is gone
    scope.cancel()
