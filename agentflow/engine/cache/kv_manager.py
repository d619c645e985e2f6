"""The KV pool as the scheduler sees it: who holds which slots.

A slot is free, or cached (in the radix cache), or held (a running request computed into it and it is
not in the cache yet): ``free + cached + held == total``. A running request locks what it uses of the cache.
Everything that a request holds comes back through ``detach``, and nowhere else.

The free list of the KV pool: which slots (one token's place each) are nobody's.

Slots are handed out in ascending runs where possible, because neighbouring slots are read faster.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.cache.liveness import Liveness
from agentflow.engine.cache.radix_cache import PrefixMatch, RadixCache, SlotArray, TokenRun
from agentflow.engine.request import CacheIdentity, Request


class KVSlots:
    """``total`` slots, numbered from 0. Double frees and foreign slots raise ``ValueError``."""

    def __init__(self, total: int) -> None:
        self.total = total
        # A stack whose top is at the end; descending at first, so that slots come out ascending.
        self._stack: SlotArray = np.arange(total - 1, -1, -1, dtype=np.int32)
        self._is_free: NDArray[np.bool_] = np.ones(total, dtype=np.bool_)
        self.num_free = total

    def allocate(self, count: int) -> SlotArray:
        """``count`` slots, or ``MemoryError`` when fewer are free (nothing is taken then)."""
        if count > self.num_free:
            raise MemoryError(f"{count} slots asked for, {self.num_free} free")
        taken = self._stack[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self._is_free[taken] = False
        return taken

    def release(self, slots: SlotArray) -> None:
        """Gives slots back."""
        count = len(slots)
        if count == 0:
            return
        if np.count_nonzero(self._is_free[slots]):
            raise ValueError("a slot was released that is free already")
        self._is_free[slots] = True
        self._stack[self.num_free : self.num_free + count] = slots[::-1]
        self.num_free += count

    def check(self) -> None:
        """Raises ``AssertionError`` where the free list does not hold each free slot once."""
        free = self._stack[: self.num_free]
        assert self._is_free[free].all()
        assert np.count_nonzero(self._is_free) == self.num_free, "a slot is in the free list twice"


OnCached = Callable[[CacheIdentity, TokenRun], None]
OnEvict = Callable[[CacheIdentity, Callable[[], TokenRun], int], None]

IDLE_AFTER_POOLS = 4
"""A tenant that does not look into the cache while so many times the pool is cached has
no claim to its part."""


def _tenant_of(identity: CacheIdentity) -> Hashable:
    return identity.tenant


class KVMemory:
    """Slots, page table, radix cache and liveness of one model. ``on_cached`` and ``on_evict``: called
    for every token run that enters the cache or leaves it."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_context: int,
        max_running: int,
        use_cache: bool,
        on_cached: OnCached,
        on_evict: OnEvict,
    ) -> None:
        self.slots = KVSlots(num_slots)
        self.cache = RadixCache(_tenant_of, IDLE_AFTER_POOLS * num_slots)
        self.liveness = Liveness(self.cache, num_slots)
        self.req_to_token: SlotArray = np.zeros((max_running, max_context), dtype=np.int32)
        self.num_computed = 0  # tokens, since the start
        self.num_evicted = 0
        self.num_steps = 0
        self._use_cache = use_cache
        self._on_cached = on_cached
        self._on_evict = on_evict
        self._free_rows = list(range(max_running - 1, -1, -1))

    @property
    def num_in_use(self) -> int:
        """Slots of running requests that are not in the cache."""
        return self.slots.total - self.slots.num_free - self.cache.num_cached

    @property
    def num_available(self) -> int:
        """Slots that could be had now, by eviction if need be."""
        return self.slots.num_free + self.cache.num_evictable

    @property
    def num_expected(self) -> int:
        """Cached tokens that a program's next request will need in a moment."""
        return self.liveness.num_expected(self.num_steps)

    @property
    def has_free_row(self) -> bool:
        """Whether the page table has room for one more running request."""
        return bool(self._free_rows)

    def peek(self, identity: CacheIdentity, run: TokenRun) -> int:
        """How much of the run is cached."""
        return self.cache.peek(identity, run) if self._use_cache else 0

    def match(self, request: Request) -> PrefixMatch:
        """What the request finds in the cache, locked for it: ``attach`` or ``cache.unlock`` it."""
        run = request.reusable_run() if self._use_cache else b""
        match = self.cache.match(request.extra_key, run)
        self.cache.lock(match)
        return match

    def attach(self, request: Request, match: PrefixMatch) -> None:
        """The request runs, on top of its match, which counts as computed already."""
        request.req_row = self._free_rows.pop()
        self.cache.write_slots(match, self.req_to_token[request.req_row])
        request.committed = match

    def allocate(self, num_rows: int) -> SlotArray:
        """Slots for all rows of a batch. Evicts what has to go, once for all of them; ``num_available`` must
        cover them."""
        missing = num_rows - self.slots.num_free
        if missing > 0:
            self.liveness.expire(self.num_computed)
            evicted = self.cache.evict(missing, self._on_evict)
            self.num_evicted += len(evicted)
            self.slots.release(evicted)
        return self.slots.allocate(num_rows)

    def give_back(self, request: Request, count: int) -> None:
        """So many slots after those computed: given to the request last, and not computed."""
        start = request.num_computed
        self.slots.release(self.req_to_token[request.req_row, start : start + count])

    def give_back_nodes(self, request: Request, count: int) -> None:
        """The same for so many nodes of its tree."""
        self.slots.release(request.node_slots[-count:])
        request.node_slots = request.node_slots[:-count]

    def release_nodes(self, request: Request) -> None:
        """The nodes of the request's tree need their slots no longer. May be repeated."""
        self.slots.release(request.node_slots)
        request.node_slots = request.node_slots[:0]

    def commit(self, request: Request) -> None:
        """Puts all computed tokens of a running request into the cache and locks them there."""
        known = request.committed
        assert known is not None
        count = request.num_computed
        if count == known.num_tokens or not self._use_cache:
            return
        row = self.req_to_token[request.req_row]
        run = request.run(count)
        match, existing = self.cache.extend(
            known, request.extra_key, run, row[:count], num_prompt=request.num_prompt
        )
        if existing > known.num_tokens:  # somebody else was faster
            self.slots.release(row[known.num_tokens : existing])
            self.cache.write_slots(match, row)
        self.cache.move_lock(known, match)
        self.cache.weigh(request.tenant, request.weight)
        request.committed = match
        self._on_cached(request.extra_key, run)

    def roll_back(self, request: Request, count: int) -> None:
        """Only the first ``count`` computed tokens of a running request stay: what of the others it holds is
        free, and what of them is cached stays cached, for others."""
        known = request.committed
        assert known is not None
        row = self.req_to_token[request.req_row]
        held_from = max(count, known.num_tokens)
        if held_from < request.num_computed:
            self.slots.release(row[held_from : request.num_computed])
        if count < known.num_tokens:
            match = self.cache.match(request.extra_key, request.run(count))
            assert match.num_tokens == count
            self.cache.lock(match)
            self.cache.unlock(known)
            request.committed = match
        request.num_computed = count

    def detach(self, request: Request) -> None:
        """The request runs no longer: what it computed stays cached, the rest is free."""
        self.commit(request)
        self.release_nodes(request)
        assert request.committed is not None
        if request.state is not None and self._use_cache:
            self.liveness.refresh(
                request.state, request.committed, num_computed=self.num_computed, step=self.num_steps
            )
        self.cache.unlock(request.committed)
        held_from = request.committed.num_tokens
        if held_from < request.num_computed:
            row = self.req_to_token[request.req_row]
            self.slots.release(row[held_from : request.num_computed])
        request.committed = None
        request.num_computed = request.num_nodes_computed = 0
        self._free_rows.append(request.req_row)
        request.req_row = -1

    def redo_tokens(self, request: Request) -> int:
        """What a running request alone holds: if it gave way, so much would become free, and might
        have to be computed again."""
        assert request.committed is not None
        alone = request.num_computed - request.committed.num_tokens + len(request.node_slots)
        node = request.committed.node
        while node.parent is not None and node.locks == 1:
            alone += len(node.slots)
            node = node.parent
        return alone

    def check(self) -> None:
        """Raises ``AssertionError`` unless nothing is held or locked, as it must be when idle."""
        assert self.num_in_use == 0, f"{self.num_in_use} slots are held by nobody"
        assert self.cache.num_locked == 0, f"{self.cache.num_locked} cached tokens are locked by nobody"
        assert len(self._free_rows) == len(self.req_to_token)
        self.slots.check()
        self.cache.check()
