"""The KV pool as the scheduler sees it: which slots are free, cached, or in use.

A slot holds the key and value of one token. It is free, cached (in the radix cache), or in use (a running
request computed into it, and it is not cached yet): ``free + cached + in use == total``. A running request
locks the cached prefix that it builds on, and ``detach`` returns everything that it uses.

The KV of open states of programs is evicted last, and kept from new requests while the next op is due
(``Liveness``). The prefixes that clients asked to keep (``PrefixMarks``) are evicted before it and after all
other tokens.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Hashable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import NO_CHANGES, IntArray, SlotChanges
from agentflow.engine.cache.blocks import OnBlocks
from agentflow.engine.cache.evicted_blocks import HASHED_BLOCK_TOKENS, next_end
from agentflow.engine.cache.nodes import Node, PrefixMatch, SlotArray
from agentflow.engine.cache.prefix_marks import PrefixMarks
from agentflow.engine.cache.prefix_readers import PrefixReaders
from agentflow.engine.cache.radix_cache import MakeRoom, RadixCache
from agentflow.engine.cache.token_run import TOKEN_BYTES, TokenRun, prefix_end
from agentflow.engine.request import CacheKey, Request
from agentflow.engine.scheduling.liveness import Liveness, NewLiveness, program_key

logger = logging.getLogger(__name__)

OnCached = Callable[[CacheKey, TokenRun], None]
OnEvict = Callable[[CacheKey, Callable[[], TokenRun], int], None]

IDLE_AFTER_POOLS = 4
"""A tenant that does not use the cache while tokens for this many pools enter it loses its claim to a
part."""


_numbers: Final = itertools.count()
"""Numbers of changes, unique among all tables: a copy of one table must not apply the changes of another."""


def _find_tenant(cache_key: CacheKey) -> Hashable:
    return cache_key.tenant


class KVMemory:
    """Slots, ``req_to_token``, radix cache and liveness of one model. Nothing else writes to the table.

    Args:
        num_slots: The size of the pool.
        max_context: The longest sequence in tokens.
        max_running: Rows of ``req_to_token``, which is ``table``.
        use_cache: Whether requests read and fill the cache.
        model: The model's identity, which the digests of blocks contain.
        on_blocks: As in ``RadixCache``.
        clock: Seconds.
        new_liveness: Makes ``liveness``; None: ``Liveness``.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_context: int,
        max_running: int,
        use_cache: bool,
        model: str = "",
        on_blocks: OnBlocks | None = None,
        clock: Callable[[], float] = time.monotonic,
        new_liveness: NewLiveness | None = None,
    ) -> None:
        self.slots = KVSlots(num_slots)
        self.cache = RadixCache(_find_tenant, IDLE_AFTER_POOLS * num_slots, model=model, on_blocks=on_blocks)
        self.liveness = (new_liveness or Liveness)(self.cache, num_slots, clock)
        self.marks = PrefixMarks(self.cache)
        self._clock = clock
        self.table = SlotTable(max_running, min(max_context, num_slots))
        self.readers = PrefixReaders(self.cache)
        self.num_computed = 0  # tokens, since the start
        self.num_evicted = 0
        self.num_steps = 0
        self.make_room: MakeRoom | None = None  # as in ``RadixCache.evict``
        self.on_cached: OnCached | None = None  # called for every token run that enters the cache
        self.on_evict: OnEvict | None = None  # called for every token run that leaves it
        self._use_cache = use_cache
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._alone: Request | None = None  # the only running request, which is not in ``readers``

    @property
    def num_in_use(self) -> int:
        """Slots in use: of running requests, and not cached."""
        return self.slots.total - self.slots.num_free - self.cache.num_cached

    @property
    def num_available(self) -> int:
        """Slots that ``allocate`` could provide now, by eviction if needed."""
        return self.slots.num_free + self.cache.num_cached - self.cache.num_locked

    @property
    def num_expected(self) -> int:
        """Cached tokens that the next requests of open states are expected to need."""
        return self.liveness.num_expected(self.num_steps)

    def room_for(self, tenant: str) -> int:
        """Slots that are free or that the tenant gets before its open states lose tokens."""
        return self.slots.num_free + self.cache.room_for(tenant)

    def peek(self, cache_key: CacheKey, run: TokenRun) -> int:
        """How many tokens of the run are cached."""
        return self.cache.peek(cache_key, run) if self._use_cache else 0

    def match(self, request: Request) -> PrefixMatch:
        """The longest cached prefix of the request, locked. ``attach`` it or ``cache.unlock`` it."""
        run = request.reusable_run() if self._use_cache else b""
        return self.cache.match(request.cache_key, run, lock=True)

    def why_missed(self, request: Request, match: PrefixMatch) -> str:
        """Returns why the prompt's tokens after ``match`` are not cached, by the first block of
        ``HASHED_BLOCK_TOKENS`` among them; empty for fewer tokens, for tokens that are scored, and without a
        cache."""
        num_cached = match.num_tokens
        num_wanted = min(request.num_reusable + 1, request.num_prompt)
        if not self._use_cache or num_wanted - num_cached < HASHED_BLOCK_TOKENS:
            return ""
        end = next_end(num_cached)
        block = request.run(end, end - HASHED_BLOCK_TOKENS)
        was_evicted, other = self.cache.find_block(match, request.cache_key, block)
        if was_evicted:
            return "evicted"
        if isinstance(other, CacheKey):
            return "salt" if other.adapter == request.adapter else "adapter"
        return request.origin.changed or "first_seen"

    def attach(self, request: Request, match: PrefixMatch) -> None:
        """The request starts to run after its match, whose tokens count as computed. If it never ran before,
        records why the rest of its prompt is not cached."""
        row = request.req_row = self._free_rows.pop()
        request.committed = match  # first, so that ``detach`` unlocks it after a fault
        self._read(request, match)
        self.cache.write_slots(match, self.table.row_to_write(row, 0, match.num_tokens))
        if not request.num_preemptions:
            request.num_cached = min(match.num_tokens, request.num_prompt)
            request.miss_reason = self.why_missed(request, match)

    def _read(self, request: Request, match: PrefixMatch) -> None:
        """The request reads a prefix from now on. While it runs alone, nothing is shared."""
        alone = self._alone
        if len(self._free_rows) + 1 == len(self.table.slots):
            self._alone = request
            return
        if alone is not None:
            assert alone.committed is not None
            self.readers.enter(alone.req_row, alone.committed)
            self._alone = None
        self.readers.enter(request.req_row, match)

    def allocate(self, num_tokens: int) -> SlotArray:
        """Slots for all tokens of a batch; evicts cached tokens if needed. ``num_available`` must suffice."""
        missing = num_tokens - self.slots.num_free
        if missing > 0:
            self.liveness.expire(self.num_computed)
            self.marks.expire(self._clock())
            reports: list[tuple[CacheKey, Callable[[], TokenRun], int]] = []
            make_room = None if self.make_room is None else self._make_room
            evicted = self.cache.evict(missing, lambda *report: reports.append(report), make_room)
            self.num_evicted += len(evicted)
            self.slots.release(evicted)  # before anything can fail
            if self.on_evict is not None:
                for report in reports:
                    self.on_evict(*report)
        return self.slots.allocate(num_tokens)

    def _make_room(self, leaf: Node) -> bool:
        assert self.make_room is not None
        try:
            return self.make_room(leaf)
        except Exception:  # the leaf loses its tokens, and is computed again later
            logger.exception("cannot make room")
            return False

    def withdraw_slots(self, request: Request, num_tokens: int, num_nodes: int) -> SlotArray:
        """Takes from the request the slots of its last ``num_tokens`` tokens and last ``num_nodes`` nodes,
        which were not computed. The caller frees them with ``slots.release``."""
        end = request.num_computed
        row = self.table.slots[request.req_row, end - num_tokens : end]
        request.num_computed = end - num_tokens
        if not num_nodes:
            return row.copy()
        slots = np.concatenate((row, request.node_slots[-num_nodes:]))
        request.node_slots = request.node_slots[:-num_nodes]
        request.num_nodes_computed -= num_nodes
        return slots

    def release_nodes(self, request: Request) -> None:
        """Frees the slots of all nodes of the request's tree. May be repeated."""
        self.slots.release(request.node_slots)
        request.node_slots = request.node_slots[:0]

    def commit(self, request: Request, count: int) -> None:
        """Puts the first ``count`` tokens of a running request, which are computed, into the cache,
        locked."""
        known = request.committed
        assert known is not None
        if count == known.num_tokens or not self._use_cache:
            return
        row = self.table.slots[request.req_row]
        run = request.run(count)
        match, existing = self.cache.extend(
            known, request.cache_key, run, row[:count], num_prompt=request.num_prompt
        )
        if existing > known.num_tokens:  # another request committed them first
            self.slots.release(row[known.num_tokens : existing])
            row = self.table.row_to_write(request.req_row, known.num_tokens, existing)
            self.cache.write_slots(match, row)
        self.cache.move_lock(known, match)
        if self._alone is not request:
            self.readers.move(request.req_row, known, match)
        request.committed = match
        if match.node.account.weight != request.origin.weight:
            self.cache.weigh(request.tenant, request.origin.weight)
        if self.on_cached is not None:
            self.on_cached(request.cache_key, run)

    def roll_back(self, request: Request, count: int) -> None:
        """Keeps only the first ``count`` computed tokens of a running request. The slots of the others become
        free, unless they are cached."""
        known = request.committed
        assert known is not None
        row = self.table.slots[request.req_row]
        first_uncached = max(count, known.num_tokens)
        if first_uncached < request.num_computed:
            self.slots.release(row[first_uncached : request.num_computed])
        if count < known.num_tokens:
            match = self.cache.match(request.cache_key, request.run(count), lock=True)
            assert match.num_tokens == count
            self.cache.unlock(known)
            if self._alone is not request:
                self.readers.leave(request.req_row, known)
                self.readers.enter(request.req_row, match)
            request.committed = match
        request.num_computed = count

    def detach(self, request: Request) -> None:
        """The request no longer runs and is in no batch. Its computed tokens stay cached; its other slots
        become free."""
        try:
            self.commit(request, request.num_computed)
            if self._use_cache:
                self._keep(request)
        except Exception:  # a request must be able to leave; its tokens are then computed again
            logger.exception("cannot cache the tokens of request %d", request.id)
        if request.tree is not None:
            self.release_nodes(request)
        assert request.committed is not None
        self.cache.unlock(request.committed)
        if self._alone is request:
            self._alone = None
        else:
            self.readers.leave(request.req_row, request.committed)
        first_uncached = request.committed.num_tokens
        if first_uncached < request.num_computed:
            row = self.table.slots[request.req_row]
            self.slots.release(row[first_uncached : request.num_computed])
        request.committed = None
        request.num_computed = request.num_nodes_computed = 0
        self._free_rows.append(request.req_row)
        request.req_row = -1

    def _keep(self, request: Request) -> None:
        """Keeps the request's cached tokens as long as its client and its state need them."""
        assert request.committed is not None
        origin = request.origin
        if origin.kept_prefixes:
            self._mark_prefixes(request)
        if origin.state:
            self.liveness.refresh(
                origin.state,
                request.committed,
                num_computed=self.num_computed,
                step=self.num_steps,
                is_ahead=origin.is_ahead,
                program=program_key(request),
                priority=origin.priority,
            )

    def _mark_prefixes(self, request: Request) -> None:
        """Keeps the prefixes that the client asked to keep, as far as the request has computed them."""
        assert request.committed is not None
        now = self._clock()
        for num_tokens, seconds in request.origin.kept_prefixes:
            if 0 < num_tokens <= request.committed.num_tokens and seconds > 0:
                run = request.run(num_tokens)
                match = self.cache.match(request.cache_key, run[: prefix_end(run, num_tokens) * TOKEN_BYTES])
                self.marks.mark(match.node, now + seconds)

    def redo_tokens(self, request: Request) -> int:
        """Slots that only this running request uses. Preempting it makes them available, and their tokens may
        have to be computed again."""
        assert request.committed is not None
        num_alone = request.num_computed - request.committed.num_tokens + len(request.node_slots)
        node = request.committed.node
        while node.parent is not None and node.locks == 1:
            num_alone += len(node.slots)
            node = node.parent
        return num_alone

    def check(self) -> None:
        """For tests. ``AssertionError`` if anything is in use or locked while no request runs."""
        assert self.num_in_use == 0, f"{self.num_in_use} slots are in use without a request"
        assert self.cache.num_locked == 0, f"{self.cache.num_locked} tokens are locked without a request"
        assert len(self._free_rows) == len(self.table.slots)
        self.slots.check()
        self.cache.check()
        self.readers.check()
        for node in self.cache.nodes():
            assert not self.slots.has_free(node.slots), "a cached slot is free"


class KVSlots:
    """The free list of ``total`` slots, numbered from 0. Hands out ascending runs where possible, because
    neighbouring slots are read faster. ``ValueError`` for a double free."""

    def __init__(self, total: int) -> None:
        self.total = total
        # A stack with its top at the end; initially descending, so that slots come out ascending.
        self._stack: SlotArray = np.arange(total - 1, -1, -1, dtype=np.int32)
        self._is_free: NDArray[np.bool_] = np.ones(total, dtype=np.bool_)
        self.num_free = total

    def allocate(self, count: int) -> SlotArray:
        """``count`` slots. ``MemoryError``, without effect, if fewer are free."""
        if count > self.num_free:
            raise MemoryError(f"{count} slots requested, {self.num_free} free")
        taken = self._stack[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self._is_free[taken] = False
        return taken

    def release(self, slots: SlotArray) -> None:
        """Frees slots."""
        count = len(slots)
        if count == 0:
            return
        if np.count_nonzero(self._is_free[slots]):
            raise ValueError("a released slot is already free")
        self._is_free[slots] = True
        self._stack[self.num_free : self.num_free + count] = slots[::-1]
        self.num_free += count

    def has_free(self, slots: SlotArray) -> bool:
        """Whether any of the slots is free."""
        return bool(self._is_free[slots].any())

    def check(self) -> None:
        """For tests. ``AssertionError`` unless the free list has each free slot once."""
        free = self._stack[: self.num_free]
        assert self._is_free[free].all()
        assert np.count_nonzero(self._is_free) == self.num_free, "a slot is in the free list twice"


class SlotTable:
    """The slots of running requests by position, ``req_to_token``, and their changes since the last batch.
    Copies of the table, such as the one on a GPU, get the changes with each batch.

    Args:
        num_rows: The most running requests.
        num_columns: The most tokens of a request.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.slots: SlotArray = np.zeros((num_rows, num_columns), dtype=np.int32)
        """[num_rows, num_columns]. Other modules read it."""
        self._written: dict[int, tuple[int, int]] = {}  # by row: changed columns, without tokens of batches
        self._number = NO_CHANGES  # of the last changes

    def row_to_write(self, row: int, first: int, end: int) -> SlotArray:
        """Returns a row, of which the caller writes the columns ``first`` to ``end`` (exclusive) before the
        next batch."""
        if first < end:
            known_first, known_end = self._written.get(row, (first, end))
            self._written[row] = min(first, known_first), max(end, known_end)
        columns: SlotArray = self.slots[row]
        return columns

    def write_tokens(self, rows: IntArray, columns: IntArray, slots: SlotArray) -> SlotChanges:
        """Writes the slots of a batch's tokens. Returns all changes since the last call; by their numbers, a
        copy notices that it has missed some."""
        self.slots[rows, columns] = slots
        if self._written:
            # Columns between two changes are unchanged; their slots are sent again.
            spans = [(row, *span) for row, span in self._written.items()]
            self._written.clear()
            lens = [end - first for _, first, end in spans]
            rows = np.concatenate((np.repeat([row for row, _, _ in spans], lens), rows))
            columns = np.concatenate((*(np.arange(first, end) for _, first, end in spans), columns))
            slots = np.concatenate((*(self.slots[row, first:end] for row, first, end in spans), slots))
        before, self._number = self._number, next(_numbers)
        return SlotChanges(self._number, before, rows, columns, slots)

    def ends_with(self, changes: SlotChanges) -> bool:
        """Whether nothing was written after these changes."""
        return self._number == changes.number and not self._written

    def replace_slots(self, changes: SlotChanges, slots: SlotArray) -> None:
        """Writes other slots of the tokens whose changes ``write_tokens`` returned last, also to these."""
        num_before = len(changes.slots) - len(slots)
        changes.slots[num_before:] = slots
        self.slots[changes.rows[num_before:], changes.columns[num_before:]] = slots
