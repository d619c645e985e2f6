"""A recording as the runs it holds: their fork trees, the ops of each state, the answers to each op."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from agentflow.errors import BadRecording, ProtocolError
from agentflow.protocol import ops
from agentflow.protocol.events import (
    Delta,
    ErrorInfo,
    Event,
    Reached,
    StateFailed,
    StatsReply,
    Value,
    VarFailed,
)
from agentflow.protocol.op_table import GRAPH_TICKET, declared, num_done_with, references, spec_of
from agentflow.recording.file import Entry, Recording
from agentflow.recording.places import Content, ForkTree, Node, Path

CONTROL = ops.TaskGroup | ops.Seal | ops.Await | ops.Cancel | ops.Close
"""Ops that are not compared in order, but matter to a replay."""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """``seq``: its place among all events. ``num_ops``: ops of content that had been sent before it."""

    seq: int
    num_ops: int
    event: Event


@dataclass(frozen=True, slots=True)
class RecordedLoss:
    """The backend was gone: as in ``RecordedEvent``, and why."""

    seq: int
    num_ops: int
    error: ErrorInfo


@dataclass(slots=True)
class RecordedVariable:
    """A variable and what was heard of it. ``events``: those that a replay tells, which leaves out what
    came after the program had cancelled the state. ``end`` is the last thing heard, cancelled or not.
    ``is_reply``: ``text`` is the notation of a reply."""

    name: str
    state: RecordedState
    at_s: float
    is_reply: bool = False
    events: list[RecordedEvent] = field(default_factory=list)
    text: str = ""
    first_s: float | None = None
    end_s: float | None = None
    end: Value | VarFailed | None = None

    @property
    def done(self) -> int | None:
        """The number of the event that brought its value, if one did."""
        last = self.events[-1] if self.events else None
        return last.seq if last is not None and isinstance(last.event, Value) else None

    @property
    def has_end(self) -> bool:
        """Whether a replay can tell its end."""
        return bool(self.events) and not isinstance(self.events[-1].event, Delta)


@dataclass(slots=True)
class RecordedOp:
    """An op of content. ``refusal``: why ``send`` raised, if it did."""

    op: ops.Op
    content: Content
    at_s: float
    refusal: ErrorInfo | None = None
    variables: list[RecordedVariable] = field(default_factory=list)
    sources: list[RecordedVariable] = field(default_factory=list)
    children: list[RecordedState] = field(default_factory=list)


class RecordedState(Node):
    """A state, with all that was sent to it and heard of it."""

    def __init__(self, run: int, path: Path, parent: RecordedState | None) -> None:
        super().__init__(run, path, parent)
        self.ops: list[RecordedOp] = []
        self.variables: list[RecordedVariable] = []
        self.groups: set[Content] = set()
        self.num_ops_sealed: int | None = None  # ops before its seal; None: it was not sealed
        self.failure: RecordedEvent | None = None
        self.error: ErrorInfo | None = None  # of its failure, or of what came after its cancellation
        self.cause: tuple[int, int | None] = (0, None)  # of its failure: ops sent, and an event told, before
        self.end_s = 0.0
        self._fork_position = 0 if parent is None else len(parent.ops) + 1  # the fork itself included
        self.asked: dict[int, int] = {}  # ticket → ops before it
        self._reached: list[tuple[int, int]] = []  # ops before it, the event that said so
        self._done: list[int | None] = []  # after which event the first ops were done
        self._proofs: list[tuple[int, int]] = []  # ops, and an event after which they were done

    @property
    def is_loose(self) -> bool:
        """Whether a failure or a cancellation decided how much it was sent."""
        return self.is_cancelled or self.failure is not None

    def ask(self, ticket: int) -> None:
        """Somebody waits for the ops so far."""
        self.asked[ticket] = len(self.ops)

    def reach(self, ticket: int, seq: int) -> None:
        """The backend got there."""
        if ticket not in self.asked:
            raise ProtocolError(f"state {self.path} has no ticket {ticket}")
        self._reached.append((self.asked[ticket], seq))

    def reached_seq(self, position: int) -> int | None:
        """After which event the first ``position`` ops are done; None: never, as far as was recorded.

        A replay may ask elsewhere than the recording did, so this also follows from what the ops need. Not
        where the state failed: there, who had no answer was told of the failure.
        """
        index = bisect_left(self._proofs, (position, -1))
        if index < len(self._proofs):
            return self._proofs[index][1]
        if position > len(self.ops) or self.failure is not None:
            return None
        return self._done[position]

    def finish(self) -> None:
        """All has been read, here and above: computes when each op was done. -1: before any event."""
        parent = self.parent
        done = parent._done[self._fork_position] if isinstance(parent, RecordedState) else -1
        self._done = [done]
        for op in self.ops:
            for needed in (*op.sources, *op.variables):
                done = None if done is None or needed.done is None else max(done, needed.done)
            self._done.append(done)

        self._prove()

    def _prove(self) -> None:
        """Collects which events say how far the state had got: each proves all positions before, too."""
        proofs = list(self._reached)
        sequence = [op.op for op in self.ops]
        for index, op in enumerate(self.ops):
            done = [variable.done for variable in op.variables if variable.done is not None]
            if done and len(done) == len(op.variables):
                proofs.append((num_done_with(sequence, index), max(done)))
        self._proofs = []
        seq = None
        for position, when in sorted(proofs, reverse=True):
            seq = when if seq is None else min(seq, when)
            self._proofs.append((position, seq))
        self._proofs.reverse()

    def num_done_before(self, seq: int) -> int:
        """How many of its ops had certainly been done before the event."""
        return max((position for position, when in self._proofs if when < seq), default=0)


@dataclass(slots=True)
class RecordedRun:
    """One run; ``states`` in the order in which they were forked."""

    index: int
    root: RecordedState
    states: dict[Path, RecordedState]
    num_ops: int = 0
    has_refusals: bool = False

    def was_asked(self, path: Path, num_ops: int) -> bool:
        """Whether somebody waited for the state's first ``num_ops`` ops."""
        return path in self.states and num_ops in self.states[path].asked.values()


class RecordedRuns:
    """Everything in a recording. ``BadRecording`` where a line makes no sense after those before it."""

    def __init__(self, recording: Recording) -> None:
        self.runs: list[RecordedRun] = []
        self.stats: list[tuple[int, StatsReply]] = []
        self.lost: RecordedLoss | None = None
        self.expected: list[int] = []  # the events that a replay tells in any case
        self.batches: list[int] = []  # of each event, a number for what was told together
        self.origins: dict[ErrorInfo, RecordedEvent] = {}  # of each failure, where it was first heard of
        self._num_events = 0
        self._num_ops = 0
        self._variables: dict[tuple[Node, int], RecordedVariable] = {}
        self._tree: ForkTree[RecordedState] = ForkTree(RecordedState, recording.header.seed)
        last: Entry | None = None
        entries = _without_unwinding(recording)
        for number, entry in enumerate(entries, start=2):
            if entry.heard is not None or entry.lost is not None:
                is_more = last is not None and last.heard is not None and last.at_s == entry.at_s
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
                    state.cause = self._cause_of(state, state.failure)

    def _read(self, entry: Entry) -> None:
        if entry.sent is not None:
            self._send(entry.sent, entry.at_s)
        elif entry.heard is not None:
            self._hear(entry.heard, entry.at_s)
        elif entry.refused is not None:
            for op in entry.ops:
                self._send(op, entry.at_s, entry.refused)
        elif entry.lost is not None:
            self.lost = RecordedLoss(self._num_events, self._num_ops, entry.lost)
            self._num_events += 1

    def _send(self, op: ops.Op, at_s: float, refusal: ErrorInfo | None = None) -> None:
        is_content = spec_of(op).is_content
        if not is_content and (refusal is not None or not isinstance(op, CONTROL)):
            return
        if isinstance(op, ops.Open | ops.Submit):
            state = self._tree.open(op)
            self.runs.append(RecordedRun(state.run, state, {(): state}))
        else:
            state = self._tree.node(op.state)  # type: ignore[union-attr]
        state.end_s = max(state.end_s, at_s)
        match op:
            case _ if is_content:
                self._append(state, op, at_s, refusal)
            case ops.TaskGroup():
                state.groups.add(self._tree.content(op, state))
            case ops.Await(ticket=ticket):
                state.ask(ticket)
            case ops.Cancel():
                state.cancel()
            case ops.Seal():
                state.num_ops_sealed = len(state.ops)
            case _:
                pass

    def _append(self, state: RecordedState, op: ops.Op, at_s: float, refusal: ErrorInfo | None) -> None:
        recorded = RecordedOp(op, self._tree.content(op, state), at_s, refusal)
        recorded.sources = [self._variables[self._tree.variable(var_id)] for var_id in references(op)]
        self._num_ops += 1
        run = self.runs[state.run]
        run.num_ops += 1
        if refusal is not None:
            run.has_refusals = True
        else:
            recorded.children = self._tree.enter(op, state)
            run.states |= {child.path: child for child in recorded.children}
            for _, name in declared(op):
                variable = RecordedVariable(name, state, at_s, isinstance(op, ops.Gen) and op.reply)
                self._variables[state, len(state.variables)] = variable
                state.variables.append(variable)
                recorded.variables.append(variable)
            if isinstance(op, ops.Submit):
                state.ask(GRAPH_TICKET)
        state.ops.append(recorded)

    def _hear(self, event: Event, at_s: float) -> None:
        heard = RecordedEvent(self._num_events, self._num_ops, event)
        self._num_events += 1
        match event:
            case Delta() | Value() | VarFailed():
                self._hear_variable(self._variables[self._tree.variable(event.var)], heard, at_s)
            case Reached():
                self._tree.node(event.state).reach(event.ticket, heard.seq)
            case StateFailed():
                state = self._tree.node(event.state)
                state.error = state.error or event.error
                if not state.is_cancelled and state.failure is None:
                    state.failure = heard
                    self._expect(heard, event.error)
            case StatsReply():
                self.stats.append((heard.seq, event))

    def _hear_variable(self, variable: RecordedVariable, heard: RecordedEvent, at_s: float) -> None:
        event = heard.event
        variable.state.end_s = max(variable.state.end_s, at_s)
        if isinstance(event, Delta | Value):
            variable.text = variable.text[: event.at] + event.text
            variable.first_s = at_s if variable.first_s is None else variable.first_s
        if isinstance(event, Value | VarFailed):
            variable.end, variable.end_s = event, at_s
        if not variable.state.is_cancelled:
            variable.events.append(heard)
            self._expect(heard, event.error if isinstance(event, VarFailed) else None)

    def _expect(self, heard: RecordedEvent, error: ErrorInfo | None) -> None:
        self.expected.append(heard.seq)
        if error is not None:
            self.origins.setdefault(error.origin, heard)

    def _cause_of(self, state: RecordedState, failure: RecordedEvent) -> tuple[int, int | None]:
        """What must have happened before the state can fail as it did: so many of its ops were sent, and
        the event (if any) was told."""
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
        # Not by an op of its own: a branch took it along, or what it was forked from.
        return (num_done if needed is not None else min(num_done + 1, len(state.ops))), needed


def _without_unwinding(recording: Recording) -> list[Entry]:
    """Where the session was cancelled, the last cancellations are not the program's: whoever waited then
    waits in a replay, too, and is to hear why no answer comes."""
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
