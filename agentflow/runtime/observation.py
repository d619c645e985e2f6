"""What a client observes of the backend: its counters, and a watch of its scheduler and radix tree."""

from __future__ import annotations

from typing import Generic

import msgspec
from anyio.abc import TaskGroup

from agentflow.errors import AgentflowError, NotSupported, Overloaded
from agentflow.protocol import ops
from agentflow.protocol.events import ErrorInfo, Event, Peeked, StatsReply, Watched
from agentflow.runtime.generator import ContextT, Generator
from agentflow.runtime.state_tree import EventCursor

MAX_TICKETS = 1_000


class StatsAnswers(Generic[ContextT]):
    """Answers ``GetStats``. Concurrent ones share one query of the generator."""

    def __init__(self, generator: Generator[ContextT], tasks: TaskGroup, events: EventCursor) -> None:
        self._generator = generator
        self._tasks = tasks
        self._events = events
        self._tickets: list[int] = []
        self._replies: list[Event] = []

    def ask(self, ticket: int) -> None:
        """Asks for an answer with this ticket. ``Overloaded`` if too many are waiting."""
        ops.check_number(ticket)
        if len(self._tickets) >= MAX_TICKETS:
            raise Overloaded(
                f"{MAX_TICKETS} requests for statistics are unanswered: receive some answers first"
            )
        self._tickets.append(ticket)
        if len(self._tickets) == 1:
            self._tasks.start_soon(self._answer)

    async def _answer(self) -> None:
        try:
            reply = StatsReply(0, await self._generator.stats())
        except AgentflowError as error:  # such as an engine that restarts
            reply = StatsReply(0, error=ErrorInfo.of(error))
        tickets, self._tickets = self._tickets, []
        self._replies += [msgspec.structs.replace(reply, ticket=ticket) for ticket in tickets]
        self._events.mark(self)

    def take_events(self) -> list[Event]:
        """The replies since the last call."""
        replies, self._replies = self._replies, []
        return replies


class WatchAnswers(Generic[ContextT]):
    """Answers ``Watch`` and ``Peek``."""

    def __init__(self, generator: Generator[ContextT], tasks: TaskGroup, events: EventCursor) -> None:
        self._generator = generator
        self._events = events
        self._replies: list[Event] = []

    def watch(self, op: ops.Watch) -> None:
        ops.check_number(op.ticket)
        self._replies.append(Watched(op.ticket, error=self._error()))
        self._events.mark(self)

    def unwatch(self) -> None:
        pass

    def peek(self, op: ops.Peek) -> None:
        ops.check_number(op.ticket)
        self._replies.append(Peeked(op.ticket, error=self._error()))
        self._events.mark(self)

    def _error(self) -> ErrorInfo:
        return ErrorInfo.of(NotSupported(f"{self._generator.capabilities.model} cannot be watched"))

    def take_events(self) -> list[Event]:
        """The replies since the last call."""
        replies, self._replies = self._replies, []
        return replies
