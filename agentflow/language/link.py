"""The link between a session's programs and its backend.

States, variables and runs hold a ``Link`` instead of their ``Session``: it numbers them, sends their ops, and
delivers the backend's events to them. ``Session`` opens and closes it. A trace has a separate link
(``graphs/trace``), which collects ops instead of sending them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol
from weakref import ref

import anyio
from anyio.abc import TaskGroup

from agentflow.errors import (
    AgentflowError,
    BadArgument,
    Cancelled,
    EngineFailed,
    ProgramError,
    ServerLost,
    StateClosed,
    shown_error,
)
from agentflow.language.failures.mistakes import no_loop
from agentflow.language.failures.stack_frames import ProgramLine
from agentflow.language.observing.blocking import LoopWatch, threshold_s
from agentflow.language.observing.graph_watch import GraphWatch
from agentflow.language.observing.runs import Runs
from agentflow.language.observing.spans import SessionSpan, spans_of_session
from agentflow.language.uploads import REFERRING, Uploads
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend, Connection
from agentflow.protocol.events import (
    Capabilities,
    Delta,
    ErrorInfo,
    Event,
    GraphReply,
    LiveGraph,
    Peeked,
    Reached,
    StateFailed,
    Stats,
    StatsReply,
    Value,
    VarFailed,
    Watched,
    spent,
    summed,
)
from agentflow.protocol.images import Image, known_file
from agentflow.protocol.op_table import StateModels
from agentflow.runtime.limits import limit_op
from agentflow.runtime.loop_turns import Starts
from agentflow.runtime.task_group import adopt_callback, loop_getter, open_task_group, running_loop

_STATS_S = 1.0
"""How long the end of a link may wait for its counters."""

TRACE: ContextVar[Link | None] = ContextVar("trace", default=None)
"""The link of the trace that runs now."""


class StateEvents(Protocol):
    """The methods of a ``StateNode`` that the link calls."""

    def reach(self, ticket: int) -> None:
        """The backend has reached this ticket."""

    def fail(self, error: ErrorInfo) -> None:
        """No further op of the state will run."""

    def find_line(self, number: int) -> ProgramLine | None:
        """The line of the program that appended op ``number``."""

    def find_origin(self, number: int) -> Exception | None:
        """The error that a function of the program raised instead of providing op ``number``."""


class VariableEvents(Protocol):
    """The methods of a ``VariableNode`` that the link calls. It removes itself from ``Link.variables`` when
    done."""

    def extend(self, at: int, text: str) -> None:
        """The text continues with ``text`` at character ``at``."""

    def extend_reasoning(self, at: int, text: str) -> None:
        """The reasoning continues with ``text`` at character ``at``."""

    def complete(self, value: Value) -> None:
        """The variable is complete."""

    def fail(self, error: ErrorInfo) -> None:
        """The variable will have no value."""


class _Ids:
    """The numbers of the states, variables and tickets of a session. A recording has one space of them."""

    def __init__(self) -> None:
        self._last = 0

    def reserve(self, count: int) -> int:
        """Reserves consecutive numbers; returns the number before the first."""
        before, self._last = self._last, self._last + count
        return before


class Link:
    """``seed``: the session's seed, from which runs derive their seeds. ``states``: the open states by
    number. ``variables``: the unfinished variables by number."""

    is_tracing = False
    """Whether nothing runs, so that awaits return immediately."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.states: dict[int, StateEvents] = {}
        self.variables: dict[int, VariableEvents] = {}
        self._connection: Connection | None = None
        self._models = StateModels({})
        self._tasks: TaskGroup | None = None
        self._stack = AsyncExitStack()
        self._failure: Exception | None = None
        self._first_id = 0  # the backend has lost all states and variables with lower numbers
        self._loop: object | None = None  # where it was opened, and the loop's thread
        self._thread = 0
        self._get_loop: Callable[[], object] = running_loop
        self._ids = _Ids()
        self._run_indices = itertools.count()
        self._answers: dict[int, tuple[anyio.Event, list[StatsReply | GraphReply]]] = {}
        # Only the watch's reader holds it, so that a loop ends it by being left.
        self._graph_watch: Callable[[], GraphWatch | None] = lambda: None
        self._watched = 0  # its ticket
        self.is_replay = False
        """Whether the backend has the texts that the client provided when the session was recorded."""
        self._watch: LoopWatch | None = None
        self.deadline = math.inf
        """When the limits of the session end all states, on the event loop's clock."""
        self._tokens_left: int | None = None
        self._uploads = Uploads()
        self._links = [self]
        """The links that share the limits of the session."""
        self._ended_stats: list[Stats] = []
        """The counters of links that have ended, in one."""
        self.spans: SessionSpan | None = None
        self.runs = Runs()
        self.starts = Starts()
        """The beginnings of runs."""

    def limit(self, deadline_s: float | None, output_tokens: int | None) -> None:
        """Limits all states; see ``Session.limit``."""
        self._limit(deadline_s, output_tokens)
        for link in self._links:
            if link is not self and link.is_alive:
                link._limit(deadline_s, output_tokens)

    @property
    def shares_tokens(self) -> bool:
        """Whether a limit of tokens holds for several models together, so that each must report all that it
        generates."""
        return self._tokens_left is not None and len(self.models) + len(self._links) > 2

    def _limit(self, deadline_s: float | None, output_tokens: int | None) -> None:
        self.send([limit_op(0, deadline_s, output_tokens)])
        if deadline_s is not None:
            self.deadline = min(self.deadline, anyio.current_time() + deadline_s)
        if output_tokens is not None:
            left = self._tokens_left
            self._tokens_left = output_tokens if left is None else min(left, output_tokens)

    async def open(self, backend: Backend) -> None:
        """Connects to the backend and opens a task group. ``BadArgument`` the second time."""
        if self._tasks is not None:
            raise BadArgument("a session is entered once: make another with af.session(...)")
        self._loop, self._get_loop, self._thread = running_loop(), loop_getter(), threading.get_ident()
        blocking_s = threshold_s()
        self.is_replay = bool(getattr(backend, "is_replay", False))
        self.spans = spans_of_session()
        try:
            async with AsyncExitStack() as stack:
                connecting = backend.connect(self._deliver, self._lose)
                self._connection = await stack.enter_async_context(connecting)
                self._models = StateModels(self._connection.models)
                self._tasks = await stack.enter_async_context(open_task_group())
                self._stack = stack.pop_all()
        except BaseException as error:
            self._end_spans(error)
            raise
        if self.spans is not None:
            self.spans.is_open(self._models.default.model)
        if blocking_s:
            self._watch = LoopWatch(blocking_s, lambda: bool(self.states), self._lose)

    async def close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancels the tasks, closes the connection, and fails unfinished states and variables. The arguments
        are as in ``__aexit__``."""
        assert self._tasks is not None
        # An error of the block must propagate as it is raised, not inside the task groups' exception groups;
        # the task groups handle a cancellation themselves.
        is_cancelled = isinstance(error, anyio.get_cancelled_exc_class())
        try:
            if self._watch is not None:
                self._watch.stop()
            self._tasks.cancel_scope.cancel()
            if self._connection is not None:
                self._connection.end(error)
            self._connection = None
            self._end_all(ErrorInfo.of(Cancelled("the session has ended")))
        finally:  # on trio, Ctrl-C raises KeyboardInterrupt between any two lines
            try:
                await self._stack.__aexit__(*((kind, error, trace) if is_cancelled else (None, None, None)))
            finally:
                self._end_spans(error)

    @asynccontextmanager
    async def to_backend(self, backend: Backend) -> AsyncIterator[Link]:
        """A link of the same session to another backend. Its runs are among the session's, and both links
        use up the session's limits."""
        link = Link(self.seed)
        link.runs, link._run_indices, link._ids = self.runs, self._run_indices, self._ids
        await link.open(backend)
        try:
            left_s = None if math.isinf(self.deadline) else max(0.0, self.deadline - anyio.current_time())
            if left_s is not None or self._tokens_left is not None:
                link._limit(left_s, self._tokens_left)
            link._links = self._links
            self._links.append(link)
            yield link
        except BaseException as error:
            await self._leave(link)
            await link.close(type(error), error, error.__traceback__)
            raise
        await self._leave(link)
        await link.close(None, None, None)

    async def _leave(self, link: Link) -> None:
        """Keeps the counters of the link, which ends."""
        if anyio.current_effective_deadline() != -math.inf:  # else the tasks of the link are cancelled, too
            with anyio.CancelScope(shield=True), anyio.move_on_after(_STATS_S), suppress(AgentflowError):
                self._ended_stats = [summed([*self._ended_stats, await link._backend_stats()])]
        if link in self._links:
            self._links.remove(link)

    def _spend(self, event: Value | VarFailed) -> None:
        """Takes tokens from the limit of all links, and tells their backends how many are left."""
        usage = spent(event)
        num_tokens = 0 if usage is None else usage.output_tokens
        for link in self._links:
            if num_tokens and link._tokens_left:
                link._tokens_left = max(0, link._tokens_left - num_tokens)
                if len(self._links) > 1:
                    link.send([limit_op(0, None, link._tokens_left)], quiet=True)

    def _end_spans(self, error: BaseException | None) -> None:
        if self.spans is not None:
            self.spans.end(error)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the default model."""
        self.check_open()
        return self._models.default

    @property
    def models(self) -> Mapping[str, Capabilities]:
        """The capabilities of each model by name, the default first."""
        self.check_open()
        return self._models.models

    def model_named(self, name: str) -> Capabilities:
        """The capabilities of a model, or of the default one for "". ``UnknownModel``."""
        return self._models.named(name)

    @property
    def is_alive(self) -> bool:
        """Whether ops can still be sent."""
        return self._connection is not None and self._failure is None

    @property
    def is_connected(self) -> bool:
        """Whether the backend can be reached now."""
        return self.is_alive and self._connection is not None and self._connection.is_connected

    def check_alive(self) -> None:
        """Raises the error that ended the session, ``StateClosed`` before it is opened and after its end, or
        ``ProgramError`` in another event loop."""
        self.check_open()
        self.check_loop()

    def check_open(self) -> None:
        """Like ``check_alive``, in any thread."""
        if self._failure is not None:
            raise ErrorInfo.of(self._failure).to_exception()
        if self._connection is None:
            if self._tasks is None:
                raise StateClosed(
                    "the session was not opened: write `async with af.session(...) as flow:`, and do this "
                    "inside the block"
                )
            raise StateClosed(
                "the session has ended: do this inside its `async with` block, or before "
                "`await flow.close()`",
                reason="ended",
            )

    def check_loop(self) -> None:
        """``ProgramError`` outside the event loop of the session, whose tasks nothing would wake. A thread
        between two runs of its event loop, as in IPython's terminal, is allowed."""
        try:
            if self._get_loop() is self._loop:
                if self._get_loop is asyncio.get_running_loop and asyncio.current_task() is None:
                    adopt_callback()
                return
        except RuntimeError:  # another kind of loop runs, or none
            pass
        loop = running_loop()
        if loop is self._loop or (loop is None and threading.get_ident() == self._thread):
            return
        raise ProgramError(
            "the session was opened in another event loop, and works only there: from other threads, call "
            "`asyncio.run_coroutine_threadsafe(coroutine, loop)` with that loop (in a worker thread of "
            "anyio, `anyio.from_thread.run`), or open another session here"
        )

    def check_runs(self) -> None:
        """``ProgramError`` between two runs of the event loop, where no task can be started."""
        try:
            self._get_loop()
        except RuntimeError:
            raise no_loop() from None

    def recorded_file(self, source: str) -> Image:
        """The image, or the file of a video, that a recording has by its source."""
        found = known_file(source)
        find_file = getattr(self._connection, "find_file", None)
        if found is None and find_file is not None:
            found = find_file(source)
        return Image(source) if found is None else found

    def next_id(self) -> int:
        """A number that no state, variable or ticket of this session has."""
        return self._ids.reserve(1) + 1

    def reserve_ids(self, count: int) -> int:
        """Reserves ``count`` consecutive numbers; returns the number before the first."""
        return self._ids.reserve(count)

    def next_run_index(self) -> int:
        """The index of the next run, from which its seeds are derived."""
        if self._watch is not None:
            self._watch.wake()
        return next(self._run_indices)

    def send(self, recorded: list[ops.Op], *, quiet: bool = False) -> None:
        """Sends ops, all or none; ops of states that the backend has lost are dropped. ``BadArgument`` for an
        invalid op, ``NotSupported`` for one that the backend cannot run. ``quiet``: does nothing if the
        session has ended."""
        if quiet and not self.is_alive:
            return
        self.check_alive()
        self.send_checked(recorded)

    def send_checked(self, recorded: list[ops.Op]) -> None:
        """``send`` after ``check_alive``."""
        assert self._connection is not None
        refers = False
        for op in recorded:
            self._models.admit(op)
            refers = refers or type(op) in REFERRING
        if self._first_id:
            recorded = [op for op in recorded if not self._is_of_lost(op)]
        added = self._uploads.before(recorded) if refers else []
        try:
            self._connection.send([*added, *recorded])
        except AgentflowError:
            self._uploads.mark_unsent(added)
            raise

    def _is_of_lost(self, op: ops.Op) -> bool:
        own: int = getattr(op, "state", None) or getattr(op, "var", None) or self._first_id
        return own < self._first_id

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Starts a task that ends with the session."""
        self.check_alive()
        self.check_runs()
        assert self._tasks is not None
        self._tasks.start_soon(function, *args)

    async def stats(self) -> Stats:
        """The counters of the backend and of all batches."""
        own = await self._backend_stats()
        found: dict[Link, Stats] = {}
        for link in list(self._links):
            if link is not self and link.is_alive:
                with suppress(AgentflowError):
                    found[link] = await link._backend_stats()
        # A link that has ended meanwhile is among the ended ones.
        batches = [found[link] for link in self._links if link in found]
        return summed([own, *batches, *self._ended_stats])

    async def _backend_stats(self) -> Stats:
        reply = await self._ask(ops.GetStats(self.next_id()))
        if not isinstance(reply, StatsReply) or reply.stats is None:
            raise EngineFailed("no counters came") if reply.error is None else reply.error.to_exception()
        return reply.stats

    async def graphs(self, *, of_tenant: bool) -> list[LiveGraph]:
        """The live graph of the session, and with ``of_tenant`` the graphs of the tenant's other sessions and
        programs."""
        reply = await self._ask(ops.GetGraph(self.next_id(), of_tenant))
        if not isinstance(reply, GraphReply) or reply.graph is None:
            raise EngineFailed("no graph came") if reply.error is None else reply.error.to_exception()
        return [reply.graph, *reply.others]

    def watch(self, interval_s: float) -> GraphWatch:
        """Watches the graphs of the tenant, in place of an earlier watch."""
        watch = GraphWatch(self.next_id(), self._unwatch)
        op = ops.Watch(watch.ticket, steps=False, tree=False, interval_s=interval_s, graphs=True)
        self.check_alive()
        self.send([op])
        if (earlier := self._graph_watch()) is not None:
            earlier.end()
        self._graph_watch, self._watched = ref(watch), watch.ticket
        return watch

    def _unwatch(self, ticket: int) -> None:
        if ticket == self._watched:
            self._watched = 0
            with suppress(AgentflowError):
                self.send([ops.Unwatch()])

    async def _ask(self, question: ops.GetStats | ops.GetGraph) -> StatsReply | GraphReply:
        """Sends a question and waits for its answer."""
        self.check_alive()
        answer: tuple[anyio.Event, list[StatsReply | GraphReply]] = (anyio.Event(), [])
        try:
            self._answers[question.ticket] = answer
            self.send([question])
            await answer[0].wait()
        finally:
            del self._answers[question.ticket]
        self.check_alive()
        return answer[1][0]

    def needs_values(self, what: str) -> None:
        """Called before ``what`` uses a value. A trace raises ``DataDependent``."""

    def stand_in(self, node: Any) -> Any:
        """The stand-in for the value of a ``VariableNode``, of a link that ``is_tracing``."""
        raise NotImplementedError

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Delta():
                    if (variable := self.variables.get(event.var)) is not None:
                        if event.reasoning:
                            variable.extend_reasoning(event.reasoning_at, event.reasoning)
                        variable.extend(event.at, event.text)
                case Value():
                    self._spend(event)
                    if (variable := self.variables.get(event.var)) is not None:
                        variable.complete(event)
                case VarFailed():  # the state fails too, by a separate event
                    self._spend(event)
                    if (variable := self.variables.get(event.var)) is not None:
                        variable.fail(event.error)
                case Reached():
                    if (state := self.states.get(event.state)) is not None:
                        state.reach(event.ticket)
                case StateFailed():
                    if (state := self.states.get(event.state)) is not None:
                        state.fail(event.error)
                case StatsReply() | GraphReply():
                    if event.ticket in self._answers:
                        self._answers[event.ticket][1].append(event)
                        self._answers[event.ticket][0].set()
                case Watched():
                    if (watch := self._graph_watch()) is None:
                        self._unwatch(event.ticket)
                    elif event.ticket == watch.ticket:
                        watch.receive(event)
                case Peeked():
                    pass  # a program does not send the op

    def _lose(self, error: Exception, *, is_final: bool = True) -> None:
        is_known = isinstance(error, AgentflowError)
        failure = error if is_known else ServerLost(f"the backend is gone: {shown_error(error)}")
        if is_final:
            self._failure = failure
        self._end_all(ErrorInfo.of(failure))
        if not is_final:
            self._begin_again()

    def _begin_again(self) -> None:
        """The backend has lost all states and the limits of the session, and can be used again."""
        self.states.clear()
        self._uploads.clear()
        self._first_id = self.next_id()
        if self._connection is None:
            return
        left_s = None if math.isinf(self.deadline) else max(0.0, self.deadline - anyio.current_time())
        if left_s is not None or self._tokens_left is not None:
            self._connection.send([limit_op(0, left_s, self._tokens_left)])

    def _end_all(self, error: ErrorInfo) -> None:
        """Fails everything that still waits for the backend."""
        for variable in list(self.variables.values()):
            variable.fail(error)
        for state in list(self.states.values()):
            state.fail(error)
        for arrived, _ in self._answers.values():
            arrived.set()
        if (watch := self._graph_watch()) is not None:
            watch.fail(error)
