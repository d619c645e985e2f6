"""The client of a server: one session over one or more websockets.

After a broken connection the client resumes the session within the server's grace period; nothing is lost and
nothing runs twice. A session that the server no longer has, after a restart for example, is lost: all its
unfinished ops fail, and the client opens another one in its place. ``OpQueue`` keeps each op until the server
acknowledges it. ``Cursors`` knows how much of each variable and state was received: it tells the server where
to continue, and drops repeated events. ``RemoteConnection`` runs the session, ``Remote`` opens its
websockets.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal
from urllib.parse import urlencode, urlsplit, urlunsplit

import anyio
import anyio.lowlevel
from websockets.exceptions import InvalidURI
from websockets.uri import WebSocketURI, parse_uri

from agentflow.backends.cursors import Cursors
from agentflow.backends.op_queue import USUAL_FRAME_BYTES, OpQueue
from agentflow.backends.websocket import WebSocket, WebSocketEnded, open_websocket, shown_url
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    FrameTooLarge,
    NotAuthorized,
    Overloaded,
    ProtocolError,
    ServerLost,
    ServerUnreachable,
)
from agentflow.protocol import ops
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.protocol.events import Capabilities, ErrorInfo
from agentflow.protocol.wire import (
    API_KEY,
    MODEL_PARAM,
    SESSION_PARAM,
    SESSION_PATH,
    TAKEN_OVER,
    VERSION,
    Bye,
    Events,
    Hello,
    Refused,
    Resume,
    Welcome,
    encode,
    frame_name,
    server_frames,
)
from agentflow.runtime.backoff import pauses_s
from agentflow.runtime.task_group import open_task_group

logger = logging.getLogger(__name__)


class Remote:
    """A server, the backend of ``af.session("ws://127.0.0.1:8410")``.

    Args:
        url: ``ws://`` or ``wss://`` (``http://`` and ``https://`` mean the same); the path defaults to
            ``/v1/session``.
        api_key: Sent in the Authorization header.
        model: The name of a model of the server; None for the first one.
        embed_model: The name of the server's embedding model that ``flow.embed`` uses.
        encoding: The encoding of frames; ``json`` is readable in a network trace.
        open_timeout_s: The time limit for the server's first answer, in seconds.
        keepalive_s: The client sends a ping after this many seconds of silence, and reconnects after the same
            time again.
        ssl_context: Replaces the default context for ``wss``.
        reconnect: Whether the client opens another session on the server when it has lost one. Running ops
            then fail with ``ServerLost``. Ops that begin while no server answers wait for ``open_timeout_s``
            seconds, and then fail with ``ServerUnreachable``.

    >>> server = af.Remote("ws://127.0.0.1:8410", encoding="json", open_timeout_s=2.5)
    >>> async with af.session(backend=server) as flow:
    ...     grade = await flow.run(judge, essay)
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        embed_model: str | None = None,
        encoding: Literal["msgpack", "json"] = "msgpack",
        open_timeout_s: float = 10.0,
        keepalive_s: float = 20.0,
        ssl_context: ssl.SSLContext | None = None,
        reconnect: bool = True,
    ) -> None:
        if encoding not in ("msgpack", "json"):
            raise BadArgument(
                f"Remote: encoding must be 'msgpack' or 'json', not {encoding!r}", param="encoding"
            )
        if api_key is not None and not (isinstance(api_key, str) and API_KEY.fullmatch(api_key)):
            raise BadArgument("Remote: api_key must be printable ASCII, and not empty", param="api_key")
        self.uri = _parsed(url)
        self.url = shown_url(self.uri)
        self.model = model
        self.embed_model = embed_model
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.binary = encoding == "msgpack"
        self.open_timeout_s = open_timeout_s
        self.keepalive_s = keepalive_s
        self.ssl_context = ssl_context
        self.reconnect = reconnect

    def __repr__(self) -> str:
        return f"Remote({self.url!r})"

    @property
    def source(self) -> str:
        """The server and the models. For the keys of caches."""
        return repr((self.url, self.model, self.embed_model))

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Opens a session on the server. ``ServerUnreachable`` if no server answers, or the error with which
        it rejects the client: ``NotAuthorized`` for a wrong key, ``Overloaded``. For the session."""
        websocket, welcome = await self.open(None)
        connection = RemoteConnection(
            self.url,
            self.open,
            websocket,
            welcome,
            deliver,
            lost,
            embed_model=self.embed_model,
            patience_s=self.open_timeout_s if self.reconnect else None,
        )
        async with open_task_group() as group:
            group.start_soon(connection.run)
            try:
                connection.set_models(welcome)
                yield connection
            finally:
                await connection.leave()

    async def open(self, resume: Resume | None) -> tuple[WebSocket, Welcome]:
        """A new websocket, after ``Hello`` and ``Welcome``. For the connection."""
        try:
            with anyio.fail_after(self.open_timeout_s):
                websocket = await open_websocket(
                    self._address(resume),
                    headers=self.headers,
                    ssl_context=self.ssl_context,
                    binary=self.binary,
                    keepalive_s=self.keepalive_s,
                )
                try:
                    return websocket, await self._greet(websocket, resume)
                except BaseException:
                    await websocket.aclose()
                    raise
        except TimeoutError:
            raise ServerUnreachable(
                f"{self.url} did not answer within {self.open_timeout_s} s: "
                "it may be overloaded or still starting"
            ) from None
        except WebSocketEnded as error:
            raise ServerUnreachable(
                f"{self.url} closed the connection before it answered: {error}"
            ) from error

    def _address(self, resume: Resume | None) -> WebSocketURI:
        """The address with the id or the model of a session, by which a proxy finds a server that has it."""
        if resume is not None:
            param = urlencode({SESSION_PARAM: resume.session})
        elif self.model is not None:
            param = urlencode({MODEL_PARAM: self.model})
        else:
            return self.uri
        return replace(self.uri, query=f"{self.uri.query}&{param}" if self.uri.query else param)

    async def _greet(self, websocket: WebSocket, resume: Resume | None) -> Welcome:
        await websocket.send_now(encode(Hello(VERSION, resume, self.model), binary=self.binary))
        match server_frames().decode(await websocket.receive()):
            case Welcome() as welcome if welcome.version == VERSION:
                if welcome.model not in welcome.models:
                    raise ProtocolError(f"{self.url} does not describe its model {welcome.model[:200]!r}")
                return welcome
            case Welcome(version=version):
                raise ProtocolError(
                    f"the server at {self.url} uses version {version} of the protocol and this client "
                    f"version {VERSION}: install the same agentflow on both sides"
                )
            case Refused(error=error):
                raise error.to_exception()
            case frame:
                raise ProtocolError(
                    f"expected a welcome frame from {self.url}, got a {frame_name(frame)} frame"
                )


def _parsed(url: str) -> WebSocketURI:
    if not isinstance(url, str):
        raise BadArgument(f"Remote: the url must be a string, not {url!r:.200}", param="url")
    try:
        parts = urlsplit(url)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        path = parts.path if parts.path not in ("", "/") else SESSION_PATH
        return parse_uri(urlunsplit((scheme, parts.netloc, path, parts.query, parts.fragment)))
    except (InvalidURI, ValueError) as error:
        remedy = f"; model={url!r:.200} runs in this process, and 'openai:MODEL' behind an API"
        raise BadArgument(
            f"{url!r:.200} is not the url of a server ({error}): it looks like ws://127.0.0.1:8410"
            + ("" if "://" in url else remedy),
            param="url",
        ) from None


_Reopen = Callable[[Resume | None], Awaitable[tuple[WebSocket, Welcome]]]

_GOODBYE_S = 1.0  # ``leave`` waits so long for the server
# How long to keep reading after writing failed: the reason may be among the received bytes.
_LAST_READ_S = 1.0
_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0
_LAST_SESSION_BACKOFF_S = 5.0
# A frame may have events of thousands of variables; the loop yields after this many.
_EVENTS_PER_TURN = 128

# Close codes of RFC 6455, section 7.4.1, and the server's own (docs/reference/protocol.md).
_TOO_BIG = 1009
_FINAL_CODES = {
    1000: "the server ended the session",
    1002: "the server could not decode a frame",
    1003: "the server could not decode a frame",
    1007: "the server could not decode a frame",
    1008: "the server ended the session",
    1012: "the server was shut down, and the session ended with it",
    TAKEN_OVER: "another connection has taken the session over",
}


class RemoteConnection:
    """A client's connection, from the first ``Welcome`` to ``Bye``, over one session of the server after
    another.

    Args:
        url: The server's address, for messages.
        reopen: Opens a websocket.
        websocket: The first websocket.
        welcome: The server's answer on it.
        deliver: Receives the events.
        lost: Called when a session is lost.
        embed_model: The default model for embeddings.
        patience_s: How long ops wait for a reachable server after a session was lost; None to end with the
            first session.
    """

    def __init__(
        self,
        url: str,
        reopen: _Reopen,
        websocket: WebSocket,
        welcome: Welcome,
        deliver: Deliver,
        lost: Lost,
        *,
        embed_model: str | None = None,
        patience_s: float | None = None,
    ) -> None:
        self.models: dict[str, Capabilities] = {}
        self._url = url
        self._reopen = reopen
        self._binary = websocket.binary
        self._websocket: WebSocket | None = websocket
        self._welcome = welcome
        self._deliver = deliver
        self._lost = lost
        self._embed_model = embed_model
        self._patience_s = patience_s
        self._decoder = server_frames()
        self._begin()
        self._backoff = pauses_s(_FIRST_BACKOFF_S, _LAST_SESSION_BACKOFF_S)
        self._has_answered = False
        self._failure: ErrorInfo | None = None
        self._is_leaving = False
        self._has_ended = anyio.Event()
        # Shielded: the Bye must be sent even if the scope around the session is cancelled.
        self._scope = anyio.CancelScope(shield=True)

    def _begin(self) -> None:
        """Begins with a new session of the server, which has no states yet."""
        self._queue = OpQueue(binary=self._binary, frame_bytes=self._welcome.limits.frame_bytes)
        self._cursors = Cursors()
        self._waiting_since: float | None = None  # the first op that needs an answer, while disconnected

    def set_models(self, welcome: Welcome) -> None:
        """Takes the models of the server. ``UnknownModel`` if it has no such embedding model."""
        names = dict.fromkeys([welcome.model, *welcome.models])  # the default first
        models = {name: welcome.models[name].embedding_with(self._embed_model) for name in names}
        self.models.clear()  # the session keeps a reference
        self.models |= models

    @property
    def is_connected(self) -> bool:
        """Whether a websocket is open, or was until a moment ago."""
        return self._websocket is not None

    @property
    def has_room(self) -> bool:
        """Whether the websocket takes ops as they come."""
        return self.is_connected and self._queue.num_waiting_bytes < USUAL_FRAME_BYTES

    def send(self, sent: Sequence[ops.Op]) -> None:
        """Queues the ops for the next frame."""
        if self._failure is not None:
            raise self._failure.to_exception()
        sent = [part for op in sent for part in self._queue.fitting(op)]
        encoded = [self._queue.encoded(op) for op in sent]
        for op, data in zip(sent, encoded, strict=True):
            if self._cursors.submit(op):
                number = self._queue.add(data)
                if isinstance(op, ops.GetStats | ops.GetGraph):
                    self._cursors.unanswered[op.ticket] = number
                if isinstance(op, ops.GetGraph):
                    self._cursors.asked_graphs[op.ticket] = op
        if not self.is_connected and self._waiting_since is None and self._cursors.is_waiting:
            self._waiting_since = anyio.current_time()
        self._wake()

    def end(self, error: BaseException | None) -> None:
        pass

    async def run(self) -> None:
        """Runs until the connection ends. Calls ``lost`` unless ``leave`` ended it."""
        error: AgentflowError | None = None
        try:
            with self._scope:
                error = await self._serve()
        finally:
            if self._websocket is not None:
                await self._websocket.aclose()
            self._has_ended.set()
        if error is not None and not self._is_leaving:
            self._failure = ErrorInfo.of(error)
            self._lost(error)

    async def leave(self) -> None:
        """Sends Bye and closes. Takes a round trip, and at most ``_GOODBYE_S``."""
        self._is_leaving = True
        if self._websocket is None:
            self._scope.cancel()
        self._wake()
        with anyio.move_on_after(_GOODBYE_S, shield=True):
            await self._has_ended.wait()
        self._scope.cancel()

    def _wake(self) -> None:
        if self._websocket is not None:
            self._websocket.wake()

    async def _serve(self) -> AgentflowError | None:
        """Runs over one session after another. Returns the error that ended the last, None after Bye."""
        while True:
            try:
                await self._serve_session()
            except AgentflowError as error:
                if self._patience_s is None or self._is_leaving or isinstance(error, NotAuthorized):
                    return error
                final = await self._open_another(error)
                if final is not None:
                    return final
            else:
                return None

    async def _serve_session(self) -> None:
        """Runs over one websocket after another, until Bye. Raises the error that ended the session."""
        while True:
            assert self._websocket is not None
            ended = await self._exchange(self._websocket)
            if self._is_leaving:
                return
            self._check_resumable(ended)
            await self._reconnect(ended)

    async def _open_another(self, lost: AgentflowError) -> AgentflowError | None:
        """Opens another session after one was lost. Returns the error with which the server rejects it."""
        await self._drop_websocket()
        logger.warning("the session on %s is lost, and another one is opened: %s", self._url, lost)
        self._lose(lost)
        if self._has_answered:  # otherwise the server ends each session immediately: pauses grow
            self._has_answered, self._backoff = False, pauses_s(_FIRST_BACKOFF_S, _LAST_SESSION_BACKOFF_S)
        at_least_s = 0.0
        for delay_s in self._backoff:
            await self._pause(max(delay_s, at_least_s), lost)
            try:
                self._websocket, self._welcome = await self._reopen(None)
                self.set_models(self._welcome)
            except (ServerUnreachable, Overloaded) as error:
                lost = error
                at_least_s = (error.retry_after_s if isinstance(error, Overloaded) else None) or 0.0
                if self._is_out_of_patience(error):
                    self._lose(error)
            except AgentflowError as error:
                return error
            else:
                break
        self._queue.frame_bytes = self._welcome.limits.frame_bytes
        self._waiting_since = None
        logger.info("a new session is open on %s", self._url)
        return None

    async def _pause(self, pause_s: float, error: AgentflowError) -> None:
        """Waits before an attempt. In a long pause, ops that have waited for too long fail with ``error``, of
        the last one."""
        until_s = anyio.current_time() + pause_s
        while (left_s := until_s - anyio.current_time()) > 0:
            if left_s > _LAST_SESSION_BACKOFF_S and self._is_out_of_patience(error):
                self._lose(error)
            await anyio.sleep(min(left_s, _LAST_SESSION_BACKOFF_S))  # noqa: TID251  (deliberate)

    def _is_out_of_patience(self, error: AgentflowError) -> bool:
        """Whether ops that wait for a server should fail now."""
        if self._waiting_since is None or self._patience_s is None:
            return False
        return isinstance(error, Overloaded) or anyio.current_time() - self._waiting_since >= self._patience_s

    def _lose(self, error: AgentflowError) -> None:
        """Everything that was sent has failed with ``error``."""
        failures = self._cursors.failures(ErrorInfo.of(error))
        self._begin()
        if failures:
            self._deliver(failures)
        self._lost(error, is_final=False)

    async def _drop_websocket(self) -> None:
        websocket, self._websocket = self._websocket, None
        if websocket is not None:
            await websocket.aclose()

    async def _exchange(self, websocket: WebSocket) -> WebSocketEnded:
        """Sends ops and receives events until the websocket ends. Raises the error that ends the session."""
        ended = WebSocketEnded("the connection broke while sending")
        async with open_task_group() as group:
            group.start_soon(self._write, websocket, group.cancel_scope)
            try:
                while True:
                    await self._handle(await websocket.receive())
            except WebSocketEnded as error:
                ended = error
            group.cancel_scope.cancel()
        return ended

    async def _write(self, websocket: WebSocket, scope: anyio.CancelScope) -> None:
        try:
            await websocket.run_writer(self._next_message)
        except WebSocketEnded:
            # The server may have sent the reason before it closed: keep reading for a moment.
            scope.deadline = anyio.current_time() + _LAST_READ_S

    def _next_message(self) -> bytes | None:
        if not self._is_leaving:
            return self._queue.next_frame()
        assert self._websocket is not None
        if self._websocket.is_open:
            self._websocket.send(encode(Bye(), binary=self._binary))
            self._websocket.close()
        return None

    async def _handle(self, message: bytes | str) -> None:
        match self._decoder.decode(message):
            case Events(ack=ack, events=events):
                self._has_answered = True
                self._queue.acknowledge(ack)
                new = self._cursors.receive(events)
                for start in range(0, len(new), _EVENTS_PER_TURN):
                    if start:
                        with anyio.CancelScope(shield=True):  # received events must be delivered
                            await anyio.lowlevel.checkpoint()
                    self._deliver(new[start : start + _EVENTS_PER_TURN])
                if closes := self._cursors.due_closes():
                    self.send(closes)
            case Refused(error=error):
                raise error.to_exception()
            case frame:
                raise ProtocolError(
                    f"expected an events frame from the server, got a {frame_name(frame)} frame"
                )

    def _check_resumable(self, ended: WebSocketEnded) -> None:
        """Raises the error for a close code with which the session itself has ended."""
        if ended.code == _TOO_BIG:
            raise FrameTooLarge(
                f"{self._url}, or a proxy in front of it, accepts only smaller frames than announced"
            )
        if ended.code in _FINAL_CODES:
            raise ServerLost(f"{_FINAL_CODES[ended.code]} ({self._url} {ended})")

    async def _reconnect(self, ended: WebSocketEnded) -> None:
        """Opens a new websocket for the session within the grace period. ``ServerLost``."""
        await self._drop_websocket()
        why: Exception = ended
        at_least_s = 0.0
        grace_s = self._welcome.limits.resume_grace_s
        with anyio.move_on_after(grace_s):
            for delay_s in pauses_s(_FIRST_BACKOFF_S, _LAST_BACKOFF_S):
                await anyio.sleep(max(delay_s, at_least_s))  # noqa: TID251  (a deliberate delay between attempts)
                try:
                    resume = self._cursors.resume(self._welcome.session, self._welcome.secret)
                    websocket, self._welcome = await self._reopen(resume)
                except (ServerUnreachable, Overloaded) as error:
                    why = error
                    at_least_s = (error.retry_after_s if isinstance(error, Overloaded) else None) or 0.0
                else:
                    self._websocket = websocket
                    self._resend()
                    return
        raise ServerLost(
            f"the connection to {self._url} broke and could not be resumed within {grace_s} s ({why})"
        ) from ended

    def _resend(self) -> None:
        self._queue.frame_bytes = self._welcome.limits.frame_bytes
        self._queue.resume(self._welcome.ack)
        # No cursor covers an answer that was lost with the connection: ask again.
        for ticket, number in list(self._cursors.unanswered.items()):
            if self._queue.is_acknowledged(number):
                self.send([self._cursors.asked_graphs.get(ticket) or ops.GetStats(ticket)])
