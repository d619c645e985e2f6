"""The connection of a replay: finds each op that is sent in the recording, and has its answer told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from agentflow.backends.agenda import LATE, Agenda
from agentflow.backends.live_runs import KeptOp, LiveRun, LiveRuns, LiveState
from agentflow.errors import ReplayDiffers
from agentflow.protocol import ops
from agentflow.protocol.backend import Deliver, Lost
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
from agentflow.protocol.op_table import OpKind, declared, shape_of
from agentflow.recording.content_text import describe, difference
from agentflow.recording.file import Recording
from agentflow.recording.places import Content, ForkTree, Path
from agentflow.recording.runs import RecordedOp, RecordedRun, RecordedRuns, RecordedVariable
from agentflow.runtime.generator import Stats
from agentflow.runtime.graph_execution import TICKET


class ReplayConnection:
    """A ``Connection`` to a recording."""

    def __init__(
        self, recording: Recording, runs: RecordedRuns, agenda: Agenda, deliver: Deliver, lost: Lost
    ) -> None:
        self.capabilities = recording.header.capabilities
        self._recording = recording
        self._recorded = runs
        self._agenda = agenda
        self._deliver = deliver
        self._lost = lost
        self._is_over = False
        self.is_complete = False
        """Whether the session's block was left by its end."""
        self._runs = LiveRuns(runs.runs)
        self._num_stats = 0
        self._told: list[Event] = []
        self._tree = ForkTree(LiveState, recording.header.seed, self._runs.recorded_index)
        self._lose_when_due()

    def send(self, ops: Sequence[ops.Op]) -> None:
        refusal: ErrorInfo | None = None
        try:
            for op in ops:
                refusal = self._take(op) or refusal
        except ReplayDiffers as error:
            self._end(error)
            raise
        if refusal is not None:
            raise refusal.to_exception()

    def end(self, error: BaseException | None) -> None:
        self.is_complete = error is None

    def finish(self) -> None:
        """The program is done. ``ReplayDiffers`` where the recording has more runs."""
        if self._runs.unused and not self._is_over:
            run = next(iter(self._runs.unused.values()))
            raise ReplayDiffers(
                f"the recording has {len(self._recorded.runs)} runs, and the program ended after "
                f"{len(self._runs)}: nothing came for run {run.index}{_begin_of(run)}"
            )

    def _take(self, op: ops.Op) -> ErrorInfo | None:
        """One op; why it is refused, if it was."""
        match op:
            case ops.GetStats():
                self._answer_stats(op.ticket)
                return None
            case ops.Provide() | ops.Limit():
                return None
            case ops.Open() | ops.Submit():
                state = self._tree.open(op)
                state.id = op.state
                self._runs.add(state)
            case _:
                state = self._tree.node(op.state)
        match shape_of(op).kind:
            case OpKind.CONTENT:
                refusal = self._take_content(state, op)
                if isinstance(op, ops.Submit) and refusal is None:
                    self._take_await(state, TICKET)
                return refusal
            case OpKind.GROUP:
                state.groups.add(self._tree.content(op, state))
                self._check_group(state)
            case OpKind.AWAIT:
                assert isinstance(op, ops.Await)
                self._take_await(state, op.ticket)
            case OpKind.CANCEL:
                state.cancel()
            case OpKind.SEAL:
                sealed_after = state.recorded.num_ops_sealed if state.recorded is not None else None
                if sealed_after is not None:  # variables of a sealed state may follow
                    self._check_complete(state, sealed_after)
            case OpKind.CLOSE:
                self._identify(state, is_likelier=lambda run, num_sent: run.num_ops == num_sent)
                self._tree.forget(state.id)
                self._check_complete(state)
            case _:
                pass
        return None

    def _take_content(self, state: LiveState, op: ops.Op) -> ErrorInfo | None:
        run = self._runs[state.run]
        content = self._tree.content(op, state)
        if run.recorded is not None or self._must_know(run, op):
            self._identify(state, [(state.path, content)])
            found = self._match(state, content)
            if found is not None and found.refusal is not None:
                return found.refusal
            self._answer(state, op, found, self._enter(op, state))
        else:
            run.kept.append(KeptOp(state, op, content, self._enter(op, state)))
            state.num_kept += 1
        return None

    def _enter(self, op: ops.Op, state: LiveState) -> list[LiveState]:
        forks = self._tree.enter(op, state)
        if forks:
            for child, child_id in zip(forks, getattr(op, shape_of(op).children or ""), strict=True):
                child.id = child_id
        return forks

    def _must_know(self, run: LiveRun, op: ops.Op) -> bool:
        """Whether the op needs an answer, so that the run must be known."""
        likely = self._runs.likely(run)
        return bool(declared(op)) or (likely is not None and likely.has_refusals)

    def _identify(
        self,
        state: LiveState,
        latest: Sequence[tuple[Path, Content]] = (),
        is_likelier: Callable[[RecordedRun, int], bool] = lambda run, num_sent: True,
    ) -> None:
        """Finds out which recorded run a state belongs to, and takes what was kept until now."""
        run = self._runs[state.run]
        if run.recorded is not None:
            return
        if not self._runs.identify(run, latest, is_likelier):
            if self._recorded.lost is None:
                raise self._differs(f"run {state.run}", "no more runs", "another")
            return
        kept_ops, run.kept = run.kept, []
        for kept in kept_ops:
            self._answer(kept.state, kept.op, self._match(kept.state, kept.content), kept.children)
            self._check_group(kept.state)

    def _match(self, state: LiveState, content: Content) -> RecordedOp | None:
        """The recorded op at this place; None where the recording need not have one."""
        position = state.num_ops
        state.num_ops += 1
        self._agenda.num_sent += 1
        self._lose_when_due()
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
        self, state: LiveState, op: ops.Op, found: RecordedOp | None, children: list[LiveState]
    ) -> None:
        """Has told what the recording says of this op."""
        for index, (var_id, _) in enumerate(declared(op)):
            self._answer_variable(state, var_id, found.variables[index] if found else None)
        for index, child in enumerate(children):
            child.recorded = found.children[index] if found is not None else None
            self._fail_when_due(child)
        self._fail_when_due(state)

    def _answer_variable(self, state: LiveState, var_id: int, recorded: RecordedVariable | None) -> None:
        for heard in recorded.events if recorded is not None else ():
            assert isinstance(heard.event, Delta | Value | VarFailed)
            event = msgspec.structs.replace(heard.event, var=var_id)
            self._agenda.push(heard, lambda event=event: self._told.append(event))  # type: ignore[misc]
        if recorded is None or not recorded.has_end:
            error = self._missing(state, is_new=recorded is None)
            if error is not None:
                self._agenda.push_at(LATE, lambda: self._told.append(VarFailed(var_id, error)))

    def _take_await(self, state: LiveState, ticket: int) -> None:
        self._identify(state, is_likelier=lambda run, _: run.was_asked(state.path, state.num_kept))
        seq = state.recorded.reached_seq(state.num_ops) if state.recorded is not None else None
        if seq is not None:
            self._agenda.push_at(seq, lambda: self._told.append(Reached(state.id, ticket)))
            return
        has_failure = state.recorded is not None and state.recorded.failure is not None
        is_new = state.recorded is None or state.num_ops > len(state.recorded.ops)
        error = None if has_failure else self._missing(state, is_new=is_new)
        if error is not None:
            self._agenda.push_at(LATE, lambda: self._told.append(StateFailed(state.id, error)))

    def _missing(self, state: LiveState, *, is_new: bool) -> ErrorInfo | None:
        """Why an answer never comes. ``is_new``: it was not asked for when it was recorded. None: the
        program itself ends the wait, or the end of the backend does."""
        above: LiveState | None = state
        while above is not None and above.recorded is None:
            above = above.above
        recorded = above.recorded if above is not None else None
        if self._recorded.lost is not None or recorded is None:
            return None
        if recorded.failure is not None:
            assert isinstance(recorded.failure.event, StateFailed)
            return recorded.failure.event.error
        if recorded.is_cancelled and not is_new:
            return None
        if is_new:
            return ErrorInfo.of(self._differs(state.place(state.num_ops), "a cancellation", "more"))
        if self._recording.is_cut:
            return ErrorInfo.of(
                ReplayDiffers(f"{state.place()}: the recording ends before this had an answer")
            )
        return None

    def _fail_when_due(self, state: LiveState) -> None:
        """Has the failure of a state told, once what caused it has happened."""
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
        self._agenda.after(cause, lambda: self._agenda.push(failure, lambda: self._told.append(event)))

    def _lose_when_due(self) -> None:
        loss = self._recorded.lost
        if loss is not None and self._agenda.num_sent == loss.num_ops:
            self._agenda.push_at(loss.seq, lambda: self._end(loss.error.to_exception()))

    def _check_group(self, state: LiveState) -> None:
        recorded = state.recorded
        if recorded is None or state.is_loose:
            return
        for content in state.groups - recorded.groups:
            raise self._differs(state.place(), "no such task group", describe(content))

    def _check_complete(self, state: LiveState, num_recorded: int | None = None) -> None:
        """Nothing more will be appended to the state: all that was recorded (or so many ops of it) must have
        come."""
        recorded = state.recorded
        if recorded is None or state.is_cancelled or recorded.is_cancelled or self._is_over:
            return
        # Of a failed state, what it failed by; the program may not have got any further.
        num_recorded = len(recorded.ops) if num_recorded is None else num_recorded
        num_ops = min(num_recorded, recorded.cause[0]) if recorded.failure is not None else num_recorded
        if state.num_ops < num_ops:
            more = describe(recorded.ops[state.num_ops].content)
            raise self._differs(state.place(state.num_ops), more, "nothing more there")
        for content in recorded.groups - state.groups if recorded.failure is None else ():
            raise self._differs(state.place(), describe(content), "none")

    def _answer_stats(self, ticket: int) -> None:
        known = self._recorded.stats
        seq, reply = -1, StatsReply(ticket, Stats(model=self.capabilities.model))
        if known:
            seq, recorded = known[min(self._num_stats, len(known) - 1)]
            reply = StatsReply(ticket, recorded.stats, recorded.error)
        self._num_stats += 1
        self._agenda.push_at(seq, lambda: self._told.append(reply))

    def flush(self) -> None:
        """Delivers what was told since the last time."""
        told, self._told = self._told, []
        if told and not self._is_over:
            self._deliver(told)

    def _end(self, error: Exception) -> None:
        if not self._is_over:
            self.flush()
            self._is_over = True
            self._lost(error)

    def _differs(self, where: str, recorded: str, came: str) -> ReplayDiffers:
        if recorded.startswith("no more") and self._recording.is_cut:
            return ReplayDiffers(f"{where}: the recording ends here, and the program goes on with {came}")
        return ReplayDiffers(f"{where}: the recording has {recorded}, and the program has {came}")


def _begin_of(run: RecordedRun) -> str:
    texts = [describe(op.content) for op in run.root.ops if op.content.kind == "text"]
    return f", which begins with {texts[0]}" if texts else ""
