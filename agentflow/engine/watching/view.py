"""The part of an engine that a session of one tenant sees.

A tenant without ``sees_metrics`` gets only its requests, nodes and counters, and no steps, which all tenants
share. Only the tenant of a node can read its text."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentflow.engine.messages import EngineStats
from agentflow.engine.tenant import Tenant
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.watching.shared_watches import SharedWatches
from agentflow.protocol.events import Stats, WatchedRequest
from agentflow.runtime.generator import NodeText, Snapshot, SnapshotNode


class EngineView:
    """A session's view. ``stats``: returns the tenant's stats, given the engine's."""

    def __init__(
        self,
        hub: SharedWatches,
        tenant: Tenant,
        tokenizer: Tokenizer,
        stats: Callable[[EngineStats], Stats],
    ) -> None:
        self._hub = hub
        self._tenant = tenant
        self._tokenizer = tokenizer
        self._stats = stats

    async def snapshot(self, max_nodes: int, steps_after: int) -> Snapshot:
        """Like ``View.snapshot``."""
        scope = None if self._tenant.sees_metrics else self._tenant.name
        found = await self._hub.snapshot(scope, max_nodes, steps_after)
        began_s = time.thread_time()
        names = found.tenants
        snapshot = Snapshot(
            epoch=found.epoch,
            time_s=found.time_s,
            steps=found.steps,
            requests=[WatchedRequest(*row) for row in found.requests],
            stats=self._stats(found.stats),
            nodes=[SnapshotNode(*row[:-1], names[row[-1]]) for row in found.nodes[:max_nodes]],
            num_nodes=found.num_nodes,
        )
        self.spent(time.thread_time() - began_s)
        return snapshot

    async def read_text(self, node: int) -> NodeText:
        """Like ``View.read_text``."""
        found = await self._hub.peek(self._tenant.name, node)
        text = self._tokenizer.decode(found.token_ids, skip_special=False, continues=True)
        return NodeText(text, found.num_tokens)

    def spent(self, loop_s: float) -> None:
        """Like ``View.spent``."""
        self._hub.spent(loop_s)
