"""How adapters of other frameworks reach a model: from any thread and any event loop, one session for all,
and calls that belong together as one program.

Calls of a model from outside of any program, as other frameworks make them: a conversation, or a text, and
the answers to it as they come.

One session for all threads and event loops of a process: for code that others call as they like.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import anyio
from anyio.abc import TaskStatus

from agentflow.backends.local import DEFAULT_MODEL
from agentflow.errors import AgentflowError, RunFailed
from agentflow.integrations.background_loop import BackgroundLoop
from agentflow.language.expressions import ConversationExpression, GenExpression
from agentflow.language.run import TextDelta, VariableRecord
from agentflow.language.session import Session
from agentflow.language.state import RootState, State, state_record
from agentflow.language.variable import target_of
from agentflow.protocol.backend import Backend
from agentflow.protocol.chat import Piece, ReplyReader, TextPiece
from agentflow.protocol.events import TopLogprobs, Usage
from agentflow.protocol.ops import Objective

# So many calls of a program keep what they have computed from being dropped first.
MOST_KEPT = 4


@dataclass(frozen=True, slots=True)
class ModelCall:
    """``begins``: what the state begins with. ``says``: what the model says then, a ``reply`` or a ``gen``;
    ``n`` times, each by itself."""

    begins: ConversationExpression | str
    says: GenExpression[Any]
    n: int = 1
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """Answer ``index`` goes on."""

    index: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Ended:
    """Answer ``index`` is complete. ``model``: whose it is. The rest is as ``Variable`` has it."""

    index: int
    model: str
    finish_reason: str
    usage: Usage
    text: str
    """As its value has it: of a reply, a JSON list."""
    logprobs: tuple[float | None, ...] | None
    top_logprobs: TopLogprobs | None


class CalledProgram:
    """Calls that belong together, as one program's: what the last of them computed is kept for the next ones,
    and the scheduler finishes them before it begins another's. Ends with ``close``."""

    def __init__(self, session: Session, name: str = "", objective: Objective | None = None) -> None:
        self.session = session
        self._name = name
        self._objective = objective
        self._kept: deque[RootState] = deque()
        self._is_closed = False

    async def ask(self, call: ModelCall) -> AsyncGenerator[Said | Ended, None]:
        """What the model says, as it comes. Closing this cancels the call. Raises why it failed."""
        root = self.session.state(cache_salt=call.cache_salt, objective=self._objective, program=self._name)
        is_whole = False
        try:
            async for event in _events(root, call, self.session.capabilities.model):
                yield event
            is_whole = True
        except RunFailed as error:
            # That nothing was generated, and why: only the latter is of use to who knows of no states.
            raise error.__cause__ if isinstance(error.__cause__, AgentflowError) else error from None
        finally:
            if not is_whole:
                root.cancel()
            self._keep(root)

    def close(self) -> None:
        """Nothing more is asked: what was kept may go."""
        self._is_closed = True
        while self._kept:
            self._kept.popleft().close()

    def _keep(self, root: RootState) -> None:
        self._kept.append(root)
        while self._kept and (self._is_closed or not self._name or len(self._kept) > MOST_KEPT):
            self._kept.popleft().close()


async def _events(root: State, call: ModelCall, model: str) -> AsyncGenerator[Said | Ended, None]:
    root.add(call.begins)
    states = [root] if call.n == 1 else list(root.fork(call.n))
    records = [target_of(state.add(call.says)[call.says]).record for state in states]
    readers = [ReplyReader() if call.says.value_type.is_reply else None for _ in states]
    run = state_record(root).run
    async for event in run.watch(lambda: all(record.is_done for record in records), raw=True):
        index = event.path[-1] if event.path else 0
        if not isinstance(event, TextDelta):
            yield _ended(model, index, records[index])
            continue
        reader = readers[index]
        pieces = [TextPiece(event.text)] if reader is None else reader.push(event.text)
        for piece in pieces:
            yield Said(index, piece)
    for record in records:
        record.raise_failure()


def _ended(model: str, index: int, record: VariableRecord) -> Ended:
    end, text = record.end, record.notation
    return Ended(index, model, end.finish_reason, end.usage, text, end.logprobs, end.top_logprobs)


logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Function = Callable[[Session], Awaitable[ResultT]]
Source = Callable[[Session], AsyncGenerator[ResultT, None]]


class SharedSession:
    """Opened (``open_session``) when something is first asked of it, in a thread with a loop of its own, and
    again when it was lost. What fails to open fails who asked.

    >>> shared = SharedSession(af.session)
    >>> shared.run(lambda flow: flow.run(judge, essay))  # from any thread
    >>> await shared.arun(lambda flow: flow.run(judge, essay))  # from any event loop
    """

    def __init__(self, open_session: Callable[[], Session], name: str = "agentflow session") -> None:
        self._open_session = open_session
        self._thread = BackgroundLoop(name)
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._session: Session | None = None
        self._opening = anyio.Lock()
        self._replaced = anyio.Event()

    def run(self, function: Function[ResultT]) -> ResultT:
        """What the function gives; blocks until then."""
        return self._thread.run(lambda: self._call(function))

    async def arun(self, function: Function[ResultT]) -> ResultT:
        """The same for a caller in an event loop, which goes on. Cancelling this cancels that."""
        return await self._thread.arun(lambda: self._call(function))

    def stream(self, source: Source[ResultT]) -> Generator[ResultT, None, None]:
        """What the asynchronous generator gives, as it comes. Closing this closes that."""
        return self._thread.stream(lambda: self._iterate(source))

    def astream(self, source: Source[ResultT]) -> AsyncGenerator[ResultT, None]:
        """The same for a reader in an event loop."""
        return self._thread.astream(lambda: self._iterate(source))

    def call_soon(self, function: Callable[[], object]) -> None:
        """Has it called in the session's loop; nothing happens where there is none."""
        self._thread.call_soon(function)

    def close(self) -> None:
        """Ends the session, and cancels what still runs there. The next call opens another one."""
        self._thread.close()

    async def _call(self, function: Function[ResultT]) -> ResultT:
        return await function(await self._opened())

    async def _iterate(self, source: Source[ResultT]) -> AsyncGenerator[ResultT, None]:
        async with aclosing(source(await self._opened())) as items:
            async for item in items:
                yield item

    async def _opened(self) -> Session:
        if self._process != os.getpid():
            self._begin()  # a fork of the process has another loop: the session's tasks are not in it
        async with self._opening:
            if self._session is None or not self._session.is_alive:
                self._replaced.set()
                self._session = await self._thread.start(self._serve)
            return self._session

    async def _serve(self, *, task_status: TaskStatus[Session]) -> None:
        """Keeps the session open until another one takes its place, or the loop ends."""
        replaced = self._replaced = anyio.Event()
        is_open = False
        try:
            async with self._open_session() as flow:
                is_open = True
                task_status.started(flow)
                await replaced.wait()
        except Exception:
            if not is_open:
                raise  # to whoever waits for it
            logger.warning("a session did not end well", exc_info=True)


# Programs whose end nobody tells are dropped, the oldest first.
MOST_PROGRAMS: Final = 1000


class ModelConnection:
    """Opened with the first call. ``shared``: for what is no call."""

    def __init__(self, open_session: Callable[[], Session]) -> None:
        self.shared = SharedSession(open_session)
        self._programs: OrderedDict[str, CalledProgram] = OrderedDict()

    def ask(
        self, call: ModelCall, program: str = "", objective: Objective | None = None
    ) -> Generator[Said | Ended, None, None]:
        """What the model says, as it comes; blocks in between. ``program``: what the call belongs to, until
        ``end_program``."""
        return self.shared.stream(lambda flow: self._ask(flow, call, program, objective))

    def aask(
        self, call: ModelCall, program: str = "", objective: Objective | None = None
    ) -> AsyncGenerator[Said | Ended, None]:
        """The same for a reader in an event loop."""
        return self.shared.astream(lambda flow: self._ask(flow, call, program, objective))

    def end_program(self, name: str) -> None:
        """Nothing more is asked of it. From any thread; waits for nothing."""
        self.shared.call_soon(lambda: self._end_program(name))

    def close(self) -> None:
        """Ends the session; the next call opens another one."""
        self.shared.close()

    async def _ask(
        self, flow: Session, call: ModelCall, name: str, objective: Objective | None
    ) -> AsyncGenerator[Said | Ended, None]:
        program = self._program(flow, name, objective)
        async with aclosing(program.ask(call)) as events:
            async for event in events:
                yield event

    def _program(self, flow: Session, name: str, objective: Objective | None) -> CalledProgram:
        program = self._programs.get(name)
        if program is None or program.session is not flow:
            program = CalledProgram(flow, name, objective)
            if name:
                self._programs[name] = program
                while len(self._programs) > MOST_PROGRAMS:
                    self._programs.popitem(last=False)[1].close()
        return program

    def _end_program(self, name: str) -> None:
        program = self._programs.pop(name, None)
        if program is not None:
            program.close()


_connections: dict[tuple[str | None, ...], ModelConnection] = {}
# By the backend's ``id``, which nothing else has while its connection is there.
_backends: WeakValueDictionary[int, ModelConnection] = WeakValueDictionary()
_lock = threading.Lock()


def connection_to(
    url: str | None = None, model: str | None = None, api_key: str | None = None
) -> ModelConnection:
    """The process's one connection to this server, or to this model in this process: as ``af.session``, which
    it opens. Closed with the process, or with ``close``."""
    from agentflow.backends.open_session import session

    is_local = not (url or os.environ.get("AGENTFLOW_URL"))
    with _lock:
        key = (None, model or DEFAULT_MODEL, None) if is_local else (url, model, api_key)
        if key not in _connections:
            _connections[key] = ModelConnection(lambda: session(url, model=model, api_key=api_key))
        return _connections[key]


def connection_through(backend: Backend) -> ModelConnection:
    """The one through this backend, as long as somebody has it."""
    from agentflow.backends.open_session import session

    with _lock:
        connection = _backends.get(id(backend))
        if connection is None:
            connection = ModelConnection(lambda: session(backend=backend))
            _backends[id(backend)] = connection
        return connection
