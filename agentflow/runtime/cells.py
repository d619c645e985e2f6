"""What an interpreter knows of each variable and state, and how much of it the listener has heard."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import anyio
import msgspec

from agentflow.errors import AgentflowError
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
from agentflow.protocol.reply import read_reply
from agentflow.runtime.generator import ContextT
from agentflow.runtime.held_memory import Holding, error_bytes, text_bytes, value_bytes
from agentflow.runtime.limits import Budget
from agentflow.runtime.outbox import Outbox

if TYPE_CHECKING:
    from agentflow.runtime.graph_execution import GraphExecution


_NOT_COUNTED = ops.Await | ops.Seal | ops.Close | ops.Expect
# Of those that are in line; others act at once.
_COUNTED_KINDS = {"text", "image", "converse", "begin", "end", "gen", "select", "set", "read", "hint", "fork"}


class VariableCell:
    """One variable: its text so far, its end, and how far the listener has heard. ``is_expected``: its
    value comes from the client. ``is_reply``: its text is the notation of a reply. ``holding``: its
    memory."""

    def __init__(
        self,
        var_id: int,
        name: str,
        outbox: Outbox,
        holding: Holding,
        *,
        is_expected: bool = False,
        is_reply: bool = False,
    ) -> None:
        self.id = var_id
        self.name = name
        self.is_expected = is_expected
        self._is_reply = is_reply
        self.text = ""
        self.value: Value | None = None
        self.error: AgentflowError | None = None
        self.done = anyio.Event()
        self._outbox = outbox
        self._holding = holding
        self.is_output = False
        self._heard = 0
        self._heard_end = False

    @property
    def content(self) -> str:
        """What stands for it in other texts, once it is complete: of a reply its prose."""
        return read_reply(self.text).text if self._is_reply else self.text

    def extend(self, delta: str) -> None:
        """More text. Of a graph's output only the end is told."""
        self.text += delta
        if not self.is_output:
            self._outbox.mark(self)

    def complete(self, text: str, value: Value) -> None:
        """The end: ``text`` is all of it; ``value`` says the rest. ``Overloaded`` where that is too much."""
        self._holding.add(value_bytes(text, value))
        self.text, self.value = text, value
        self.done.set()
        self._outbox.mark(self)

    def fail(self, error: AgentflowError) -> None:
        """No value will come. Has no effect after the end."""
        if not self.done.is_set():
            self._holding.count(error_bytes(error, self.text))
            self.error = error
            self.done.set()
            self._outbox.mark(self)

    def rewind(self, num_chars: int) -> None:
        """The listener has heard ``num_chars`` characters and not the end."""
        self._heard, self._heard_end = max(0, min(num_chars, len(self.text))), False
        self._outbox.mark(self)

    def news(self) -> list[Event]:
        if self._heard_end:
            return []
        at, self._heard = self._heard, len(self.text)
        rest = self.text[at:]
        if self.error is not None:
            self._heard_end = True
            events: list[Event] = [Delta(self.id, at, rest)] if rest else []
            return [*events, VarFailed(self.id, ErrorInfo.of(self.error))]
        if self.value is not None:
            self._heard_end = True
            return [msgspec.structs.replace(self.value, var=self.id, at=at, text=rest)]
        return [Delta(self.id, at, rest)] if rest else []


@dataclass(slots=True)
class PendingOp(Generic[ContextT]):
    """An op in line. ``number``: which of its state's ops it is (None for those that are not counted).
    ``sources``: the variables that its text refers to, in order: the op keeps them, whatever becomes of
    their states. ``children``: the states that it forks. ``holding``: its own memory."""

    op: ops.Op | ops.Rejected
    holding: Holding
    number: int | None = None
    sources: tuple[VariableCell, ...] = ()
    children: tuple[StateCell[ContextT], ...] = ()


class StateCell(Generic[ContextT]):
    """One state: its context, the ops that wait, and how it ended. ``holding``: its memory; that of its
    context is ``context_holding``."""

    def __init__(
        self, state_id: int, parent: StateCell[ContextT] | None, outbox: Outbox, holding: Holding
    ) -> None:
        self.id = state_id
        self.parent = parent
        self.context: ContextT | None = None
        self.sealed: ContextT | None = None  # its context, to be read only
        self.has_begun = False
        self.pending: deque[PendingOp[ContextT]] = deque()
        self.variables: list[VariableCell] = []
        self.expected: list[VariableCell] = []  # of these, the client's own
        self.children: dict[int, StateCell[ContextT]] = {}
        self.siblings: list[StateCell[ContextT]] = []
        self.is_coupled = False
        self.is_running = False
        self.is_closing = False
        self.scope: anyio.CancelScope | None = None
        self.budgets: tuple[Budget, ...] = () if parent is None else parent.budgets
        self.num_limits = 0
        self.holding = holding
        self.context_holding: Holding | None = None
        self.num_chars = 0  # of its context, those of its parents included
        self.error: AgentflowError | None = None
        self.reached = 0
        self._outbox = outbox
        self.graph: GraphExecution[ContextT] | None = None
        self.is_silent = False
        self._heard_reached = 0
        self._heard_error = False
        self._num_ops = 0

    def number_of(self, op: ops.Op | ops.Rejected) -> int | None:
        """The number of an op that came now, by which the client finds its line in the program."""
        if isinstance(op, ops.Rejected) and op.kind not in _COUNTED_KINDS:
            return None
        if isinstance(op, _NOT_COUNTED) or (isinstance(op, ops.Set) and not op.parts):
            return None
        self._num_ops += 1
        return self._num_ops

    def restrict(self, budget: Budget) -> None:
        """One budget more, from now on."""
        self.budgets += (budget,)
        self.num_limits += 1
        if self.scope is not None:
            self.scope.deadline = min(self.scope.deadline, budget.deadline)

    def begin(self, context: ContextT, holding: Holding, num_chars: int = 0) -> None:
        """The state has a context, of so many characters: its ops can run."""
        self.context, self.context_holding = context, holding
        self.num_chars = num_chars
        self.has_begun = True

    def hold_text(self, text: str, num_chars: int = 0) -> None:
        """Counts what is appended to the context: the text, and what else counts like so many characters.
        ``Overloaded``."""
        if self.context_holding is not None:  # otherwise its context was given back meanwhile
            self.context_holding.add(text_bytes(text, num_chars))
            self.num_chars += len(text) + num_chars

    def reach(self, ticket: int) -> None:
        """The op stream got as far as the ``Await`` with this ticket."""
        self.reached = ticket
        self._outbox.mark(self)

    def rewind(self, ticket: int) -> None:
        """The listener has heard of tickets up to this one, and of no failure."""
        self._heard_reached, self._heard_error = ticket, False
        self._outbox.mark(self)

    def mark(self) -> None:
        self._outbox.mark(self)

    def news(self) -> list[Event]:
        events: list[Event] = []
        if self.is_silent:
            return events
        if self.reached > self._heard_reached:
            self._heard_reached = self.reached
            events.append(Reached(self.id, self.reached))
        if self.error is not None and not self._heard_error:
            self._heard_error = True
            events.append(StateFailed(self.id, ErrorInfo.of(self.error)))
        return events


class StatsCell:
    """An answer to be said once."""

    def __init__(self, reply: StatsReply) -> None:
        self._reply = reply

    def news(self) -> list[Event]:
        return [self._reply]
