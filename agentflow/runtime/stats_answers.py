"""Answers a session's questions for the backend's counters."""

from __future__ import annotations

from typing import Generic

import msgspec
from anyio.abc import TaskGroup

from agentflow.errors import AgentflowError, Overloaded
from agentflow.protocol.events import ErrorInfo, StatsReply
from agentflow.protocol.ops import check_number
from agentflow.runtime.cells import StatsCell
from agentflow.runtime.generator import ContextT, Generator
from agentflow.runtime.outbox import Outbox

MAX_TICKETS = 1_000


class StatsAnswers(Generic[ContextT]):
    """Asks ``generator`` once for all who wait, in one of ``tasks``, however many they are."""

    def __init__(self, generator: Generator[ContextT], tasks: TaskGroup, outbox: Outbox) -> None:
        self._generator = generator
        self._tasks = tasks
        self._outbox = outbox
        self._tickets: list[int] = []

    def ask(self, ticket: int) -> None:
        """The answer will bear the ticket. ``Overloaded`` where too many wait."""
        check_number(ticket)
        if len(self._tickets) >= MAX_TICKETS:
            raise Overloaded(f"{MAX_TICKETS} questions for counters wait: hear some answers first")
        self._tickets.append(ticket)
        if len(self._tickets) == 1:
            self._tasks.start_soon(self._answer)

    async def _answer(self) -> None:
        try:
            reply = StatsReply(0, await self._generator.stats())
        except AgentflowError as error:  # an engine that restarts, say: the session goes on
            reply = StatsReply(0, error=ErrorInfo.of(error))
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            self._outbox.mark(StatsCell(msgspec.structs.replace(reply, ticket=ticket)))
