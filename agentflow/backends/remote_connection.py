"""A session on a server, across as many websockets as it takes.

A broken connection is taken up again within the server's grace period, with nothing lost and
nothing run twice: ops stay in line until the server has taken them, and cursors say how far each
variable and state was heard.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence

import anyio
import anyio.lowlevel

from agentflow.backends.cursors import Cursors
from agentflow.backends.op_queue import OpQueue
from agentflow.backends.websocket import WebSocket, WebSocketEnded
from agentflow.errors import (
    AgentflowError,
    FrameTooLarge,
    Overloaded,
    ProtocolError,
    ServerLost,
    ServerUnreachable,
)
from agentflow.protocol.backend import Deliver, Lost
from agentflow.protocol.events import ErrorInfo
from agentflow.protocol.ops import GetStats, Op
from agentflow.protocol.wire import (
    TAKEN_OVER,
    Bye,
    Events,
    Refused,
    Resume,
    Welcome,
    encode,
    frame_name,
    server_frames,
)
from agentflow.runtime.generator import Capabilities
from agentflow.runtime.task_group import open_task_group

Reopen = Callable[[Resume | None], Awaitable[tuple[WebSocket, Welcome]]]

# How long leaving may take: a round trip, and no more if the server does not answer.
GOODBYE_S = 1.0
# How long to go on reading after writing has failed: the reason may be in what already came.
LAST_WORDS_S = 1.0
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0

# Close codes of RFC 6455, section 7.4.1, and the server's own (docs/protocol.md).
TOO_BIG = 1009
FINAL_CODES = {
    1000: "the server ended the session",
    1002: "the server did not understand a frame",
    1003: "the server did not understand a frame",
    1007: "the server did not understand a frame",
    1008: "the server ended the session",
    1012: "the server was shut down, and the session ended with it",
    TAKEN_OVER: "another connection has taken the session over",
}


# A frame with news of thousands of variables must not stop the loop: others run after so many.
EVENTS_PER_TURN = 128


class RemoteConnection:
    """Serves one session from the first Welcome to the Bye. ``reopen`` opens and greets a websocket;
    ``url`` is for messages."""

    def __init__(
        self,
        url: str,
        reopen: Reopen,
        websocket: WebSocket,
        welcome: Welcome,
        deliver: Deliver,
        lost: Lost,
    ) -> None:
        self.capabilities: Capabilities = welcome.capabilities
        self._url = url
        self._reopen = reopen
        self._binary = websocket.binary
        self._websocket: WebSocket | None = websocket
        self._welcome = welcome
        self._deliver = deliver
        self._lost = lost
        self._decoder = server_frames()
        self._queue = OpQueue(binary=websocket.binary, frame_bytes=welcome.limits.frame_bytes)
        self._cursors = Cursors()
        self._failure: ErrorInfo | None = None
        self._is_leaving = False
        self._has_ended = anyio.Event()
        # Shielded: when the scope around the session is cancelled there is still a Bye to say.
        self._scope = anyio.CancelScope(shield=True)

    def send(self, ops: Sequence[Op]) -> None:
        """Puts the ops in line; they go out with the next frame."""
        if self._failure is not None:
            raise self._failure.to_exception()
        encoded = [self._queue.encoded(op) for op in ops]
        for op, data in zip(ops, encoded, strict=True):
            if self._cursors.submit(op):
                number = self._queue.add(data)
                if isinstance(op, GetStats):
                    self._cursors.unanswered[op.ticket] = number
        self._wake()

    def end(self, error: BaseException | None) -> None:
        pass

    async def run(self) -> None:
        """Serves the session until it ends; reports to ``lost`` if nobody asked it to end."""
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
        """Says Bye and closes; takes a round trip, or ``GOODBYE_S`` if the server does not answer."""
        self._is_leaving = True
        if self._websocket is None:
            self._scope.cancel()
        self._wake()
        with anyio.move_on_after(GOODBYE_S, shield=True):
            await self._has_ended.wait()
        self._scope.cancel()

    def _wake(self) -> None:
        if self._websocket is not None:
            self._websocket.wake()

    async def _serve(self) -> AgentflowError | None:
        """One websocket after the other; what ended the session, or None after a Bye."""
        try:
            while True:
                assert self._websocket is not None
                ended = await self._exchange(self._websocket)
                if self._is_leaving:
                    return None
                self._check_final(ended)
                await self._take_up(ended)
        except AgentflowError as error:
            return error

    async def _exchange(self, websocket: WebSocket) -> WebSocketEnded:
        """Ops out, events in, until the websocket ends. Raises what ends the session."""
        ended = WebSocketEnded("the connection broke while sending")
        failure: AgentflowError | None = None
        async with open_task_group() as group:
            group.start_soon(self._write, websocket, group.cancel_scope)
            try:
                while True:
                    await self._take(await websocket.receive())
            except WebSocketEnded as error:
                ended = error
            except AgentflowError as error:
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return ended

    async def _write(self, websocket: WebSocket, scope: anyio.CancelScope) -> None:
        try:
            await websocket.run_writer(self._next_message)
        except WebSocketEnded:
            # The server may have said why before it hung up: the reader goes on for a moment.
            scope.deadline = anyio.current_time() + LAST_WORDS_S

    def _next_message(self) -> bytes | None:
        if not self._is_leaving:
            return self._queue.next_frame()
        assert self._websocket is not None
        if self._websocket.is_open:
            self._websocket.send(encode(Bye(), binary=self._binary))
            self._websocket.close()
        return None

    async def _take(self, message: bytes | str) -> None:
        match self._decoder.decode(message):
            case Events(ack=ack, events=events):
                self._queue.acknowledge(ack)
                new = self._cursors.hear(events)
                for start in range(0, len(new), EVENTS_PER_TURN):
                    if start:
                        with anyio.CancelScope(shield=True):  # what has been heard must be told
                            await anyio.lowlevel.checkpoint()
                    self._deliver(new[start : start + EVENTS_PER_TURN])
                self._send_due_closes()
            case Refused(error=error):
                raise error.to_exception()
            case frame:
                raise ProtocolError(f"expected events from the server, and a {frame_name(frame)} frame came")

    def _send_due_closes(self) -> None:
        closes = self._cursors.due_closes()
        for close in closes:
            self._queue.add(self._queue.encoded(close))
        if closes:
            self._wake()

    def _check_final(self, ended: WebSocketEnded) -> None:
        if ended.code == TOO_BIG:
            raise FrameTooLarge(
                f"{self._url}, or a proxy in front of it, takes smaller frames than the server says"
            )
        if ended.code in FINAL_CODES:
            raise ServerLost(f"{FINAL_CODES[ended.code]} ({self._url} {ended})")

    async def _take_up(self, ended: WebSocketEnded) -> None:
        """A new websocket for the session, within the grace period; or ``ServerLost``."""
        assert self._websocket is not None
        await self._websocket.aclose()
        self._websocket = None
        why: Exception = ended
        at_least_s = 0.0
        grace_s = self._welcome.limits.resume_grace_s
        with anyio.move_on_after(grace_s):
            for delay_s in _backoff():
                await anyio.sleep(max(delay_s, at_least_s))  # noqa: TID251  (a deliberate delay between attempts)
                try:
                    resume = self._cursors.resume(self._welcome.session, self._welcome.secret)
                    websocket, self._welcome = await self._reopen(resume)
                except (ServerUnreachable, Overloaded) as error:
                    why = error
                    at_least_s = (error.retry_after_s if isinstance(error, Overloaded) else None) or 0.0
                else:
                    self._websocket = websocket
                    self._go_on(self._welcome)
                    return
        lost = ServerLost(
            f"the connection to {self._url} broke and could not be resumed within {grace_s} s ({why})"
        )
        raise lost from ended

    def _go_on(self, welcome: Welcome) -> None:
        self._queue.frame_bytes = welcome.limits.frame_bytes
        self._queue.resume(welcome.ack)
        # An answer that was lost with the connection is not in any cursor: ask again.
        for ticket, number in list(self._cursors.unanswered.items()):
            if self._queue.is_acknowledged(number):
                self._cursors.unanswered[ticket] = self._queue.add(self._queue.encoded(GetStats(ticket)))


def _backoff() -> Iterator[float]:
    """Seconds to wait before each attempt: none, then twice as long each time, spread at random so
    that the clients of a restarted server don't come all at once."""
    yield 0.0
    for attempt in itertools.count():
        yield min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0)
