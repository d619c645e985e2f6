"""How far the client of a server has heard each variable and state.

After a broken connection the cursors say where the server goes on, and they keep what it repeats
from being heard twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from agentflow.errors import ProtocolError
from agentflow.protocol import ops
from agentflow.protocol.events import Delta, Event, Reached, StateFailed, StatsReply, Value, VarFailed
from agentflow.protocol.wire import Resume


@dataclass(slots=True)
class _StateCursor:
    num_unfinished: int = 0  # variables
    ticket: int = 0  # the last one submitted
    reached: int = 0
    has_failed: bool = False
    is_closing: bool = False

    @property
    def is_owed(self) -> bool:
        """Whether the server still has something to say about the state."""
        return self.num_unfinished > 0 or (self.reached < self.ticket and not self.has_failed)


@dataclass(slots=True)
class _VariableCursor:
    state: int
    num_chars: int = 0


class Cursors:
    """Follows the ops that are submitted and the events that come.

    A ``Close`` is held back while the server still owes something about its state: what a closed
    state had to say could not be said again after a broken connection.
    """

    def __init__(self) -> None:
        self.unanswered: dict[int, int] = {}  # tickets of GetStats, with the op's number
        self._states: dict[int, _StateCursor] = {}
        self._variables: dict[int, _VariableCursor] = {}
        self._due: list[ops.Close] = []

    def submit(self, op: ops.Op) -> bool:
        """Notes an op; False if it is to be held back (``due_closes`` gives it later)."""
        match op:
            case ops.Open():
                self._states[op.state] = _StateCursor()
            case ops.Fork():
                self._states |= {child: _StateCursor() for child in op.children}
            case ops.Submit():
                self._states[op.state] = _StateCursor(num_unfinished=len(op.outputs), ticket=1)
                for number in op.outputs:
                    self._variables[op.session_number(number)] = _VariableCursor(op.state)
            case _ if isinstance(op, ops.Declaring):
                self._variables[op.var] = _VariableCursor(op.state)
                if op.state in self._states:
                    self._states[op.state].num_unfinished += 1
            case ops.Await():
                if op.state in self._states:
                    self._states[op.state].ticket = op.ticket
            case ops.Close():
                state = self._states.get(op.state)
                if state is not None and state.is_owed:
                    state.is_closing = True
                    return False
                self._states.pop(op.state, None)
            case _:
                pass
        return True

    def hear(self, events: Iterable[Event]) -> list[Event]:
        """What of the events is new. ``ProtocolError`` when something in between is missing."""
        return [new for event in events if (new := self._hear(event)) is not None]

    def due_closes(self) -> list[ops.Close]:
        """The closes that were held back and may go now."""
        due, self._due = self._due, []
        return due

    def resume(self, session: str, secret: str) -> Resume:
        """What the server needs to know to go on."""
        return Resume(
            session,
            secret,
            {var_id: variable.num_chars for var_id, variable in self._variables.items()},
            {state_id: state.reached for state_id, state in self._states.items() if not state.has_failed},
        )

    def _hear(self, event: Event) -> Event | None:
        match event:
            case Delta():
                return self._hear_text(event)
            case Value():
                value = self._hear_text(event)
                self._finish(event.var)
                return value
            case VarFailed():
                return event if self._finish(event.var) else None
            case Reached() | StateFailed():
                return event if self._hear_state(event) else None
            case StatsReply():
                return event if self.unanswered.pop(event.ticket, None) is not None else None

    def _hear_text(self, event: Delta | Value) -> Delta | Value | None:
        variable = self._variables.get(event.var)
        if variable is None:  # its end was heard before the connection broke
            return None
        at = variable.num_chars
        if event.at > at:
            raise ProtocolError(
                f"the server goes on with variable {event.var} at character {event.at}, "
                f"but only {at} characters came before"
            )
        new = event.text[at - event.at :]
        variable.num_chars += len(new)
        if not new and isinstance(event, Delta):
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

    def _hear_state(self, event: Reached | StateFailed) -> bool:
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
        if state.is_closing and not state.is_owed:
            del self._states[state_id]
            self._due.append(ops.Close(state_id))
