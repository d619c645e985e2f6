"""A backend that answers from a recording, without a model, as long as the program sends the same ops.

**Compared.** Each content op (text, turns, gens with all their parameters, selects, forks) with the
one that was recorded at the same place: the run, the path in its fork tree, the position in the state's
stream. Numbers of states and variables are not compared, because they depend on how branches interleave;
references are compared by their targets. When a state is closed, it must have received all its recorded ops;
when the session ends, all recorded runs must have been repeated.

**Not compared.** Awaits change nothing, and are answered wherever they stand. ``Cancel`` and ``Seal``
take effect immediately, so their position depends on timing. Task groups are compared as a set for each
state. A failure elsewhere or a cancellation stops a branch at a point that depends on timing, so such a state
may receive fewer or more ops than were recorded.

**How runs are identified.** Concurrent runs may begin in another order (trio shuffles its tasks).
``_LiveRuns`` pairs a run with a recorded one when it first needs an answer, by the ops sent until then; of
several that fit, it takes the one that began at the same point. So concurrent runs that differ only after
their first answer must begin in the recorded order.

**In which order events are sent.** ``_EventScheduler`` sends an event once the program has sent the op that
it answers. The earliest recorded event comes first, after all that were recorded before it, and after as many
ops as when it was recorded. So a program that checks which of two branches is first sees the same one first.
A program that works in another order would then wait forever, so the event is sent anyway ``_PATIENCE`` turns
of the event loop after the program's last op.

**Limits.** A variable whose state the program cancelled gets no more events than it had at that time, so a
program that cancels after some seconds waits as long again. Two tasks that append to the same state must do
so in the recorded order."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from os import PathLike

import anyio
import anyio.lowlevel
import msgspec

from agentflow.errors import BadArgument, BadRecording, ReplayDiffers
from agentflow.protocol import ops
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.protocol.events import (
    Delta,
    ErrorInfo,
    Event,
    GraphReply,
    GraphsDelta,
    LiveGraph,
    Reached,
    StateFailed,
    Stats,
    StatsReply,
    Value,
    VarFailed,
    Watched,
)
from agentflow.protocol.images import Image
from agentflow.protocol.op_table import GRAPH_TICKET, declared, op_spec
from agentflow.recording.file import Recording, read_recording
from agentflow.recording.images import read_image
from agentflow.recording.places import ForkTree, OpContent, StateInTree, StatePath, describe, difference
from agentflow.recording.runs import (
    CONTROL,
    RecordedEvent,
    RecordedOp,
    RecordedRun,
    RecordedRuns,
    RecordedState,
    RecordedVariable,
)
from agentflow.runtime.task_group import open_task_group


class Replay:
    """Answers from a recording, as long as the program sends the same ops.

    Raises ``BadRecording`` for a file that is not a recording. At the first difference the session ends with
    ``ReplayDiffers``, whose message has the place, the recorded op and the new one. One replay can serve
    several sessions.

    >>> async with af.session(record="run.jsonl") as flow:
    ...     first = await flow.run(judge, essay)
    >>> replay = af.Replay("run.jsonl")
    >>> async with af.session(backend=replay) as flow:
    ...     print(flow.seed == replay.seed, await flow.run(judge, essay) == first)
    True True
    """

    is_replay = True
    """A recording also has the texts that the client provided, such as the results of tools."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._recording = read_recording(path)
        self._runs = RecordedRuns(self._recording)

    @property
    def seed(self) -> int:
        """The seed of the session that was recorded."""
        return self._recording.header.seed

    def session_seed(self, seed: int | None) -> int:
        """The recorded seed. ``BadArgument`` if ``seed`` is another. For the session."""
        if seed not in (None, self.seed):
            raise BadArgument(
                f"session: the recording was made with seed {self.seed}, and its replay uses that one: "
                f"leave out seed={seed}"
            )
        return self.seed

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Opens the replay. For the session."""
        scheduler = _EventScheduler(self._runs.expected, self._runs.batches)
        connection = _ReplayConnection(self._recording, self._runs, scheduler, deliver, lost)
        async with open_task_group() as group:
            group.start_soon(scheduler.run, connection.flush)
            try:
                yield connection
                if connection.is_complete:
                    connection.finish()
            finally:
                group.cancel_scope.cancel()


class _ReplayConnection:
    """A ``Connection`` that finds each op in the recording and schedules its events."""

    is_connected = True
    has_room = True

    def __init__(
        self,
        recording: Recording,
        runs: RecordedRuns,
        scheduler: _EventScheduler,
        deliver: Deliver,
        lost: Lost,
    ) -> None:
        self.models = {recording.header.model: recording.header.models[recording.header.model]}
        self.models |= recording.header.models
        self._recording = recording
        self._recorded = runs
        self._scheduler = scheduler
        self._deliver = deliver
        self._lost = lost
        self._is_over = False
        self.is_complete = False
        """Whether the session's block ended normally."""
        self._runs = _LiveRuns(runs.runs)
        self._num_stats = 0
        self._outgoing: list[Event] = []
        self._tree = ForkTree(
            _LiveState,
            recording.header.seed,
            self._runs.recorded_index,
            resolves_params=recording.header.resolves_params,
        )
        self._schedule_loss()

    def find_file(self, source: str) -> Image | None:
        """The image, or the file of a video, in the folder of the recording; None if it is not there."""
        return read_image(self._recording.path, source)

    def send(self, ops: Sequence[ops.Op]) -> None:
        rejection: ErrorInfo | None = None
        try:
            for op in ops:
                rejection = self._handle(op) or rejection
        except ReplayDiffers as error:
            self._end(error)
            raise
        if rejection is not None:
            raise rejection.to_exception()

    def end(self, error: BaseException | None) -> None:
        self.is_complete = error is None

    def finish(self) -> None:
        """Ends the replay. ``ReplayDiffers`` if the recording has more runs."""
        if self._runs.unused and not self._is_over:
            run = next(iter(self._runs.unused.values()))
            raise ReplayDiffers(
                f"the recording has {len(self._recorded.runs)} runs, and the program ended after "
                f"{len(self._runs)}: run {run.index}{_describe_beginning(run)} is missing"
            )

    def _handle(self, op: ops.Op) -> ErrorInfo | None:
        """Answers one op. Returns the error with which the recorded op was rejected, if it was."""
        is_content = op_spec(op).is_content
        match op:
            case ops.Open() | ops.SubmitGraph():
                state = self._tree.open(op)
                self._runs.add(state)
            case ops.GetStats():
                self._answer_stats(op.ticket)
                return None
            case ops.GetGraph():  # a replay has no live graph
                self._send_after(_FIRST, GraphReply(op.ticket, LiveGraph()))
                return None
            case ops.Watch():
                self._send_after(_FIRST, Watched(op.ticket, graphs=GraphsDelta(reset=True)))
                return None
            case _ if is_content or isinstance(op, CONTROL):
                state = self._tree.node(op.state)  # type: ignore[union-attr]
            case _:
                return None
        match op:
            case _ if is_content:
                rejection = self._handle_content(state, op)
                if isinstance(op, ops.SubmitGraph) and rejection is None:
                    self._handle_await(state, GRAPH_TICKET)
                return rejection
            case ops.TaskGroup():
                state.groups.add(self._tree.content(op, state))
                self._check_group(state)
            case ops.Await(ticket=ticket):
                self._handle_await(state, ticket)
            case ops.Cancel():
                state.cancel()
            case ops.Seal():
                sealed_after = state.recorded.num_ops_sealed if state.recorded is not None else None
                if sealed_after is not None:  # variables of a sealed state may follow
                    self._check_complete(state, sealed_after)
            case ops.Close():
                self._identify(state, is_preferred=lambda run, num_sent: run.num_ops == num_sent)
                self._tree.forget(state.id)
                self._check_complete(state)
            case _:
                pass
        return None

    def _handle_content(self, state: _LiveState, op: ops.Op) -> ErrorInfo | None:
        run = self._runs[state.run]
        content = self._tree.content(op, state)
        if run.recorded is not None or self._needs_run(run, op):
            self._identify(state, [(state.path, content)])
            found = self._match(state, content)
            if found is not None and found.rejection is not None:
                return found.rejection
            self._answer(state, op, found, self._tree.enter(op, state))
        else:
            run.kept.append(_KeptOp(state, op, content, self._tree.enter(op, state)))
            state.num_kept += 1
        return None

    def _needs_run(self, run: _LiveRun, op: ops.Op) -> bool:
        """Whether the op needs an answer, for which its run must be identified."""
        likely = self._runs.likely(run)
        return bool(declared(op)) or (likely is not None and likely.has_rejections)

    def _identify(
        self,
        state: _LiveState,
        latest: Sequence[tuple[StatePath, OpContent]] = (),
        is_preferred: Callable[[RecordedRun, int], bool] = lambda run, num_sent: True,
    ) -> None:
        """Identifies the run of a state, and answers the ops that were kept until now."""
        run = self._runs[state.run]
        if run.recorded is not None:
            return
        if not self._runs.identify(run, latest, is_preferred):
            if self._recorded.lost is None:
                raise self._differs(f"run {state.run}", "no more runs", "another")
            return
        kept_ops, run.kept = run.kept, []
        for kept in kept_ops:
            self._answer(kept.state, kept.op, self._match(kept.state, kept.content), kept.children)
            self._check_group(kept.state)

    def _match(self, state: _LiveState, content: OpContent) -> RecordedOp | None:
        """The recorded op at this place; None if the recording need not have one."""
        position = state.num_ops
        state.num_ops += 1
        self._scheduler.num_sent += 1
        self._schedule_loss()
        recorded = state.recorded
        if recorded is None:
            return None
        if position < len(recorded.ops):
            if recorded.ops[position].content != content:
                raise self._differs(
                    state.place(position), *difference(recorded.ops[position].content, content)
                )
            return recorded.ops[position]
        if recorded.is_loose or self._recorded.lost is not None:
            return None
        raise self._differs(state.place(position), "no more", describe(content))

    def _answer(
        self, state: _LiveState, op: ops.Op, found: RecordedOp | None, children: list[_LiveState]
    ) -> None:
        """Schedules the events of this op."""
        for index, (var_id, _) in enumerate(declared(op)):
            self._answer_variable(state, var_id, found.variables[index] if found else None)
        for index, child in enumerate(children):
            child.recorded = found.children[index] if found is not None else None
            self._schedule_failure(child)
        self._schedule_failure(state)

    def _answer_variable(self, state: _LiveState, var_id: int, recorded: RecordedVariable | None) -> None:
        for past in recorded.events if recorded is not None else ():
            assert isinstance(past.event, Delta | Value | VarFailed)
            event = msgspec.structs.replace(past.event, var=var_id)
            self._scheduler.push(past, lambda event=event: self._outgoing.append(event))  # type: ignore[misc]
        if recorded is None or not recorded.has_end:
            error = self._missing(state, is_new=recorded is None)
            if error is not None:
                self._scheduler.push_at(_LATE, lambda: self._outgoing.append(VarFailed(var_id, error)))

    def _handle_await(self, state: _LiveState, ticket: int) -> None:
        self._identify(state, is_preferred=lambda run, _: run.was_asked(state.path, state.num_kept))
        seq = state.recorded.reached_seq(state.num_ops) if state.recorded is not None else None
        if seq is not None:
            self._scheduler.push_at(seq, lambda: self._outgoing.append(Reached(state.id, ticket)))
            return
        recorded = state.recorded
        has_failure = recorded is not None and recorded.failure is not None
        is_new = (
            recorded is None
            or state.num_ops > len(recorded.ops)
            # The recorded program raised, and did not wait until it cancelled the state.
            or (recorded.is_cancelled and not recorded.has_unanswered and not state.is_cancelled)
        )
        error = None if has_failure else self._missing(state, is_new=is_new)
        if error is not None:
            self._scheduler.push_at(_LATE, lambda: self._outgoing.append(StateFailed(state.id, error)))

    def _missing(self, state: _LiveState, *, is_new: bool) -> ErrorInfo | None:
        """The error for an op or await to which the recording has no answer. ``is_new``: the recording does
        not have the op itself. None if the program's own cancellation, or the end of the backend, ends the
        wait."""
        found: _LiveState | None = state
        while found is not None and found.recorded is None:
            found = found.parent
        recorded = found.recorded if found is not None else None
        if self._recorded.lost is not None or recorded is None:
            return None
        if recorded.failure is not None:
            assert isinstance(recorded.failure.event, StateFailed)
            return recorded.failure.event.error
        if recorded.is_cancelled and not is_new:
            return None
        if is_new:
            return ErrorInfo.of(self._differs(state.place(state.num_ops), "a cancellation", "more"))
        if self._recording.is_truncated:
            return ErrorInfo.of(
                ReplayDiffers(f"{state.place()}: the recording ends before this had an answer")
            )
        if recorded.is_closed:  # the recorded program had the answer: the file was changed
            return ErrorInfo.of(
                BadRecording(f"{self._recording.path} has no answer for {state.place()}, which was closed")
            )
        return None

    def _schedule_failure(self, state: _LiveState) -> None:
        """Schedules the recorded failure of a state, if the ops that led to it were sent."""
        recorded = state.recorded
        if recorded is None or recorded.failure is None or state.has_failed:
            return
        failure = recorded.failure
        num_ops, cause = recorded.cause
        if state.num_ops < num_ops:
            return
        state.has_failed = True
        assert isinstance(failure.event, StateFailed)
        event = msgspec.structs.replace(failure.event, state=state.id)
        self._scheduler.after(
            cause, lambda: self._scheduler.push(failure, lambda: self._outgoing.append(event))
        )

    def _schedule_loss(self) -> None:
        loss = self._recorded.lost
        if loss is not None and self._scheduler.num_sent == loss.num_ops:
            self._scheduler.push_at(loss.seq, lambda: self._end(loss.error.to_exception()))

    def _check_group(self, state: _LiveState) -> None:
        recorded = state.recorded
        if recorded is None or state.is_loose:
            return
        for content in state.groups - recorded.groups:
            raise self._differs(state.place(), "no such task group", describe(content))

    def _check_complete(self, state: _LiveState, num_recorded: int | None = None) -> None:
        """Raises ``ReplayDiffers`` if the state received fewer ops than were recorded (or than
        ``num_recorded``)."""
        recorded = state.recorded
        if recorded is None or state.is_cancelled or recorded.is_cancelled or self._is_over:
            return
        # A failed state needs only the ops up to its failure: the program may not have sent more.
        num_recorded = len(recorded.ops) if num_recorded is None else num_recorded
        num_ops = min(num_recorded, recorded.cause[0]) if recorded.failure is not None else num_recorded
        if state.num_ops < num_ops:
            more = describe(recorded.ops[state.num_ops].content)
            raise self._differs(state.place(state.num_ops), more, "no more")
        for content in recorded.groups - state.groups if recorded.failure is None else ():
            raise self._differs(state.place(), describe(content), "none")

    def _answer_stats(self, ticket: int) -> None:
        known = self._recorded.stats
        seq, reply = _FIRST, StatsReply(ticket, Stats(model=next(iter(self.models.values())).model))
        if known:
            seq, recorded = known[min(self._num_stats, len(known) - 1)]
            reply = StatsReply(ticket, recorded.stats, recorded.error)
        self._num_stats += 1
        self._send_after(seq, reply)

    def _send_after(self, seq: int, event: Event) -> None:
        self._scheduler.push_at(seq, lambda: self._outgoing.append(event))

    def flush(self) -> None:
        """Delivers the events since the last call."""
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and not self._is_over:
            self._deliver(outgoing)

    def _end(self, error: Exception) -> None:
        if not self._is_over:
            self.flush()
            self._is_over = True
            self._lost(error)

    def _differs(self, where: str, recorded: str, sent: str) -> ReplayDiffers:
        if recorded.startswith("no more") and self._recording.is_truncated:
            return ReplayDiffers(f"{where}: the recording ends here, and the program continues with {sent}")
        return ReplayDiffers(f"{where}: the recording has {recorded}, and the program has {sent}")


def _describe_beginning(run: RecordedRun) -> str:
    texts = [describe(op.content) for op in run.root.ops if op.content.kind == "text"]
    return f" (it begins with {texts[0]})" if texts else ""


class _LiveState(StateInTree):
    """A state of the running program. ``recorded``: its counterpart; None while it is unknown, and below an
    op that was not recorded."""

    parent: _LiveState | None

    def __init__(self, run: int, path: StatePath, parent: _LiveState | None) -> None:
        super().__init__(run, path, parent)
        self.recorded: RecordedState | None = None
        self.num_ops = 0  # ops that were compared
        self.num_kept = 0  # ops that were kept until its run was identified
        self.groups: set[OpContent] = set()
        self.has_failed = False

    @property
    def is_loose(self) -> bool:
        """Whether a failure or a cancellation determines the number of its ops."""
        recorded = self.recorded
        return self.is_cancelled or (recorded is not None and recorded.is_loose)

    def place(self, position: int | None = None) -> str:
        """Its place for messages, with the position of one of its ops."""
        recorded = self.recorded
        is_other = recorded is not None and recorded.run != self.run
        run = f"run {self.run}{f' (recorded as run {recorded.run})' if recorded and is_other else ''}"
        return f"{run}, state {self.path}" + ("" if position is None else f", op {position}")


@dataclass(frozen=True, slots=True)
class _KeptOp:
    """A content op that is kept until its run is identified."""

    state: _LiveState
    op: ops.Op
    content: OpContent
    children: list[_LiveState]


@dataclass(slots=True)
class _LiveRun:
    """``recorded``: the counterpart, once it is identified; until then ``kept`` has the ops."""

    root: _LiveState
    recorded: RecordedRun | None = None
    kept: list[_KeptOp] = field(default_factory=list)


class _LiveRuns:
    """Pairs runs with recorded ones by their ops, and if several fit, by their number."""

    def __init__(self, recorded: list[RecordedRun]) -> None:
        self.unused = {run.index: run for run in recorded}
        self._runs: list[_LiveRun] = []

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, index: int) -> _LiveRun:
        return self._runs[index]

    def add(self, root: _LiveState) -> None:
        """Adds a run."""
        self._runs.append(_LiveRun(root))

    def recorded_index(self, index: int) -> int:
        """The number of the recorded run; for an unidentified run, a number that no run has."""
        recorded = self._runs[index].recorded
        return recorded.index if recorded is not None else -1 - index

    def likely(self, run: _LiveRun) -> RecordedRun | None:
        """The recorded run of the same number, if it is still unpaired."""
        return self.unused.get(run.root.run)

    def identify(
        self,
        run: _LiveRun,
        latest: Sequence[tuple[StatePath, OpContent]],
        is_preferred: Callable[[RecordedRun, int], bool],
    ) -> bool:
        """Pairs ``run``, whose ops are the kept ones and then ``latest``. ``is_preferred`` chooses among the
        recorded runs that fit, given the number of ops. If none fits, pairs it with one anyway, so that the
        difference can be named. False if all recorded runs are paired."""
        likely = self.likely(run)
        candidates = [likely] if likely is not None else []
        candidates += [other for other in self.unused.values() if other is not likely]
        if not candidates:
            return False
        sent = [(kept.state.path, kept.content) for kept in run.kept] + [*latest]
        fitting = [other for other in candidates if _fits(other, sent)] or candidates
        run.recorded = next((other for other in fitting if is_preferred(other, len(sent))), fitting[0])
        del self.unused[run.recorded.index]
        run.root.recorded = run.recorded.root
        return True


def _fits(run: RecordedRun, sent: list[tuple[StatePath, OpContent]]) -> bool:
    """Whether the recorded run began with these ops."""
    num_ops: dict[StatePath, int] = {}
    for path, content in sent:
        position = num_ops.get(path, 0)
        num_ops[path] = position + 1
        state = run.states.get(path)
        if state is None:  # forked by an op that was not recorded
            continue
        if position >= len(state.ops):
            if not state.is_loose:
                return False
        elif state.ops[position].content != content:
            return False
    return True


_PATIENCE = 50
"""Turns of the event loop."""

ScheduledCall = Callable[[], None]

_FIRST = -1
"""Before all recorded events."""
_LATE = math.inf
"""After all recorded events."""


class _EventScheduler:
    """Sends events in the recorded order. ``expected``: the indices of the events that will be pushed if the
    program sends the recorded ops. ``batches``: for each event the number of its delivery; events of one
    delivery are sent together."""

    def __init__(self, expected: list[int], batches: list[int]) -> None:
        self.num_sent = 0  # content ops that the program has sent
        self._expected = expected
        self._batches = batches
        self._next = 0  # in ``expected``: all before it were sent or given up
        self._sent: set[float] = set()
        self._num_missing = 0  # ops that were given up
        self._heap: list[tuple[float, int, int, ScheduledCall]] = []
        self._order = itertools.count()
        self._followers: dict[int, list[ScheduledCall]] = {}
        self._changed = anyio.Event()

    def push(self, recorded: RecordedEvent, call: ScheduledCall) -> None:
        """Schedules an event whose op the program has sent."""
        self.push_at(recorded.seq, call, num_ops=recorded.num_ops)

    def push_at(self, seq: float, call: ScheduledCall, *, num_ops: int = 0) -> None:
        """Schedules a call right after the event with index ``seq``."""
        heapq.heappush(self._heap, (seq, next(self._order), num_ops, call))
        self._changed.set()

    def after(self, seq: int | None, follow: ScheduledCall) -> None:
        """Calls ``follow`` once the event has been sent, or now if ``seq`` is None."""
        if seq is None or seq in self._sent:
            follow()
        else:
            self._followers.setdefault(seq, []).append(follow)

    async def run(self, flush: Callable[[], None]) -> None:
        """Sends scheduled events until it is cancelled, and calls ``flush`` after each delivery."""
        while True:
            while not self._heap:
                self._changed = anyio.Event()
                await self._changed.wait()
            await self._wait_for_turn()
            batch = self._send_next()
            while self._heap and self._batch(self._heap[0][0]) == batch and self._is_due():
                self._send_next()
            flush()
            await anyio.lowlevel.checkpoint()

    def _send_next(self) -> int | None:
        seq, _, _, call = heapq.heappop(self._heap)
        call()
        self._sent.add(seq)
        if seq != _LATE:
            for follow in self._followers.pop(int(seq), ()):
                follow()
        return self._batch(seq)

    def _batch(self, seq: float) -> int | None:
        return self._batches[int(seq)] if 0 <= seq < _LATE else None

    async def _wait_for_turn(self) -> None:
        """Waits until the first event is due, or the program has sent nothing for ``_PATIENCE`` turns."""
        num_sent, num_turns = self.num_sent, 0
        while num_turns < _PATIENCE and not self._is_due():
            await anyio.lowlevel.checkpoint()
            num_turns = num_turns + 1 if num_sent == self.num_sent else 0
            num_sent = self.num_sent
        seq, _, num_ops, _ = self._heap[0]
        while self._next < len(self._expected) and self._expected[self._next] < seq:
            self._next += 1
        self._num_missing = max(self._num_missing, num_ops - self.num_sent)

    def _is_due(self) -> bool:
        seq, _, num_ops, _ = self._heap[0]
        if seq == _LATE:
            return False
        while self._next < len(self._expected) and self._expected[self._next] in self._sent:
            self._next += 1
        is_next = self._next == len(self._expected) or self._expected[self._next] >= seq
        return is_next and self.num_sent + self._num_missing >= num_ops
