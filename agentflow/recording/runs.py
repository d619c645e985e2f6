"""The content of a recording: its runs with their fork trees, the ops of each state, and the events of each
op."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from agentflow.errors import BadRecording, ProtocolError
from agentflow.protocol import ops
from agentflow.protocol.events import (
    Delta,
    ErrorInfo,
    Event,
    GraphReply,
    Peeked,
    Reached,
    StateFailed,
    StatsReply,
    Value,
    VarFailed,
    Watched,
)
from agentflow.protocol.growing_text import GrowingText
from agentflow.protocol.op_table import GRAPH_TICKET, declared, num_done_with, op_spec, references
from agentflow.recording.file import Entry, Recording
from agentflow.recording.places import ForkTree, OpContent, StateInTree, StatePath

CONTROL = ops.TaskGroup | ops.Seal | ops.Await | ops.Cancel | ops.Close
"""Ops that are not compared in order, but matter to a replay."""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """An event, with its place in the recording."""

    seq: int  # its index among all events
    num_ops: int  # content ops that had been sent before it
    event: Event


@dataclass(frozen=True, slots=True)
class RecordedLoss:
    """The end of the backend: fields as in ``RecordedEvent``, and the error."""

    seq: int
    num_ops: int
    error: ErrorInfo


@dataclass(slots=True)
class RecordedVariable:
    """A variable and its events."""

    name: str
    state: RecordedState
    at_s: float
    is_reply: bool = False  # ``text`` is the notation of a reply
    # The events that a replay sends, without events after the program cancelled the state.
    events: list[RecordedEvent] = field(default_factory=list)
    grown: GrowingText = field(default_factory=GrowingText)  # its text
    first_s: float | None = None
    end_s: float | None = None
    end: Value | VarFailed | None = None  # the last event, cancelled or not

    @property
    def text(self) -> str:
        """Its text, as far as it was recorded."""
        return str(self.grown)

    @property
    def done(self) -> int | None:
        """The index of the event with its value; None if there is none."""
        last = self.events[-1] if self.events else None
        return last.seq if last is not None and isinstance(last.event, Value) else None

    @property
    def has_end(self) -> bool:
        """Whether a replay can send its end."""
        return bool(self.events) and not isinstance(self.events[-1].event, Delta)


@dataclass(slots=True)
class RecordedOp:
    """A content op. ``rejection``: the error that ``send`` raised, if any."""

    op: ops.Op
    content: OpContent
    at_s: float
    rejection: ErrorInfo | None = None
    variables: list[RecordedVariable] = field(default_factory=list)
    sources: list[RecordedVariable] = field(default_factory=list)
    children: list[RecordedState] = field(default_factory=list)


class RecordedState(StateInTree):
    """A state, with its ops and events."""

    def __init__(self, run: int, path: StatePath, parent: RecordedState | None) -> None:
        super().__init__(run, path, parent)
        self.ops: list[RecordedOp] = []
        self.variables: list[RecordedVariable] = []
        self.groups: set[OpContent] = set()
        self.num_ops_sealed: int | None = None  # ops before its seal; None: it was not sealed
        self.is_closed = False
        self.failure: RecordedEvent | None = None
        self.error: ErrorInfo | None = None  # of its failure, or of a failure after its cancellation
        self.program_failure: ops.Failure | None = None  # of its program, which cancelled it
        self.cause: tuple[int, int | None] = (0, None)  # of its failure: ops sent, and an event, before
        self.end_s = 0.0
        self._fork_position = 0 if parent is None else len(parent.ops) + 1  # the fork itself included
        self.asked: dict[int, int] = {}  # ticket → ops before it
        self._reached: list[tuple[int, int]] = []  # ops before it, the event that reported it
        self._done: list[int | None] = []  # by number of ops: the event after which they were done
        self._done_events: list[
            tuple[int, int]
        ] = []  # a number of ops, and an event after which they were done

    @property
    def is_loose(self) -> bool:
        """Whether a failure or a cancellation determined the number of its ops."""
        return self.is_cancelled or self.failure is not None

    @property
    def has_unanswered(self) -> bool:
        """Whether an ``Await`` waited until the state failed or was cancelled."""
        return len(self._reached) < len(self.asked)

    def ask(self, ticket: int) -> None:
        """Records an ``Await`` after the ops so far."""
        self.asked[ticket] = len(self.ops)

    def reach(self, ticket: int, seq: int) -> None:
        """Records the event that reached the ticket."""
        if ticket not in self.asked:
            raise ProtocolError(f"state {self.path} has no ticket {ticket}")
        self._reached.append((self.asked[ticket], seq))

    def reached_seq(self, position: int) -> int | None:
        """The event after which the first ``position`` ops are done; None if the recording has none.

        A replay may await at other positions than the recording, so this is also derived from the variables
        that the ops need; but not from the op on with which it failed, because the failure answered these."""
        index = bisect_left(self._done_events, (position, -1))
        if index < len(self._done_events):
            return self._done_events[index][1]
        if position > len(self.ops) or (self.failure is not None and position >= self.cause[0]):
            return None
        return self._done[position]

    def finish(self) -> None:
        """Computes the event after which each op was done (-1: before any); the parents come first."""
        parent = self.parent
        done = parent._done[self._fork_position] if isinstance(parent, RecordedState) else -1
        self._done = [done]
        for op in self.ops:
            for needed in (*op.sources, *op.variables):
                done = None if done is None or needed.done is None else max(done, needed.done)
            self._done.append(done)

        self._find_done_events()

    def _find_done_events(self) -> None:
        """Collects the events that show that ops were done. Each also shows it for all earlier positions."""
        found = list(self._reached)
        sequence = [op.op for op in self.ops]
        for index, op in enumerate(self.ops):
            done = [variable.done for variable in op.variables if variable.done is not None]
            if done and len(done) == len(op.variables):
                found.append((num_done_with(sequence, index), max(done)))
        self._done_events = []
        seq = None
        for position, when in sorted(found, reverse=True):
            seq = when if seq is None else min(seq, when)
            self._done_events.append((position, seq))
        self._done_events.reverse()

    def num_done_before(self, seq: int) -> int:
        """The number of its ops that were certainly done before the event."""
        return max((position for position, when in self._done_events if when < seq), default=0)


@dataclass(slots=True)
class RecordedRun:
    """One run; ``states`` in the order of their forks."""

    index: int
    root: RecordedState
    states: dict[StatePath, RecordedState]
    num_ops: int = 0
    has_rejections: bool = False

    def was_asked(self, path: StatePath, num_ops: int) -> bool:
        """Whether the first ``num_ops`` ops of the state were awaited."""
        return path in self.states and num_ops in self.states[path].asked.values()


class RecordedRuns:
    """The content of a recording. ``BadRecording`` if a line contradicts earlier ones."""

    def __init__(self, recording: Recording) -> None:
        self.runs: list[RecordedRun] = []
        self.stats: list[tuple[int, StatsReply]] = []
        self.lost: RecordedLoss | None = None
        self.expected: list[int] = []  # the events that every replay sends
        self.batches: list[int] = []  # of each event, the number of its delivery
        self.origins: dict[ErrorInfo, RecordedEvent] = {}  # of each root cause, the first event with it
        self._num_events = 0
        self._num_ops = 0
        self._variables: dict[tuple[StateInTree, int], RecordedVariable] = {}
        self._tree: ForkTree[RecordedState] = ForkTree(
            RecordedState, recording.header.seed, resolves_params=recording.header.resolves_params
        )
        last: Entry | None = None
        entries = _without_unwinding(recording)
        for number, entry in enumerate(entries, start=2):
            if entry.received is not None or entry.lost is not None:
                is_more = last is not None and last.received is not None and last.at_s == entry.at_s
                self.batches.append(self.batches[-1] if is_more else len(self.batches))
            last = entry
            try:
                self._read(entry)
            except ProtocolError as error:
                raise BadRecording(f"{recording.path}, line {number}: {error}") from None
        for run in self.runs:
            for state in run.states.values():
                state.finish()
                if state.failure is not None:
                    state.cause = self._find_cause(state, state.failure)

    def _read(self, entry: Entry) -> None:
        if entry.sent is not None:
            self._send(entry.sent, entry.at_s)
        elif entry.received is not None:
            self._receive(entry.received, entry.at_s)
        elif entry.refused is not None:
            for op in entry.ops:
                self._send(op, entry.at_s, entry.refused)
        elif entry.lost is not None:
            self.lost = RecordedLoss(self._num_events, self._num_ops, entry.lost)
            self._num_events += 1

    def _send(self, op: ops.Op, at_s: float, rejection: ErrorInfo | None = None) -> None:
        is_content = op_spec(op).is_content
        if not is_content and (rejection is not None or not isinstance(op, CONTROL)):
            return
        if isinstance(op, ops.Open | ops.SubmitGraph):
            state = self._tree.open(op)
            self.runs.append(RecordedRun(state.run, state, {(): state}))
        else:
            state = self._tree.node(op.state)  # type: ignore[union-attr]
        state.end_s = max(state.end_s, at_s)
        match op:
            case _ if is_content:
                self._append(state, op, at_s, rejection)
            case ops.TaskGroup():
                state.groups.add(self._tree.content(op, state))
            case ops.Await(ticket=ticket):
                state.ask(ticket)
            case ops.Cancel(failure=failure):
                state.cancel()
                state.program_failure = state.program_failure or failure
            case ops.Seal():
                state.num_ops_sealed = len(state.ops)
            case ops.Close():
                state.is_closed = True
            case _:
                pass

    def _append(self, state: RecordedState, op: ops.Op, at_s: float, rejection: ErrorInfo | None) -> None:
        recorded = RecordedOp(op, self._tree.content(op, state), at_s, rejection)
        recorded.sources = [self._variables[self._tree.variable(var_id)] for var_id in references(op)]
        self._num_ops += 1
        run = self.runs[state.run]
        run.num_ops += 1
        if rejection is not None:
            run.has_rejections = True
        else:
            recorded.children = self._tree.enter(op, state)
            run.states |= {child.path: child for child in recorded.children}
            for _, name in declared(op):
                variable = RecordedVariable(name, state, at_s, isinstance(op, ops.Gen) and op.reply)
                self._variables[state, len(state.variables)] = variable
                state.variables.append(variable)
                recorded.variables.append(variable)
            if isinstance(op, ops.SubmitGraph):
                state.ask(GRAPH_TICKET)
        state.ops.append(recorded)

    def _receive(self, event: Event, at_s: float) -> None:
        recorded = RecordedEvent(self._num_events, self._num_ops, event)
        self._num_events += 1
        match event:
            case Delta() | Value() | VarFailed():
                self._receive_variable(self._variables[self._tree.variable(event.var)], recorded, at_s)
            case Reached():
                self._tree.node(event.state).reach(event.ticket, recorded.seq)
            case StateFailed():
                state = self._tree.node(event.state)
                state.error = state.error or event.error
                if not state.is_cancelled and state.failure is None:
                    state.failure = recorded
                    self._expect(recorded, event.error)
            case StatsReply():
                self.stats.append((recorded.seq, event))
            case GraphReply() | Watched() | Peeked():
                pass  # nothing of a run

    def _receive_variable(self, variable: RecordedVariable, recorded: RecordedEvent, at_s: float) -> None:
        event = recorded.event
        variable.state.end_s = max(variable.state.end_s, at_s)
        if isinstance(event, Delta | Value):
            if event.at > len(variable.grown):
                raise ProtocolError(f"a text of {len(variable.grown)} characters goes on at {event.at}")
            variable.grown.put(event.at, event.text)
            if variable.first_s is None and (event.text or isinstance(event, Value)):
                variable.first_s = at_s
        if isinstance(event, Value | VarFailed):
            variable.grown.end()
            variable.end, variable.end_s = event, at_s
        if not variable.state.is_cancelled:
            variable.events.append(recorded)
            self._expect(recorded, event.error if isinstance(event, VarFailed) else None)

    def _expect(self, recorded: RecordedEvent, error: ErrorInfo | None) -> None:
        self.expected.append(recorded.seq)
        if error is not None:
            self.origins.setdefault(error.origin, recorded)

    def _find_cause(self, state: RecordedState, failure: RecordedEvent) -> tuple[int, int | None]:
        """The conditions for the state to fail as recorded: the number of its ops that were sent, and the
        event that came before, if any."""
        assert isinstance(failure.event, StateFailed)
        for index, op in enumerate(state.ops):
            lasts = [variable.events[-1] for variable in op.variables if variable.events]
            if any(isinstance(last.event, VarFailed) and last.seq < failure.seq for last in lasts):
                return index + 1, None
        num_done = state.num_done_before(failure.seq)
        origin = failure.event.error.origin
        first = self.origins[origin]
        needed = first.seq if first.seq < failure.seq else None
        for index, op in enumerate(state.ops[num_done:], start=num_done):
            if any(_failed_with(source, origin) for source in op.sources):
                return index + 1, needed
        # A branch or the parent failed, and no op of this state.
        return (num_done if needed is not None else min(num_done + 1, len(state.ops))), needed


def _without_unwinding(recording: Recording) -> list[Entry]:
    """The entries without the final cancellations of a cancelled session, which the program did not make:
    tasks that were waiting then also wait in a replay, and fail with the reason for the missing answer."""
    entries = recording.entries
    if recording.ending != "cancelled":
        return entries
    num_left = len(entries) - 1
    while num_left > 0:
        sent = entries[num_left - 1].sent
        if not isinstance(sent, ops.Cancel | ops.Seal | ops.Close):
            break
        num_left -= 1
    return entries[:num_left]


def _failed_with(variable: RecordedVariable, origin: ErrorInfo) -> bool:
    return isinstance(variable.end, VarFailed) and variable.end.error.origin == origin
