"""A client's position in the events of its server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from agentflow.errors import ProtocolError
from agentflow.protocol import ops
from agentflow.protocol.events import (
    Delta,
    ErrorInfo,
    Event,
    GraphReply,
    Reached,
    StateFailed,
    StatsReply,
    Value,
    VarFailed,
    Watched,
)
from agentflow.protocol.op_table import GRAPH_TICKET, declared, opened
from agentflow.protocol.wire import Resume


@dataclass(slots=True)
class _StateCursor:
    num_unfinished: int = 0  # variables
    ticket: int = 0  # the last one submitted
    reached: int = 0
    has_failed: bool = False
    is_closing: bool = False

    @property
    def is_pending(self) -> bool:
        """Whether more events of the state will arrive."""
        return self.num_unfinished > 0 or (self.reached < self.ticket and not self.has_failed)


@dataclass(slots=True)
class _VariableCursor:
    state: int
    num_chars: int = 0


class Cursors:
    """Follows the submitted ops and the received events.

    A ``Close`` is delayed until all events of the state have arrived: after a broken connection, the server
    could not repeat the events of a closed state."""

    def __init__(self) -> None:
        # Tickets of ops.GetStats and ops.GetGraph, with the op's number; of ops.GetGraph also with the op.
        self.unanswered: dict[int, int] = {}
        self.asked_graphs: dict[int, ops.GetGraph] = {}
        self.watched: int | None = None  # the ticket of the session's watch
        self._states: dict[int, _StateCursor] = {}
        self._variables: dict[int, _VariableCursor] = {}
        self._due: list[ops.Close] = []

    def submit(self, op: ops.Op) -> bool:
        """Follows an op. False if it must be delayed; ``due_closes`` returns it later."""
        self._states |= {state_id: _StateCursor() for state_id in opened(op)}
        for var_id, _ in declared(op):
            self._variables[var_id] = _VariableCursor(op.state)  # type: ignore[union-attr]
            if op.state in self._states:  # type: ignore[union-attr]
                self._states[op.state].num_unfinished += 1  # type: ignore[union-attr]
        match op:
            case ops.SubmitGraph():
                self._states[op.state].ticket = GRAPH_TICKET
            case ops.Await():
                if op.state in self._states:
                    self._states[op.state].ticket = op.ticket
            case ops.Close():
                state = self._states.get(op.state)
                if state is not None and state.is_pending:
                    state.is_closing = True
                    return False
                self._states.pop(op.state, None)
            case ops.Watch():
                self.watched = op.ticket
            case ops.Unwatch():
                self.watched = None
            case _:
                pass
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether any state is open, or an answer is due."""
        return bool(self._states or self.unanswered) or self.watched is not None

    def failures(self, error: ErrorInfo) -> list[Event]:
        """The events that end everything with ``error``."""
        return [
            *[VarFailed(var_id, error) for var_id in self._variables],
            *[
                StateFailed(state_id, error)
                for state_id, state in self._states.items()
                if not state.has_failed
            ],
            *[
                GraphReply(ticket, None, error)
                if ticket in self.asked_graphs
                else StatsReply(ticket, None, error)
                for ticket in self.unanswered
            ],
            *([] if self.watched is None else [Watched(self.watched, error=error)]),
        ]

    def receive(self, events: Iterable[Event]) -> list[Event]:
        """The events without the parts that were received before. ``ProtocolError`` for a gap."""
        return [new for event in events if (new := self._receive(event)) is not None]

    def due_closes(self) -> list[ops.Close]:
        """The delayed closes that may be sent now."""
        due, self._due = self._due, []
        return due

    def resume(self, session: str, secret: str) -> Resume:
        """The positions from which the server continues."""
        return Resume(
            session,
            secret,
            {var_id: variable.num_chars for var_id, variable in self._variables.items()},
            {state_id: state.reached for state_id, state in self._states.items() if not state.has_failed},
        )

    def _receive(self, event: Event) -> Event | None:
        match event:
            case Delta():
                return self._receive_text(event)
            case Value():
                value = self._receive_text(event)
                self._finish(event.var)
                return value
            case VarFailed():
                return event if self._finish(event.var) else None
            case Reached() | StateFailed():
                return event if self._receive_state(event) else None
            case StatsReply() | GraphReply() if self.unanswered.pop(event.ticket, None) is not None:
                self.asked_graphs.pop(event.ticket, None)
                return event
            case Watched(ticket=ticket) if ticket == self.watched:
                return event
            case _:  # a reply received before, or an event that only other clients request
                return None

    def _receive_text(self, event: Delta | Value) -> Delta | Value | None:
        variable = self._variables.get(event.var)
        if variable is None:  # its end was received before the connection broke
            return None
        at = variable.num_chars
        if event.at > at:
            raise ProtocolError(
                f"the server continued variable {event.var} at character {event.at}, "
                f"but only {at} characters came before"
            )
        new = event.text[at - event.at :]
        variable.num_chars += len(new)
        if not new and isinstance(event, Delta) and not event.reasoning:
            return None
        return event if event.at == at else msgspec.structs.replace(event, at=at, text=new)

    def _finish(self, var_id: int) -> bool:
        variable = self._variables.pop(var_id, None)
        if variable is None:
            return False
        state = self._states.get(variable.state)
        if state is not None:
            state.num_unfinished -= 1
            self._close_if_done(variable.state, state)
        return True

    def _receive_state(self, event: Reached | StateFailed) -> bool:
        state = self._states.get(event.state)
        if state is None or state.has_failed:
            return False
        if isinstance(event, Reached):
            if event.ticket <= state.reached:
                return False
            state.reached = event.ticket
        else:
            state.has_failed = True
        self._close_if_done(event.state, state)
        return True

    def _close_if_done(self, state_id: int, state: _StateCursor) -> None:
        if state.is_closing and not state.is_pending:
            del self._states[state_id]
            self._due.append(ops.Close(state_id))
