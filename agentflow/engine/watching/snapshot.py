"""Takes snapshots of an engine: its counters, last steps, requests and the recently used part of its radix
trees.

Runs in the engine's thread. Without watches, it costs a record for each step. The time of a snapshot depends
on the limits here, not on the size of the cache.
"""

from __future__ import annotations

import resource
import secrets
import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import chain, islice
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from agentflow.engine.cache.nodes import Node
from agentflow.engine.cache.token_run import TOKEN_BYTES
from agentflow.engine.messages import (
    BucketCounts,
    EngineSnapshot,
    EngineStats,
    Failed,
    NodeTokens,
    PeekRequest,
    RequestRow,
    SnapshotRequest,
    TreeRow,
)
from agentflow.engine.request import Request, Status
from agentflow.engine.scheduling.scheduler import Scheduler
from agentflow.engine.watching.recent_nodes import recent_nodes
from agentflow.errors import BadArgument, NotAuthorized
from agentflow.protocol.events import StepRecord

MAX_STEPS = 512
"""The most steps in a snapshot."""
MAX_REQUESTS = 200
"""The most requests in a snapshot."""
MAX_PEEK_TOKENS = 500
TIMES_EVERY_S = 0.1
MAX_TIMES = 8192


class UseTimes:
    """Maps the cache's clock, the number of its uses, to times. Records are ``TIMES_EVERY_S`` seconds apart;
    half of them are dropped when there are more than ``MAX_TIMES``."""

    def __init__(self) -> None:
        self._clocks: list[int] = [0]
        self._times: list[float] = [0.0]

    def note(self, clock: int, time_s: float, every_s: float = TIMES_EVERY_S) -> None:
        """Records the clock at a time, unless the last record is younger than ``every_s``."""
        if clock > self._clocks[-1] and time_s - self._times[-1] >= every_s:
            self._clocks.append(clock)
            self._times.append(time_s)
            if len(self._clocks) > MAX_TIMES:
                del self._clocks[1::2], self._times[1::2]

    def of(self, clock: int) -> float:
        """Returns the first recorded time at or after a use."""
        return self._times[min(bisect_left(self._clocks, clock), len(self._times) - 1)]


class EngineWatch:
    """Takes snapshots. Their times count from its creation. Their random ``epoch`` shows that numbers of
    another engine process have another meaning.

    ``steps``: the last steps, to which the engine appends. The engine calls ``note_use`` once
    ``time.perf_counter()`` has reached ``notes_use_at``.
    """

    def __init__(self, scheduler: Scheduler, model: str) -> None:
        self._scheduler = scheduler
        self._model = model
        self._began_s = time.perf_counter()
        self._epoch = secrets.randbits(53)
        self.steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self.notes_use_at = 0.0
        self._times = UseTimes()
        # The nodes of earlier snapshots that are still in the cache.
        self._shown: WeakValueDictionary[int, Node] = WeakValueDictionary()

    def note_use(self, now: float) -> None:
        """Records the cache's clock at the time ``now``."""
        self._times.note(self._scheduler.memory.cache.clock, now - self._began_s)
        self.notes_use_at = now + TIMES_EVERY_S

    def stats(self, ticket: int, step_times: Sequence[BucketCounts], num_unready: int) -> EngineStats:
        """Returns the counters and gauges of the engine.

        Args:
            ticket: the ticket of the query.
            step_times: the durations of the phases of steps.
            num_unready: the requests that wait for their grammar.
        """
        scheduler, media = self._scheduler, self._scheduler.media
        memory, counters = scheduler.memory, scheduler.counters
        of_media: dict[str, Any] = {}
        if media is not None:
            of_media = {
                "media_encoded": media.num_encoded,
                "media_evicted": media.num_evicted,
                "media_feature_bytes": media.feature_bytes,
                "media_pixel_bytes": media.pixel_bytes,
            }
        return EngineStats(
            ticket=ticket,
            model=self._model,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            cached_output_tokens=counters.cached_output_tokens,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            forced_tokens=counters.forced_tokens,
            evicted_tokens=counters.evicted_tokens,
            preemptions=counters.preemptions,
            free_slots=memory.slots.num_free,
            cached_slots=memory.cache.num_cached,
            in_use_slots=memory.num_in_use,
            total_slots=memory.slots.total,
            running=len(scheduler.running),
            waiting=scheduler.waiting.num_waiting + num_unready,
            peak_resident_bytes=_peak_resident_bytes(),
            step_times=deepcopy(step_times),  # another thread reads it while this one counts
            **of_media,
        )

    def snapshot(
        self, asked: SnapshotRequest, requests: Iterable[Request], stats: EngineStats
    ) -> EngineSnapshot:
        """Returns the part that the tenant of the query (None: all tenants) may see."""
        began_s, cpu_began_s = time.perf_counter(), time.thread_time()
        now_s = began_s - self._began_s
        cache = self._scheduler.memory.cache
        self._times.note(cache.clock, now_s, every_s=0.0)
        nodes = recent_nodes(cache, asked.max_nodes, asked.tenant) if asked.max_nodes else []
        self._shown.update([(node.number, node) for node in nodes])
        tenants: dict[str, int] = {}
        time_of = self._times.of
        rows: list[TreeRow] = []
        for node in nodes:
            owner = str(node.account.owner)
            parent, num_tokens = node.parent, len(node.slots)
            rows.append(
                (
                    node.number,
                    0 if parent is None else parent.number,
                    num_tokens,
                    num_tokens - node.num_prompt,
                    node.locks,
                    node.keeps,
                    time_of(node.last_access),
                    tenants.setdefault(owner, len(tenants)),
                )
            )
        return EngineSnapshot(
            ticket=asked.ticket,
            epoch=self._epoch,
            time_s=now_s,
            # Only if all tenants are visible: a step may have requests of all of them.
            steps=[] if asked.tenant is not None else [s for s in self.steps if s.number > asked.steps_after],
            requests=self._rows(asked.tenant, requests, began_s),
            nodes=rows,
            tenants=[*tenants],
            num_nodes=sum(account.num_nodes for account in cache.accounts(asked.tenant)),
            stats=stats,
            took_s=time.thread_time() - cpu_began_s,
        )

    def peek(self, asked: PeekRequest) -> NodeTokens | Failed:
        """Returns the first tokens of a node of an earlier snapshot."""
        node = self._shown.get(asked.node)
        if node is None or node.parent is None:
            return Failed(asked.ticket, BadArgument.code, "the node is no longer in the cache")
        if node.account.owner != asked.tenant:
            return Failed(asked.ticket, NotAuthorized.code, "the node belongs to another tenant")
        ids = np.frombuffer(node.run[: MAX_PEEK_TOKENS * TOKEN_BYTES], np.int32).tolist()
        return NodeTokens(asked.ticket, ids, len(node.slots))

    def _rows(self, tenant: str | None, requests: Iterable[Request], now_s: float) -> list[RequestRow]:
        """Returns running requests, then waiting ones."""
        waiting = (one for one in requests if one.status is Status.WAITING)
        visible = (
            one
            for one in chain(self._scheduler.running.values(), waiting)
            if tenant is None or one.tenant == tenant
        )
        return [
            (
                one.id,
                one.tenant,
                one.origin.label,
                "running" if one.status is Status.RUNNING else "waiting",
                one.num_prompt,
                one.num_cached,
                one.num_computed,
                one.num_generated,
                now_s - one.received_s,
                None,
            )
            for one in islice(visible, MAX_REQUESTS)
        ]


def _peak_resident_bytes() -> int:
    """Returns the largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
