"""The number of the router's decisions per second of one core, without engines."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from agentflow.cluster.routing.devices import SharedDevices
from agentflow.cluster.routing.feed import Update
from agentflow.cluster.routing.load import EngineShape, RoutedRequest
from agentflow.cluster.routing.router import Router
from agentflow.engine.cache.blocks import (
    BLOCK_TOKENS,
    BlocksRemoved,
    BlocksStored,
    chain_digests,
    root_digest,
)
from benchmarks.engine.programs import GPU

NUM_REPLICAS = 64
NUM_PREFIXES, PREFIX, OWN = 256, 2048, 192
IN_PROGRESS = 16
"""Requests in progress on each replica."""
HELD = 48
"""Prompts whose end each replica has cached."""


def decide(num_decisions: int, seed: int = 0, *, is_shared: bool = False) -> tuple[list[float], float]:
    """Routes requests in a full cluster: each has a shared prefix and a unique part. Returns the processor
    seconds of each decision, and of the updates after it (first tokens, ends, and reports of blocks that
    enter and leave the caches) in total. ``is_shared``: another model has an engine on each device."""
    router = Router(EngineShape(GPU, 64, 200_000, 0.05), "m")
    if is_shared:
        shared = SharedDevices()
        shared.add_replicas(router.loads, [(str(replica),) for replica in range(NUM_REPLICAS)])
        for replica in range(NUM_REPLICAS):
            shared.set_load(shared.add((str(replica),)), 3600.0, 4.0)
    for replica in range(NUM_REPLICAS):
        router.add(replica)
    random = np.random.default_rng(seed)
    prefixes = [random.integers(0, 2**31 - 1, PREFIX, dtype=np.int32).tobytes() for _ in range(NUM_PREFIXES)]
    root = root_digest("m", "key")
    digests = [chain_digests(root, prefix) for prefix in prefixes]
    numbers = [0] * NUM_REPLICAS
    held: list[deque[list[bytes]]] = [deque() for _ in range(NUM_REPLICAS)]
    has_prefix: set[tuple[int, int]] = set()
    running: deque[tuple[RoutedRequest, int]] = deque()
    times: list[float] = []
    rest_s = 0.0
    for number in range(num_decisions + NUM_REPLICAS * IN_PROGRESS):
        which = int(random.integers(NUM_PREFIXES))
        own = random.integers(0, 2**31 - 1, OWN, dtype=np.int32).tobytes()
        call = RoutedRequest(number, "key", prefixes[which] + own, 0, program=number // 4)
        now_s = number * 1e-3
        start = time.thread_time()
        router.place([call], now_s)
        times.append(time.thread_time() - start)
        running.append((call, which))
        if len(running) <= NUM_REPLICAS * IN_PROGRESS:
            continue
        call, which = running.popleft()
        replica, prefix = call.replica, prefixes[which]
        changes: list[BlocksStored | BlocksRemoved] = []
        if (replica, which) not in has_prefix:
            has_prefix.add((replica, which))
            changes.append(BlocksStored("key", root, digests[which], prefix))
        own = call.run[len(prefix) :]
        last = chain_digests(digests[which][-1], own[: len(own) // (4 * BLOCK_TOKENS) * 4 * BLOCK_TOKENS])
        changes.append(BlocksStored("key", digests[which][-1], last, own))
        held[replica].append(last)
        if len(held[replica]) > HELD:
            changes.append(BlocksRemoved(held[replica].popleft()))
        numbers[replica] += 1
        update = Update(replica, 0, numbers[replica], changes)
        start = time.thread_time()
        router.started(call, now_s)
        assert router.receive(update)
        router.ended(call, 100, now_s)
        rest_s += time.thread_time() - start
    return times[-num_decisions:], rest_s
