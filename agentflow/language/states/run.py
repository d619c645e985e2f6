"""A run: one call of a program, as a tree of its states and their variables.

``Run`` keeps its tree until all states and variables have ended. The link delivers the backend's events to
``StateNode`` and ``VariableNode``; programs see these as ``State`` and ``Variable``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypeVar

import anyio

from agentflow.errors import (
    AgentflowError,
    BadArgument,
    Cancelled,
    ClosedReason,
    DeadlineExceeded,
    InvalidValue,
    StateClosed,
)
from agentflow.language.failures.stack_frames import ProgramLine, calling_line
from agentflow.language.link import Link
from agentflow.language.observing.runs import RunRecord
from agentflow.language.observing.spans import GenSpan, StateSpan
from agentflow.language.op_log import LineTable, SingleWriter, Transcript, UnfinishedOps
from agentflow.language.states.event_stream import EventStream, StateStream
from agentflow.language.states.reported import CauseFirst, cancelled, located
from agentflow.language.typed.replies import make_calls
from agentflow.language.typed.tools import ToolCall
from agentflow.language.typed.values import TEXT, ValueType
from agentflow.protocol import ops
from agentflow.protocol.chat import ReplySoFar
from agentflow.protocol.events import Capabilities, ErrorInfo, Value
from agentflow.protocol.growing_text import GrowingText
from agentflow.protocol.sampling import derived_seed, seed_place, seed_run
from agentflow.runtime.limits import deadline_exceeded, limit_op

FIRST_MAPPED = 2**52
"""An op number above this names a mapped variable: this plus the variable's number."""

StreamT = TypeVar("StreamT", bound=EventStream)

StatePath = tuple[int, ...]
"""A state's place in its fork tree: () is the root, (2,) its third branch, (2, 0) the first branch of
that."""


def _label(name: str) -> str:
    """The name of a function, cut to the length that an op may have."""
    return str(name)[: ops.MAX_SALT_CHARS].encode("utf-8", "replace").decode()


class Run:
    """The tree of one call. ``places``: the place of each gen in a trace.

    Args:
        link: The session's link.
        cache_salt: States share cached KV only if their salts are equal.
        index: The run's number, from which its seeds are derived; by default the next one.
        root_id: The number of a root that a graph opens; by default the run opens a root.
        objective: A hint for all states.
        group: The program waits for all runs with the same group, which are one task group.
        program: Calls with the same name are siblings to the scheduler.
        model: The model of the root; by default the session's.
        name: The name of the running program, for watchers and for a new ``record``.
        record: The run's record, if it has begun.
    """

    def __init__(
        self,
        link: Link,
        *,
        cache_salt: str = "",
        index: int | None = None,
        root_id: int | None = None,
        objective: ops.Objective | None = None,
        group: str = "",
        program: str = "",
        model: str = "",
        name: str = "",
        record: RunRecord | None = None,
    ) -> None:
        self.link = link
        self.index = link.next_run_index() if index is None else index
        self.record = link.runs.begin(name or program or "state", link.spans) if record is None else record
        self.places: dict[int, str] = {}
        self.states: list[StateNode] = []
        self.seed_prefix = seed_run(link.seed, self.index)
        self._unfinished: dict[int, VariableNode] = {}
        self._failed: list[VariableNode] = []
        self._num_ended = 0
        self._raised: set[ErrorInfo] = set()
        self.cause_first = CauseFirst()
        # The streams that get all changes. Weak: a stream that was dropped needs no events.
        self.streams: weakref.WeakSet[EventStream] = weakref.WeakSet()
        if root_id is None:
            root_id = link.next_id()
            link.send([ops.Open(root_id, cache_salt, objective, program, _label(name), model, group)])
        self.root = StateNode(self, root_id, (), link.model_named(model))
        self.root.span = self.record.span
        self.adopt(self.root)

    @property
    def is_unfinished(self) -> bool:
        """Whether some variables are not done."""
        return bool(self._unfinished)

    def adopt(self, state: StateNode) -> None:
        """Adds a state that the backend knows."""
        self.states.append(state)
        self.link.states[state.id] = state

    def touch(self, variable: VariableNode) -> None:
        """The variable is new or has changed: wakes the streams."""
        if variable.is_done:
            if self._unfinished.pop(variable.id, None) is not None:
                self._num_ended = variable.end_number = self._num_ended + 1
                if variable.error is not None:
                    self._failed.append(variable)
        else:
            self._unfinished.setdefault(variable.id, variable)
        if variable.is_shown:
            for stream in self.streams:
                stream.touch(variable)

    def raised(self, error: ErrorInfo, state: StateNode, name: str | None = None) -> AgentflowError:
        """The exception for a failure of ``state``, or of its variable ``name``, that is raised in the
        program now; ``settle`` does not raise it again."""
        self._raised.add(error.origin)
        exception = located(error, self.link.states)
        return cancelled(exception, state.path, name) if isinstance(exception, Cancelled) else exception

    async def settle(self) -> None:
        """Waits until everything the run started has ended. Raises the first failure that was not raised in
        the program."""
        for state in self.states:
            state.ask()
        for state in list(self.states):  # some may be dropped meanwhile
            await state.settled()
        # No state waits for variables that a Python function provides.
        provided = [*self._failed, *self._unfinished.values()]
        for variable in provided:
            await variable.settled()
        failures = [(state, state.error) for state in self.states]
        failures += [(variable.state, variable.error) for variable in provided]
        for state, error in failures:
            if error is not None and not state.is_dropped and not self._is_known(state, error):
                raise located(error, self.link.states)

    def _is_known(self, state: StateNode, error: ErrorInfo) -> bool:
        """Whether the program has raised the failure of ``state``, or has caused it."""
        origin = error.origin
        if origin.code == DeadlineExceeded.code and state.has_raised_deadline:
            return True
        return error.code == Cancelled.code or origin in self._raised

    def watch(self, is_over: Callable[[], bool], *, raw: bool = False) -> EventStream:
        """The events of all variables, from their start, until ``is_over``; see ``EventStream``."""
        shown = [variable for state in self.states for variable in state.shown]
        return self.follow(EventStream(is_over, raw=raw), shown)

    def watch_state(self, state: StateNode) -> EventStream:
        """The events of one state's variables, until all variables that it has by then are done."""
        return self.follow(StateStream(state), state.shown)

    def follow(self, stream: StreamT, variables: Iterable[VariableNode]) -> StreamT:
        """Reports these variables to the stream, and later each variable that changes."""
        for variable in variables:
            stream.touch(variable)
        self.link.check_loop()
        self.streams.add(stream)
        return stream

    def drop(self, state: StateNode) -> None:
        """Ends a state whose failure is reported elsewhere, like the failures of its variables."""
        state.close()
        state.is_dropped = True
        if state in self.states:
            self.states.remove(state)
        self._failed = [variable for variable in self._failed if variable.state is not state]

    def wake_streams(self) -> None:
        """Makes the streams check whether they are over."""
        for stream in self.streams:
            stream.wake()

    def close(self, *, keeps_files: bool = True) -> None:
        """Ends all states. ``keeps_files``: their images and videos can still be read. Otherwise the bytes
        are free now, and not when the garbage collector finds the states, which refer to each other."""
        for state in reversed(self.states):
            state.close()
            if not keeps_files:
                state.transcript.forget_files()
        self.record.end()
        self.wake_streams()


class StateNode:
    """A state: its content, and how far the backend has processed it.

    Args:
        run: The run that owns it.
        state_id: Its number in the session.
        path: Its place in the fork tree of the run.
        capabilities: The capabilities of its model.
        parent: The state that it was forked from.
    """

    def __init__(
        self,
        run: Run,
        state_id: int,
        path: StatePath,
        capabilities: Capabilities,
        parent: StateNode | None = None,
    ) -> None:
        self.run = run
        self.capabilities = capabilities
        self.link = run.link
        self.id = state_id
        self.path = path
        self.transcript: Transcript = Transcript(parent.transcript if parent is not None else None)
        # The latest variable of each name, including the parent's variables.
        self.names: dict[str, VariableNode] = dict(parent.names) if parent is not None else {}
        self.own: list[VariableNode] = []  # the variables declared here
        self.num_gens = 0
        self.error: ErrorInfo | None = None
        self.closed: ClosedReason | None = None  # why nothing can be appended any more
        self._closed_how = ""  # and the same in words
        self.is_chosen = False  # the end of its fork's block does not seal it
        self.mapped_lines: dict[int, ProgramLine | None] = {}  # mapped variable → the line that maps it
        self.mapped_errors: dict[int, Exception] = {}  # and the error of its function
        self.parent = parent
        self.children: list[StateNode] = []
        self._forked_after = parent.in_flight.num_submitted if parent is not None else 0
        self.in_flight: UnfinishedOps = UnfinishedOps()
        self._lines = LineTable()
        self._writer = SingleWriter()
        self.span: StateSpan | None = None  # the parent of its gens' spans
        self.is_hidden = False  # whether it is a detail of how a variable is generated
        self.has_raised_deadline = False  # whether the program got its deadline's error before its failure
        self.is_dropped = False  # whether failures of it and its variables are reported elsewhere
        self._deadline: float = math.inf if parent is None else parent._deadline

    def runs_on(self, model: str) -> bool:
        """Whether the state's model has this name. ``UnknownModel``."""
        return self.link.model_named(model) is self.capabilities

    @property
    def deadline(self) -> float:
        """When the limits of the state and of its session end it, on the event loop's clock."""
        return min(self._deadline, self.link.deadline)

    def deadline_passed(self) -> DeadlineExceeded:
        """The error of the deadline, for a task that waits for no op. It is raised in the program now, so
        ``Run.settle`` does not raise it again when the backend fails the state's next op with it."""
        self.has_raised_deadline = True
        return deadline_exceeded()

    def limit(self, deadline_s: float | None, output_tokens: int | None) -> None:
        """Limits the state and its forks."""
        self.link.check_runs()
        self.link.send([limit_op(self.id, deadline_s, output_tokens)])
        if deadline_s is None or self.link.is_tracing:
            return
        deadline = anyio.current_time() + deadline_s
        pending = [self]
        while pending:
            node = pending.pop()
            node._deadline = min(node._deadline, deadline)
            pending += node.children

    @property
    def shown(self) -> list[VariableNode]:
        """The program's own variables that were declared here, in order."""
        return [variable for variable in self.own if variable.is_shown]

    @property
    def is_sealed(self) -> bool:
        """Whether it was sealed before it ended in another way."""
        return self.closed == "sealed"

    @property
    def is_open(self) -> bool:
        """Whether the backend still knows the state."""
        return self.id in self.link.states

    def check_open(self) -> None:
        """Raises if the session or the state has ended."""
        self._check_not_lost()
        if self.closed is not None:
            if self.is_sealed and self.is_open:
                advice = "; to go on with it later, make a copy() before that, or choose it in the block"
            else:
                advice = "" if self.is_open else ", so return values from programs, or use flow.state()"
            raise self._closed_error(f": nothing can be appended to it{advice}")

    def _check_not_lost(self) -> None:
        """Raises if the session has ended, or its connection has lost the state."""
        self.link.check_alive()
        if self.closed is None and not self.is_open:
            self.raise_failure()

    def names_of_branches(self) -> list[tuple[StatePath, Collection[str]]]:
        """The path of each fork, and the names of its variables."""
        return [(child.path, child.names) for child in self.children]

    def check_appendable(self) -> None:
        """Raises if the state has ended, or if another task appends to it."""
        self.check_open()
        if not self.link.is_tracing:
            self._writer.check(self._lines)

    def submit(self, recorded: list[ops.Op], sent: list[ops.Op] | None = None) -> ProgramLine | None:
        """Sends ops of this state, all or none. Call ``check_open`` first. ``sent``: the same ops with others
        between them. Returns the line of the program that appends them."""
        self.in_flight.check_room(len(recorded))
        self.link.check_runs()
        self.link.send_checked(recorded if sent is None else sent)
        return self.count_sent(len(recorded))

    def count_sent(self, num_ops: int) -> ProgramLine | None:
        """``num_ops`` ops of this state were sent. Returns the line of the program that appends them."""
        self.in_flight.num_submitted += num_ops
        line = calling_line()
        self._lines.add(self.in_flight.num_submitted, line)
        return line

    def declare(self, variable: VariableNode, num_ops: int | None = None) -> None:
        """Adds a variable whose op was sent. ``num_ops``: the first ops of the state that are done when it
        ends; by default only its own, which the state does not count."""
        self.own.append(variable)
        if self.error is not None and not self.is_open:  # lost with the server, which will not answer
            variable.fail(self.error)
        else:
            self.link.variables[variable.id] = variable
        if num_ops is not None:
            self.in_flight.expect(variable.id, num_ops)
            self.run.touch(variable)

    def expect_text(self, name: str) -> VariableNode:
        """Declares a hidden variable whose text the client provides."""
        variable = VariableNode(self, self.link.next_id(), name, is_shown=False)
        self.link.send([ops.Expect(self.id, variable.id, name)])
        self.declare(variable)
        return variable

    def seed_at(self, variable: VariableNode, ordinal: int) -> int | None:
        """The seed of gen number ``num_gens + ordinal``, which is given none. A trace records the gen's place
        and returns None."""
        place = seed_place(self.path, self.num_gens + ordinal)
        if self.link.is_tracing:
            self.run.places[variable.id] = place
            return None
        return derived_seed(self.run.seed_prefix, place)

    def find_line(self, number: int) -> ProgramLine | None:
        """The line of the program that appended op ``number``, or that mapped a variable."""
        if number > FIRST_MAPPED:
            return self.mapped_lines.get(number - FIRST_MAPPED)
        return self._lines.find_line(number)

    def find_origin(self, number: int) -> Exception | None:
        """The error that a function of the program raised instead of providing op ``number``."""
        return self.mapped_errors.get(number - FIRST_MAPPED)

    def fork(self, count: int, model: str = "") -> list[StateNode]:
        """Forks the state into ``count`` branches. With a ``model`` that is not the state's, they begin
        empty."""
        self.check_open()
        if not count:
            return []
        ids = [self.link.next_id() for _ in range(count)]
        self.submit([ops.Fork(self.id, tuple(ids), model)])
        children = self.branches(ids, len(self.children), model)
        self.adopt(children, self.in_flight.num_submitted)
        return children

    def branches(self, ids: list[int], first: int, model: str = "") -> list[StateNode]:
        """Branches from number ``first`` on, unknown to the run as yet. ``model``: as in ``fork``."""
        children = [self._branch(state_id, first + i, model) for i, state_id in enumerate(ids)]
        span = None if self.span is None else self.span.fork(len(ids), self.path)
        for child in children:
            child.span = span
        return children

    def adopt(self, children: list[StateNode], num_ops: int) -> None:
        """Adds branches that the backend knows, forked with op number ``num_ops``."""
        self.children += children
        for child in children:
            child._forked_after = num_ops
            self.run.adopt(child)

    def branch_of_graph(self, state_id: int, number: int, model: str) -> StateNode:
        """Branch ``number`` in a graph, whose states only the backend knows. ``model``: as in ``fork``."""
        child = self._branch(state_id, number, model)
        self.children.append(child)
        return child

    def _branch(self, state_id: int, number: int, model: str) -> StateNode:
        capabilities = self.link.model_named(model) if model else self.capabilities
        return StateNode(self.run, state_id, (*self.path, number), capabilities, self)

    def await_graph(self) -> None:
        """Makes this the root of a submitted graph: its one op is done when the whole graph is."""
        self.in_flight.num_submitted += 1
        self.in_flight.next_ticket()

    def ask(self) -> None:
        """Asks the backend to report when everything appended so far is done."""
        ticket = self.in_flight.next_ticket() if self.error is None else None
        if ticket is not None:
            self.link.send([ops.Await(self.id, ticket)])

    async def settled(self) -> None:
        """Waits until everything appended so far is done or the state has failed."""
        if self.link.is_tracing:
            return
        self.ask()
        num_awaited = self.in_flight.num_submitted
        while not self.in_flight.is_done(num_awaited) and self.error is None:
            self.link.check_loop()
            await self.in_flight.change()
        if self.error is not None:
            await self.run.cause_first.wait(self.error)

    def raise_failure(self) -> None:
        """Raises its failure, if it failed."""
        if self.error is not None:
            raise self.run.raised(self.error, self)

    def reach(self, ticket: int) -> None:
        """The backend has reached the ticket."""
        self.in_flight.reach(ticket)
        self._has_begun()

    def end_variable(self, var_id: int) -> None:
        """The variable is complete, and so are all ops before it."""
        self.in_flight.end_variable(var_id)
        self._has_begun()

    def _has_begun(self) -> None:
        """An op of this state is done, so all ops of its parents up to the fork are."""
        state, parent = self, self.parent
        while parent is not None and not parent.in_flight.is_done(state._forked_after):
            parent.in_flight.settle(state._forked_after)
            state, parent = parent, parent.parent

    def fail(self, error: ErrorInfo) -> None:
        """No further op of the state will run. A second failure changes nothing."""
        self.error = self.error or error
        self.in_flight.wake()

    def cancel(self, reason: str, failure: ops.Failure | None = None) -> None:
        """Cancels the state and its forks, here and in the backend. ``failure``: the program's, if it
        failed."""
        if self.is_open:
            self.link.send([ops.Cancel(self.id, failure)], quiet=True)
        error = ErrorInfo.of(Cancelled(reason))
        pending = [self]
        while pending:  # no recursion: a chain of forks may be deeper than Python's stack
            state = pending.pop()
            pending += state.children
            state._end_appends("cancelled", f"was cancelled ({reason})")
            for variable in state.own:
                if not variable.is_done:
                    variable.fail(error)
            state.fail(error)

    def seal(self, why: str) -> None:
        """Rejects further ops. Variables stay readable."""
        if self.closed is None:
            self._end_appends("sealed", why)
            self.link.send([ops.Seal(self.id)], quiet=True)

    def couple(self, branches: list[StateNode]) -> None:
        """Makes branches of this state a task group."""
        self._check_not_lost()
        if not self.is_open:
            raise self._closed_error(": its branches cannot become a task group")
        if branches:
            self.link.send([ops.TaskGroup(self.id, tuple(branch.id for branch in branches))])

    def close(self) -> None:
        """Ends the state: the backend may drop it and its variables."""
        self._end_appends("ended", "has ended with its run")
        if self.link.states.pop(self.id, None) is not None:
            self.link.send([ops.Close(self.id)], quiet=True)
        if self.error is None and not self.in_flight.is_empty:  # no event will report the rest
            self.fail(ErrorInfo.of(self._closed_error("")))

    def _end_appends(self, reason: ClosedReason, how: str) -> None:
        """Nothing can be appended any more. The first reason stays."""
        if self.closed is None:
            self.closed, self._closed_how = reason, how

    def _closed_error(self, advice: str) -> StateClosed:
        return StateClosed(f"state {self.path} {self._closed_how}{advice}", reason=self.closed)


class VariableNode:
    """A variable's text as it grows, and how it ended. All readers share it.

    Args:
        state: The state that declared it.
        var_id: Its number in the session.
        name: Its name in the state.
        value_type: How its text becomes a value.
        is_shown: Whether outlines and events show it.
    """

    __slots__ = (
        "_changed",
        "_ended",
        "_reply",
        "_value",
        "end_number",
        "error",
        "front",
        "grown",
        "grown_reasoning",
        "id",
        "invalid",
        "is_generated",
        "is_shown",
        "is_used",
        "kept",
        "line",
        "model",
        "name",
        "outcome",
        "read",
        "span",
        "state",
        "value_type",
        "wanted",
    )

    def __init__(
        self,
        state: StateNode,
        var_id: int,
        name: str,
        value_type: ValueType = TEXT,
        *,
        is_shown: bool = True,
    ) -> None:
        self.state = state
        self.id = var_id
        self.name = name
        self.value_type = value_type
        self.is_shown = is_shown  # whether it is the program's own, so that streams report it
        self.grown = GrowingText()  # the text as it was received; for a reply, with its tool calls
        self.grown_reasoning = GrowingText()  # the reasoning so far, if it is streamed
        self.error: ErrorInfo | None = None
        self.model = ""  # the model that answered
        self.end_number = 0  # its place in the order in which the run's variables ended
        self.line: ProgramLine | None = None  # the line of the program that declared it
        self.outcome: Value | None = None  # how a text that the client provides was generated
        self.read: tuple[Any, Exception | None] | None = None
        self.invalid: InvalidValue | None = None
        # The ``Variable`` that programs use, and objects made from it. The node keeps them, so that markers
        # stay valid for as long as the state exists.
        self.front: Any = None
        self.kept: dict[Any, Any] = {}
        self.span: GenSpan | None = None
        self.wanted: Literal["", "value", "stream"] = ""  # how the program waits, as the backend was told
        self.is_used = False  # a text refers to it
        self.is_generated = False  # appended where it is declared, as the value of a gen or select
        self._reply = ReplySoFar() if value_type.is_reply else None
        self._value: Value | None = None
        self._changed: anyio.Event | None = None  # while a task waits for more text
        self._ended: anyio.Event | None = None  # while a task waits for the end only

    @property
    def is_done(self) -> bool:
        """Whether it is complete or has failed."""
        return self._value is not None or self.error is not None

    @property
    def has_value(self) -> bool:
        """Whether it is complete."""
        return self._value is not None

    @property
    def notation(self) -> str:
        """The text so far as it was received; for a reply, with its tool calls."""
        return str(self.grown)

    @property
    def text(self) -> str:
        """The text so far; of a reply its prose."""
        reply = self.reply
        return self.notation if reply is None else reply.text

    def text_from(self, at: int) -> str:
        """``text`` from character ``at`` on, in time linear in the result."""
        reply = self.reply
        return self.grown.part(at) if reply is None else reply.text_from(at)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of a reply so far."""
        reply = self.reply
        return () if reply is None else make_calls(reply.now().tool_calls)

    @property
    def reply(self) -> ReplySoFar | None:
        """The reader of a reply's notation; None for any other variable."""
        return None if self._reply is None else self._reply.follow(self.grown)

    @property
    def end(self) -> Value:
        """How it ended. Raises its failure; ``BadArgument`` if it is not done."""
        self.raise_failure()
        if self._value is None:
            self.state.link.needs_values(f"how {self.name!r} ended is read")
            raise BadArgument(f"{self.name!r} is not complete yet: await it first")
        return self._value

    def raise_failure(self) -> None:
        """Raises its failure, if it failed."""
        if self.error is not None:
            raised = self.state.run.raised(self.error, self.state, self.name)
            if self.invalid is not None and isinstance(raised, InvalidValue):
                raised.text, raised.errors = self.invalid.text, self.invalid.errors
                raised.__cause__ = self.invalid.__cause__
            raise raised

    async def settled(self) -> None:
        """Waits until it is complete or has failed."""
        if self._value is None and self.error is None:
            self._check_readable()
            if self._ended is None:
                self._ended = anyio.Event()
            await self._ended.wait()
        if self.error is not None:
            await self.state.run.cause_first.wait(self.error)

    async def whole_text(self) -> str:
        """The complete text; of a reply its prose. Raises its failure."""
        await self.awaited()
        self.raise_failure()
        return self.text

    def follow(self) -> None:
        """Tells the backend that the text is read while it grows."""
        self._want("stream")

    def _want(self, how: Literal["value", "stream"]) -> None:
        if self.wanted not in (how, "stream") and not self.is_done and not self.state.link.is_tracing:
            self.wanted = how
            self.state.link.send([ops.Want(self.id, how)], quiet=True)

    async def awaited(self) -> None:
        """Waits until it is complete or has failed. Tells the backend if another text refers to it;
        otherwise, the backend assumes that the program awaits it."""
        if self.is_used:
            self._want("value")
        await self.settled()

    async def change(self) -> None:
        """Waits until its text grows or it ends."""
        self._check_readable()
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _check_readable(self) -> None:
        """Raises if this task would never get its text."""
        link = self.state.link
        link.check_alive()
        if link.is_tracing:
            link.needs_values(f"the text of {self.name!r} is read")

    def extend(self, at: int, text: str) -> None:
        """The text continues with ``text`` at character ``at``."""
        if not text:
            return
        self.grown.put(at, text)
        self._wake()
        self.state.run.touch(self)

    def extend_reasoning(self, at: int, text: str) -> None:
        """The reasoning continues with ``text`` at character ``at``."""
        if text:
            self.grown_reasoning.put(at, text)
            self._wake()

    def complete(self, value: Value) -> None:
        """The variable is complete."""
        self.state.link.variables.pop(self.id, None)
        self.grown_reasoning = GrowingText(value.reasoning or "")
        self.grown.put(value.at, value.text)
        self.grown.end()
        self._value = self.outcome or value
        self.model = self._value.model or self.state.capabilities.model
        self._wake(has_ended=True)
        self.state.end_variable(self.id)
        run = self.state.run
        run.record.usage += value.usage
        if self.span is not None:
            self.span.complete(value, self.text)
        run.touch(self)

    def fail(self, error: ErrorInfo) -> None:
        """The variable will have no value."""
        self.state.link.variables.pop(self.id, None)
        if not self.is_done:
            self.error = error
            self.grown.end()
            self.grown_reasoning.end()
            if self.span is not None:
                self.span.fail(error)
        self._wake(has_ended=True)
        self.state.run.touch(self)

    def _wake(self, *, has_ended: bool = False) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        if has_ended and self._ended is not None:
            self._ended.set()
