"""The sessions of a server: each has an interpreter, its tasks and states, and a secret.

A session belongs to one websocket at a time. If the websocket breaks, the client can resume the session
within the grace period. After the grace period, or a Bye, everything that the session runs is cancelled.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from agentflow.errors import AgentflowError, NotAuthorized, Overloaded, ProtocolError, ServerLost, incident
from agentflow.protocol.ops import Op, Rejected
from agentflow.protocol.wire import Resume, UnreadOps
from agentflow.runtime.generator import ContextT, SessionModels
from agentflow.runtime.interpreter.checking import CheckingInterpreter
from agentflow.runtime.limits import MemoryBudget, TenantMemory, tenant_part
from agentflow.runtime.loop_turns import LoopTurn
from agentflow.runtime.programs.live import OpenGraphs, TenantGraphs
from agentflow.runtime.task_group import open_task_group
from agentflow.server.config.limits import ServerLimits

logger = logging.getLogger(__name__)


IsValid = Callable[[], bool]
"""Whether the API key of a websocket still identifies its tenant."""


def always_valid() -> bool:
    """The check of a server without keys."""
    return True


class ServedSession(Generic[ContextT]):
    """The session of one client. ``num_taken``: the number of the last op that was accepted.

    Args:
        models: The models that it may use.
        tasks: The task group in which its states run.
        holder: The scope of its connection, which is cancelled when another connection takes over.
        tenant: The tenant's name.
        memory: The budget of its texts.
        is_valid: Whether the API key of its current or last websocket is valid.
        graphs: The live graphs of the tenant.
        front: The id of this server, if several share a store.
    """

    def __init__(
        self,
        models: SessionModels,
        tasks: TaskGroup,
        holder: anyio.CancelScope,
        tenant: str,
        memory: MemoryBudget,
        is_valid: IsValid = always_valid,
        graphs: TenantGraphs | None = None,
        front: str = "",
    ) -> None:
        self.tenant = tenant
        self.is_valid = is_valid
        own = secrets.token_urlsafe(12)
        self.id = f"{front}.{own}" if front else own
        self.secret = secrets.token_urlsafe(32)
        self.interpreter = CheckingInterpreter(
            models.default,
            tasks,
            memory,
            hides_faults=True,
            models=models.others,
            embedders=models.embedders,
            counted=models.counted,
            graphs=graphs,
        )
        self.num_taken = 0
        self.has_ended = False
        self.failure: AgentflowError | None = None
        self._holder: anyio.CancelScope | None = holder
        self._changed = anyio.Event()

    async def submit(self, frame: UnreadOps, read: Callable[[msgspec.Raw], Op | Rejected]) -> None:
        """Submits the ops of the frame that were not accepted before. ``read`` decodes them.
        ``ProtocolError`` if ops are missing or one has no state, ``Overloaded`` if too many were rejected."""
        if not 1 <= frame.first <= self.num_taken + 1:
            raise ProtocolError(
                f"expected ops from number {self.num_taken + 1} on, received a frame whose first op has "
                f"number {frame.first}"
            )
        turn = LoopTurn()
        for number, data in enumerate(frame.ops, frame.first):
            if number > self.num_taken:
                op = read(data)
                await turn.pause()
                for _ in self.interpreter.submitting(op):
                    if turn.is_over:
                        with anyio.CancelScope(shield=True):  # an op is submitted as a whole, or not at all
                            await turn.pause()
                        if self.has_ended:
                            return
                self.num_taken = number
                await turn.pause()

    async def hand_over(self, holder: anyio.CancelScope) -> None:
        """Transfers the session to ``holder``. The previous holder is cancelled first: a client may reconnect
        before the server notices that its connection broke."""
        while self._holder is not None:
            self._holder.cancel()
            await self._changed.wait()
        if self.has_ended:
            raise _unknown_session()
        self._holder = holder
        self._change()

    def release(self, holder: anyio.CancelScope) -> None:
        """Begins the grace period, if ``holder`` still has the session."""
        if self._holder is holder:
            self._holder = None
            self._change()

    def end(self, failure: AgentflowError | None = None) -> None:
        """Ends the session without a grace period. Cancels its work and its holder, which sends the client
        the ``failure``."""
        self.has_ended = True
        self.failure = self.failure or failure
        self._change()

    async def until_over(self, grace_s: float) -> None:
        """Waits until the session ends, or has had no holder for ``grace_s``."""
        while not self.has_ended:
            changed = self._changed
            if self._holder is not None:
                await changed.wait()
                continue
            with anyio.move_on_after(grace_s) as scope:
                await changed.wait()
            self.has_ended |= scope.cancelled_caught and not changed.is_set()

    def dismiss_holder(self) -> None:
        """Cancels the holder, if there is one."""
        self.has_ended = True
        if self._holder is not None:
            self._holder.cancel()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def session_front(session_id: str) -> str:
    """The front in the id of a session; empty if it has none."""
    return session_id.rpartition(".")[0]


class Sessions(Generic[ContextT]):
    """All sessions of a server, whose ids begin with ``front``. ``open_sessions`` creates it."""

    def __init__(self, limits: ServerLimits, tasks: TaskGroup, front: str = "") -> None:
        self._front = front
        self.limits = limits
        self.graphs = OpenGraphs()
        self._num_connections_of: Counter[str] = Counter()
        self._num_sessions_of: Counter[str] = Counter()  # with those in ``_opening``
        self._opening: set[anyio.CancelScope] = set()  # holders of sessions whose tasks have not begun
        self._memory = TenantMemory(
            limits.sessions_bytes, "all sessions together may hold", "close some, or try again later"
        )
        self._tasks = tasks
        self._sessions: dict[str, ServedSession[ContextT]] = {}
        self._num_closing = 0
        self._one_removed = anyio.Event()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_bytes(self) -> int:
        """The estimated memory of all sessions."""
        return self._memory.num_bytes

    @property
    def num_connections(self) -> int:
        """The number of open websockets, without rejected ones."""
        return self._num_connections_of.total()

    @contextmanager
    def reserved_connection(self, tenant: str) -> Iterator[Overloaded | None]:
        """Counts one more websocket of the tenant. Yields the error if that exceeds a limit."""
        error: Overloaded | None = None
        most = tenant_part(self.limits.max_connections, tenant)
        if self.num_connections >= self.limits.max_connections:
            error = Overloaded(
                f"the server has {self.limits.max_connections} open connections, which is its limit: "
                "try again later"
            )
        elif self._num_connections_of[tenant] >= most:
            error = Overloaded(
                f"this tenant has {most} open connections, which is its limit: try again later"
            )
        if error is not None:
            yield error
            return
        self._num_connections_of[tenant] += 1
        try:
            yield None
        finally:
            self._num_connections_of[tenant] -= 1
            if not self._num_connections_of[tenant]:
                del self._num_connections_of[tenant]

    async def open(
        self,
        models: SessionModels,
        holder: anyio.CancelScope,
        *,
        tenant: str = "",
        is_valid: IsValid = always_valid,
    ) -> ServedSession[ContextT]:
        """Opens a session. ``Overloaded`` if there are too many, or the tenant has too many."""
        if len(self._sessions) + len(self._opening) >= self.limits.max_sessions:
            raise Overloaded(
                f"the server has {self.limits.max_sessions} open sessions, which is its limit: "
                "try again later"
            )
        most = tenant_part(self.limits.max_sessions, tenant)
        if self._num_sessions_of[tenant] >= most:
            raise Overloaded(f"this tenant has {most} open sessions, which is its limit: try again later")
        self._opening.add(holder)
        self._num_sessions_of[tenant] += 1
        try:
            session: ServedSession[ContextT] = await self._tasks.start(
                self._run, models, holder, tenant, is_valid
            )
        finally:
            if holder in self._opening:
                self._opening.remove(holder)
                self._forget_one_of(tenant)
        return session

    def _forget_one_of(self, tenant: str) -> None:
        self._num_sessions_of[tenant] -= 1
        if not self._num_sessions_of[tenant]:
            del self._num_sessions_of[tenant]

    async def resume(
        self,
        resume: Resume,
        holder: anyio.CancelScope,
        *,
        tenant: str = "",
        is_valid: IsValid = always_valid,
    ) -> ServedSession[ContextT]:
        """Resumes a session, which sends the events that the client lacks again. ``ServerLost`` if it has
        ended, or belongs to another tenant."""
        session = self._sessions.get(resume.session)
        if session is None or session.tenant != tenant:
            raise _unknown_session()
        if not secrets.compare_digest(session.secret.encode(), resume.secret.encode()):
            raise _unknown_session()
        await session.hand_over(holder)
        session.is_valid = is_valid
        session.interpreter.rewind(resume.variables, resume.states)
        return session

    def end_revoked(self) -> None:
        """Ends the sessions whose API keys were revoked."""
        for session in self._sessions.values():
            if not session.is_valid():
                session.end(revoked())

    async def wait_until_empty(self) -> None:
        """Waits until no session is open, and the contexts of all closed sessions are freed."""
        while self._sessions or self._num_closing:
            await self._one_removed.wait()

    async def _run(
        self,
        models: SessionModels,
        holder: anyio.CancelScope,
        tenant: str,
        is_valid: IsValid,
        *,
        task_status: TaskStatus[object],
    ) -> None:
        session: ServedSession[ContextT] | None = None
        try:
            async with anyio.create_task_group() as group:
                memory = MemoryBudget(
                    self.limits.session_bytes,
                    within=self._memory.of(tenant),
                    free_bytes=self.limits.sessions_bytes // (2 * self.limits.max_sessions),
                )
                session = ServedSession(
                    models, group, holder, tenant, memory, is_valid, self.graphs.of(tenant), self._front
                )
                self._sessions[session.id] = session
                self._opening.remove(holder)  # not counted twice until ``open`` continues
                task_status.started(session)
                await session.until_over(self.limits.resume_grace_s)
                group.cancel_scope.cancel()
        except* Exception as errors:
            # A fault of the server ends this session only.
            failure = incident(logger, "the session", errors)
            if session is not None:
                session.end(failure)
        finally:
            if session is not None:
                await self._remove(session)

    async def _remove(self, session: ServedSession[ContextT]) -> None:
        del self._sessions[session.id]
        self._forget_one_of(session.tenant)
        self._num_closing += 1
        session.dismiss_holder()
        try:
            await session.interpreter.aclose()
        except Exception:
            logger.exception("not all contexts of a session could be freed")
        finally:
            self._num_closing -= 1
            self._one_removed.set()
            self._one_removed = anyio.Event()


@asynccontextmanager
async def open_sessions(limits: ServerLimits, front: str = "") -> AsyncIterator[Sessions[Any]]:
    """The sessions of a server, which are cancelled at the end of the scope. ``front``: the server's id, if
    several share a store."""
    async with open_task_group() as group:
        yield Sessions(limits, group, front)
        group.cancel_scope.cancel()


def revoked() -> NotAuthorized:
    """The error of a session whose API key was revoked."""
    return NotAuthorized("the API key of this session was revoked: ask the server's operator for another one")


def _unknown_session() -> ServerLost:
    # The same for a wrong secret, so that clients cannot learn which sessions exist.
    return ServerLost("there is no such session: it has ended, or its grace period is over; open a new one")
