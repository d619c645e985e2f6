"""A prompt that is cached for another adapter, or under another salt, has that reason for its miss."""

from __future__ import annotations

import numpy as np
from support.engine.requests import request_of

from agentflow.engine.request import CacheKey, Request
from agentflow.engine.scheduling.kv_memory import KVMemory
from agentflow.protocol.sampling import SamplingParams


def request(number: int, identity: CacheKey) -> Request:
    tokens, params = np.arange(1000, dtype=np.int32), SamplingParams()
    salt, adapter = str(identity.salt), identity.adapter
    return request_of(number, tokens, 8, params, tenant=identity.tenant, salt=salt, adapter=adapter)


def test_the_reason_is_the_part_of_the_identity_that_differs():
    memory = KVMemory(num_slots=4000, max_context=2000, max_running=2, use_cache=True)
    first = request(1, CacheKey("ann", "a"))
    memory.attach(first, memory.match(first))
    memory.table.slots[first.req_row, :1000] = memory.allocate(1000)
    first.num_computed = 1000
    memory.detach(first)
    expected = {
        CacheKey("ann", "a"): "",
        CacheKey("ann", "b"): "salt",
        CacheKey("ann", "a", "lora"): "adapter",
        CacheKey("bob", "a"): "first_seen",
    }
    for number, (identity, reason) in enumerate(expected.items(), 2):
        one = request(number, identity)
        match = memory.match(one)
        assert memory.why_missed(one, match) == reason
        memory.cache.unlock(match)
    memory.check()
