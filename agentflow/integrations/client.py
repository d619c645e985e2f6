"""Model calls for other frameworks: from any thread or event loop, through one session per process.

``ModelConnection`` runs a ``ModelCall`` and returns its ``Answer``s, or streams their ``Delta``s, or embeds
the texts of an ``EmbedCall``; it retries transient failures. ``CalledProgram`` groups calls into one program
for the scheduler and the prefix cache. ``SharedSession`` is the session that they use, opened on first use
and reopened after a loss. ``connection_to``, ``embedding_connection_to`` and ``connection_through`` return
the process's connection to a model or a backend.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar
from weakref import WeakValueDictionary, finalize

import anyio
from anyio.abc import TaskStatus

from agentflow.backends.local import Embedded
from agentflow.backends.open_session import Substitute, current_substitute, session
from agentflow.errors import AgentflowError, BadArgument, DeadlineExceeded, RunFailed
from agentflow.integrations.background_loop import BackgroundLoop
from agentflow.language.batch.retries import pause_s
from agentflow.language.expressions import ConversationExpression
from agentflow.language.gen import GenExpression
from agentflow.language.session import Session
from agentflow.language.states.event_stream import TextDelta
from agentflow.language.states.run import VariableNode
from agentflow.language.states.state import RootState, State, state_node
from agentflow.language.states.variable import find_target
from agentflow.protocol.backend import Backend
from agentflow.protocol.chat import ReplyPiece, ReplyReader, TextPiece
from agentflow.protocol.events import TopLogprobs, Usage
from agentflow.protocol.ops import Objective
from agentflow.protocol.wire import DEFAULT_MODEL
from agentflow.runtime.task_group import first_error
from agentflow.runtime.telemetry import attached

# The number of a program's latest calls whose cached prefixes are evicted last.
MAX_KEPT: Final = 4
# More programs than these end the oldest: callers may forget ``end_program``.
MAX_PROGRAMS: Final = 1000
# The process keeps this many objects; far fewer have a thread and a session.
MAX_CONNECTIONS: Final = 1000

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
SessionFunction = Callable[[Session], Awaitable[ResultT]]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of a model. ``prompt``: the beginning of the state. ``output``: the ``af.gen`` or ``af.reply``
    to generate after it, ``n`` times in parallel. Only prompts with the same ``cache_salt`` share cached KV.
    ``deadline_s``: the seconds after which the call fails with ``DeadlineExceeded``."""

    prompt: ConversationExpression | str
    output: GenExpression[Any]
    n: int = 1
    cache_salt: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """The texts to embed, and the options of ``flow.embed``."""

    texts: Sequence[str]
    dimensions: int | None = None
    prompt: str | None = None
    prompt_name: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of answer ``index``."""

    index: int
    piece: ReplyPiece


@dataclass(frozen=True, slots=True)
class Answer:
    """The complete answer ``index``. ``model``: the name of the model that answered. ``text``: for a reply,
    its JSON notation (``read_reply`` reads it). The other fields are as in ``af.Variable``."""

    index: int
    model: str
    finish_reason: str
    usage: Usage
    text: str
    logprobs: tuple[float | None, ...] | None
    top_logprobs: TopLogprobs | None
    tokens: tuple[str, ...] | None
    """The text of each token of ``logprobs``; None also if the server has an earlier version."""


class ModelConnection:
    """Model calls on one session, which opens with the first call. ``shared``: the session.

    Arguments of the four kinds of calls: ``program`` is the name of the call's program, which lasts
    until ``end_program``; ``objective`` is the program's objective. Transient failures are retried
    ``max_retries`` times, as ``flow.map`` retries its inputs; a stream that has yielded an item is not
    retried. ``has_backend`` is as in ``SharedSession``.
    """

    def __init__(self, open_session: Callable[[], Session], *, has_backend: bool = False) -> None:
        self.shared = SharedSession(open_session, has_backend=has_backend)
        # Nothing else ends the thread and the session of a connection that was dropped.
        finalize(self, self.shared.loop.close, 0.0).atexit = False
        self._programs: OrderedDict[str, CalledProgram] = OrderedDict()

    def complete(
        self, call: ModelCall, program: str = "", objective: Objective | None = None, *, max_retries: int = 0
    ) -> list[Answer]:
        """Returns the complete answers, by index; blocks until then."""
        return self.shared.loop.run(lambda: self._complete(call, program, objective, max_retries))

    async def acomplete(
        self, call: ModelCall, program: str = "", objective: Objective | None = None, *, max_retries: int = 0
    ) -> list[Answer]:
        """Like ``complete``, without blocking the caller's event loop."""
        return await self.shared.loop.arun(lambda: self._complete(call, program, objective, max_retries))

    def stream(
        self, call: ModelCall, program: str = "", objective: Objective | None = None, *, max_retries: int = 0
    ) -> Generator[Delta | Answer, None, None]:
        """Yields each answer piece by piece and then complete; blocks between them. Closing it cancels the
        call."""
        return self.shared.loop.stream(lambda: self._stream(call, program, objective, max_retries))

    def astream(
        self, call: ModelCall, program: str = "", objective: Objective | None = None, *, max_retries: int = 0
    ) -> AsyncGenerator[Delta | Answer, None]:
        """Like ``stream``, without blocking the caller's event loop."""
        return self.shared.loop.astream(lambda: self._stream(call, program, objective, max_retries))

    def embed(self, call: EmbedCall, *, max_retries: int = 0) -> list[list[float]]:
        """Returns the embeddings of the texts, in their order; blocks until then. ``NotSupported`` unless the
        connection is from ``embedding_connection_to``, or its backend has an embedding model."""
        return self.shared.loop.run(lambda: self._embed(call, max_retries))

    async def aembed(self, call: EmbedCall, *, max_retries: int = 0) -> list[list[float]]:
        """Like ``embed``, without blocking the caller's event loop."""
        return await self.shared.loop.arun(lambda: self._embed(call, max_retries))

    def end_program(self, name: str) -> None:
        """Ends a program: its cached prefixes may be evicted. From any thread; does not block."""
        self.shared.loop.call_soon(lambda: self._end_program(name))

    def close(self) -> None:
        """Closes the session; the next call opens another one."""
        self.shared.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied model uses the same session

    async def _complete(
        self, call: ModelCall, program: str, objective: Objective | None, max_retries: int
    ) -> list[Answer]:
        async def attempt() -> list[Answer]:
            async with aclosing(self._attempt(call, program, objective)) as events:
                answers = [event async for event in events if isinstance(event, Answer)]
            return sorted(answers, key=lambda answer: answer.index)

        return await _retried(attempt, max_retries)

    async def _embed(self, call: EmbedCall, max_retries: int) -> list[list[float]]:
        async def attempt() -> list[list[float]]:
            flow = await self.shared.opened()
            return await flow.embed(
                list(call.texts),
                dimensions=call.dimensions,
                prompt=call.prompt,
                prompt_name=call.prompt_name,
            )

        return await _retried(attempt, max_retries)

    async def _stream(
        self, call: ModelCall, program: str, objective: Objective | None, max_retries: int
    ) -> AsyncGenerator[Delta | Answer, None]:
        num_failed = 0
        while True:
            try:
                async with aclosing(self._attempt(call, program, objective)) as events:
                    async for event in events:
                        max_retries = 0
                        yield event
                return
            except Exception as error:
                num_failed += 1
                after_s = _pause_s(first_error(error), num_failed, max_retries)
            await anyio.sleep(after_s)  # noqa: TID251  # the back-off before the next attempt

    async def _attempt(
        self, call: ModelCall, name: str, objective: Objective | None
    ) -> AsyncGenerator[Delta | Answer, None]:
        program = self._program(await self.shared.opened(), name, objective)
        async with aclosing(program.stream(call)) as events:
            async for event in events:
                yield event

    def _program(self, flow: Session, name: str, objective: Objective | None) -> CalledProgram:
        program = self._programs.get(name)
        if program is None or program.session is not flow:
            program = CalledProgram(flow, name, objective)
            if name:
                self._programs[name] = program
                while len(self._programs) > MAX_PROGRAMS:
                    self._programs.popitem(last=False)[1].close()
        return program

    def _end_program(self, name: str) -> None:
        program = self._programs.pop(name, None)
        if program is not None:
            program.close()


async def _retried(attempt: Callable[[], Awaitable[ResultT]], max_retries: int) -> ResultT:
    num_failed = 0
    while True:
        try:
            return await attempt()
        except Exception as error:
            num_failed += 1
            after_s = _pause_s(first_error(error), num_failed, max_retries)
        await anyio.sleep(after_s)  # noqa: TID251  # the back-off before the next attempt


def _pause_s(error: Exception, num_failed: int, max_retries: int) -> float:
    """The pause before the next attempt. Raises the error if it is not transient, or if no attempts are
    left."""
    after_s = pause_s(error, num_failed, DeadlineExceeded)
    if after_s is None or num_failed > max_retries:
        raise error
    return after_s


class CalledProgram:
    """Calls that the scheduler treats as one program: it finishes them before it begins another program's
    calls, and the cache keeps the prefixes of the last ``MAX_KEPT`` calls. Without a ``name``, no prefixes
    are kept."""

    def __init__(self, session: Session, name: str, objective: Objective | None) -> None:
        self.session = session
        self._name = name
        self._objective = objective
        self._kept: deque[RootState] = deque()
        self._is_closed = False

    async def stream(self, call: ModelCall) -> AsyncGenerator[Delta | Answer, None]:
        """Yields each answer piece by piece and then complete. Closing it cancels the call."""
        root = self.session.state(cache_salt=call.cache_salt, objective=self._objective, program=self._name)
        is_complete = False
        try:
            async for event in _events(root, call):
                yield event
            is_complete = True
        except RunFailed as error:
            # Runs and states are internal here: callers get the cause.
            raise error.__cause__ if isinstance(error.__cause__, AgentflowError) else error from None
        finally:
            if not is_complete:
                root.cancel()
            self._keep(root)

    def close(self) -> None:
        """Ends the program: its prefixes may be evicted."""
        self._is_closed = True
        while self._kept:
            self._kept.popleft().close()

    def _keep(self, root: RootState) -> None:
        self._kept.append(root)
        while self._kept and (self._is_closed or not self._name or len(self._kept) > MAX_KEPT):
            self._kept.popleft().close()


async def _events(root: State, call: ModelCall) -> AsyncGenerator[Delta | Answer, None]:
    if call.deadline_s is not None:
        root.limit(deadline_s=call.deadline_s)
    root.add(call.prompt)
    states = [root] if call.n == 1 else list(root.fork(call.n))
    nodes = [find_target(state.add(call.output)[call.output]).node for state in states]
    async with aclosing(watched(root, nodes)) as events:
        async for event in events:
            yield event


async def watched(root: State, nodes: Sequence[VariableNode]) -> AsyncGenerator[Delta | Answer, None]:
    """Yields the answers of a run piece by piece, from their start, and then complete. Raises their failure.

    Args:
        root: The first state of the run.
        nodes: The answers, by the last number of their states' paths.
    """
    readers = [ReplyReader() if node.value_type.is_reply else None for node in nodes]
    run = state_node(root).run
    async for event in run.watch(lambda: all(node.is_done for node in nodes), raw=True):
        index = event.path[-1] if event.path else 0
        if not isinstance(event, TextDelta):
            yield _answer(index, nodes[index])
            continue
        reader = readers[index]
        for piece in [TextPiece(event.text)] if reader is None else reader.push(event.text):
            yield Delta(index, piece)
    for node in nodes:
        node.raise_failure()


def _answer(index: int, node: VariableNode) -> Answer:
    end, text = node.end, node.notation
    return Answer(
        index, node.model, end.finish_reason, end.usage, text, end.logprobs, end.top_logprobs, end.tokens
    )


class SharedSession:
    """One session for all threads and event loops of a process, in a background ``loop``.

    ``open_session`` is called on first use, and again after the session was lost or closed. If it fails, the
    call that needed it fails. Unless its sessions are given a backend (``has_backend``), one that was opened
    under another substitute of tests, such as the last test's script, is opened again.

    >>> shared = SharedSession(af.session)
    >>> shared.run(lambda flow: flow.run(judge, essay))  # from any thread
    >>> await shared.arun(lambda flow: flow.run(judge, essay))  # from any event loop
    """

    def __init__(self, open_session: Callable[[], Session], *, has_backend: bool = False) -> None:
        self.loop = BackgroundLoop("agentflow session")
        self._open_session = open_session
        self._has_backend = has_backend
        self._substitute: Substitute | None = None
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._session: Session | None = None
        # Made in the loop: the caller may run in another one.
        self._opening: anyio.Lock | None = None
        self._replaced: anyio.Event | None = None

    def run(self, function: SessionFunction[ResultT]) -> ResultT:
        """Calls the function with the session and returns its result; blocks until then."""
        return self.loop.run(lambda: self._call(function))

    async def arun(self, function: SessionFunction[ResultT]) -> ResultT:
        """Like ``run``, without blocking the caller's event loop. Cancelling it cancels the function."""
        return await self.loop.arun(lambda: self._call(function))

    async def opened(self) -> Session:
        """Returns the open session. Must be called from a task in ``loop``."""
        if self._process != os.getpid():
            self._begin()  # the loop of a forked process does not have the session's tasks
        self._opening = self._opening or anyio.Lock()
        async with self._opening:
            substitute = None if self._has_backend else current_substitute()
            if self._session is None or not self._session.is_alive or self._substitute is not substitute:
                if self._replaced is not None:
                    self._replaced.set()
                self._session, self._substitute = None, substitute
                self._session = await self.loop.start(self._serve)
            return self._session

    def close(self) -> None:
        """Closes the session and cancels its runs. The next call opens another one."""
        self.loop.close()

    async def _call(self, function: SessionFunction[ResultT]) -> ResultT:
        return await function(await self.opened())

    async def _serve(self, *, task_status: TaskStatus[Session]) -> None:
        """Keeps the session open until another one replaces it, or the loop ends."""
        replaced = self._replaced = anyio.Event()
        is_open = False
        try:
            # Not in the trace of the call that opens it, which the session outlives.
            with attached(None):
                async with self._open_session() as flow:
                    is_open = True
                    task_status.started(flow)
                    await replaced.wait()
        except Exception:
            if not is_open:
                raise  # in the task that is opening the session
            logger.warning("a session ended with an error", exc_info=True)


_connections: OrderedDict[tuple[str | None, ...], ModelConnection] = OrderedDict()
# By ``id`` of the backend, which is unique while its connection exists.
_backends: WeakValueDictionary[int, ModelConnection] = WeakValueDictionary()
_lock = threading.Lock()


def connection_to(
    url: str | None = None, model: str | None = None, api_key: str | None = None
) -> ModelConnection:
    """Returns the process's only connection to a server, or to a model in this process. The arguments are the
    same as of ``af.session``. Its session ends with ``close`` and with the process. An idle session is also
    closed if too many others were used more recently (``background_loop.MAX_THREADS``); the next call opens
    it again."""
    is_local = not (url or os.environ.get("AGENTFLOW_URL"))
    key = (None, model or DEFAULT_MODEL, None) if is_local else (url, model, api_key)
    return _connection(key, lambda: session(url, model=model, api_key=api_key))


def embedding_connection_to(
    url: str | None = None, model: str | None = None, api_key: str | None = None
) -> ModelConnection:
    """Like ``connection_to``, for the embedding model ``model``. A server has a default model; without a
    server, None raises ``BadArgument``."""
    url = url or os.environ.get("AGENTFLOW_URL") or None
    if url is None and model is None:
        raise BadArgument(
            "give a model that makes embeddings, or the url of a server that has one", param="model"
        )
    key = ("embed", url, model, api_key if url else None)
    return _connection(key, lambda: _embedding_session(url, model, api_key), has_backend=url is None)


def _connection(
    key: tuple[str | None, ...], open_session: Callable[[], Session], *, has_backend: bool = False
) -> ModelConnection:
    with _lock:
        connection = _connections.get(key)
        if connection is None:
            connection = _connections[key] = ModelConnection(open_session, has_backend=has_backend)
        _connections.move_to_end(key)
        surplus = [_connections.popitem(last=False) for _ in range(len(_connections) - MAX_CONNECTIONS)]
    del surplus  # without the lock: the end of a connection closes its session
    return connection


def _embedding_session(url: str | None, model: str | None, api_key: str | None) -> Session:
    if url is not None:
        return session(url, embed_model=model, api_key=api_key)
    return session(backend=Embedded(str(model), task="embed"))


def connection_through(backend: Backend) -> ModelConnection:
    """Returns the connection through a backend. It lasts as long as a caller keeps a reference to it."""
    with _lock:
        connection = _backends.get(id(backend))
        if connection is None:
            connection = ModelConnection(lambda: session(backend=backend), has_backend=True)
            _backends[id(backend)] = connection
        return connection


_cache_keys: dict[int, str] = {}  # by the id of a backend that exists


def cache_key(backend: Backend) -> str:
    """Returns a text that distinguishes a backend from others in the keys of caches. It is equal in all
    processes if the backend has ``source``; otherwise only this object has it, as a script does."""
    source: str | None = getattr(backend, "source", None)
    if source:
        return source
    known = _cache_keys.get(id(backend))
    if known is None:
        finalize(backend, _cache_keys.pop, id(backend), None)
        known = _cache_keys[id(backend)] = secrets.token_hex(8)
    return known


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
