"""The queries of all watches of one engine, limited so that they do not slow the engine.

Waiting watches of the same tenant share a snapshot. Snapshots are taken one at a time, with pauses, so that
they cost at most ``ENGINE_PART`` of the engine's time and ``LOOP_PART`` of the event loop's time: many or
large watches get their events less often. For one event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio

from agentflow.engine.messages import (
    EngineAnswer,
    EngineSnapshot,
    NodeTokens,
    PeekRequest,
    Query,
    SnapshotRequest,
)
from agentflow.errors import AgentflowError, Overloaded
from agentflow.runtime.limits import tenant_part

MAX_WATCHES = 64
"""The most watches of one engine. A tenant may have a part of them (``tenant_part``)."""
ENGINE_PART = 0.01
LOOP_PART = 0.02

SendQuery = Callable[[Callable[[int], Query]], Awaitable[EngineAnswer]]


@dataclass(slots=True, eq=False)
class _Shared:
    """A snapshot for all watches that wait for it."""

    num_waiting: int = 0
    max_nodes: int = 0
    steps_after: int | None = None
    answer: EngineSnapshot | None = None
    error: AgentflowError | None = None


class SharedWatches:
    """Queries an engine for snapshots and tokens of nodes. ``send``: sends a query and returns its answer."""

    def __init__(self, send: SendQuery) -> None:
        self._send = send
        self._num_of: Counter[str] = Counter()
        self._waiting: dict[str | None, _Shared] = {}
        self._snapshots = anyio.Lock()
        self._peeks = anyio.Lock()
        self._next_s = 0.0
        self._loop_s = 0.0  # spent on snapshots since the last one

    @contextmanager
    def watching(self, tenant: str) -> Iterator[None]:
        """The scope of one watch. Raises ``Overloaded`` beyond the limits."""
        if self._num_of.total() >= MAX_WATCHES:
            raise Overloaded(f"{MAX_WATCHES} sessions watch this engine, the most it allows: try again later")
        if self._num_of[tenant] >= tenant_part(MAX_WATCHES, tenant):
            raise Overloaded("too many sessions of this tenant watch this engine: end another watch")
        self._num_of[tenant] += 1
        try:
            yield
        finally:
            self._num_of[tenant] -= 1
            if not self._num_of[tenant]:
                del self._num_of[tenant]

    def spent(self, loop_s: float) -> None:
        """Adds processor time that the event loop spent on a snapshot."""
        self._loop_s += loop_s

    async def snapshot(self, tenant: str | None, max_nodes: int, steps_after: int) -> EngineSnapshot:
        """Returns the tenant's part of a snapshot (None: all of it).

        Args:
            tenant: the tenant's name, or None.
            max_nodes: the most nodes; the answer may have more.
            steps_after: the answer has the steps after this number, and may have earlier ones.

        Raises:
            EngineDown: no engine process runs.
        """
        shared = self._waiting.setdefault(tenant, _Shared())
        shared.max_nodes = max(shared.max_nodes, max_nodes)
        known = shared.steps_after
        shared.steps_after = steps_after if known is None else min(known, steps_after)
        shared.num_waiting += 1
        try:
            async with self._snapshots:
                if shared.answer is None and shared.error is None:
                    await anyio.sleep_until(self._next_s)
                    if self._waiting.get(tenant) is shared:
                        del self._waiting[tenant]
                    await self._take(shared, tenant)
        finally:
            shared.num_waiting -= 1
            if not shared.num_waiting and self._waiting.get(tenant) is shared:
                del self._waiting[tenant]  # all were cancelled
        if shared.answer is None:
            assert shared.error is not None
            raise shared.error
        return shared.answer

    async def _take(self, shared: _Shared, tenant: str | None) -> None:
        after = shared.steps_after or 0
        try:
            answer = await self._send(lambda ticket: SnapshotRequest(ticket, tenant, shared.max_nodes, after))
        except AgentflowError as error:
            shared.error = error
            return
        assert isinstance(answer, EngineSnapshot)
        shared.answer = answer
        pause_s = answer.took_s / ENGINE_PART + self._loop_s / LOOP_PART
        self._next_s, self._loop_s = anyio.current_time() + pause_s, 0.0

    async def peek(self, tenant: str, node: int) -> NodeTokens:
        """Returns the first tokens of a node of an earlier snapshot.

        Raises:
            BadArgument: the node is no longer in the cache.
            NotAuthorized: the node belongs to another tenant.
            EngineDown: no engine process runs.
        """
        async with self._peeks:
            answer = await self._send(lambda ticket: PeekRequest(ticket, node, tenant))
        assert isinstance(answer, NodeTokens)
        return answer
