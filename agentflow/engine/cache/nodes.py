"""The nodes of the radix trees, their owners (tenants), and the order in which they are evicted.

An owner's *level* is its number of cached tokens divided by its weight. Eviction takes tokens of the owner
with the highest level until it reaches the next level (max-min fairness), so that an owner below the others
loses nothing to them. It takes at least ``EVICTION_BATCH`` tokens of an owner that has them, so levels become
equal to within a batch. An owner that has not used the cache for long has almost no weight.

Among the leaves of an owner, unmarked ones are evicted first, least recently used first; then leaves that a
client marked (``prefix_marks``), in the same order; and last the leaves that open states need, in the reverse
order of when their states continue.

Both orders are heaps with lazy deletion: an eviction touches the owners that lose tokens, and their leaves,
however many there are.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.cache.token_run import TokenRun

SlotArray = NDArray[np.int32]

NO_SLOTS: SlotArray = np.empty(0, dtype=np.int32)
NO_CHILDREN: dict[TokenRun, Node] = {}
"""The children of every leaf: empty and shared, because most nodes are leaves."""
EVICTION_BATCH = 64
IDLE_WEIGHT = 1e-6
"""Factor of an owner's weight once it has not used the cache for long."""


class Node:
    """One edge of the tree: ``run`` and the ``slots`` of its tokens, below ``parent``."""

    __slots__ = (
        "__weakref__",
        "account",
        "cache_key",
        "children",
        "digests",
        "keeps",
        "last_access",
        "last_hash",
        "locks",
        "marked_until",
        "moved_to",
        "needs",
        "num_prompt",
        "number",
        "parent",
        "returns",
        "run",
        "slots",
        "start",
    )

    def __init__(
        self,
        run: TokenRun,
        slots: SlotArray,
        parent: Node | None,
        start: int,
        last_access: int,
        account: Account,
    ) -> None:
        self.account = account  # its owner's
        self.start = start  # tokens above it
        self.digests: Sequence[bytes] = ()  # of the reported blocks that end in it (``blocks``)
        self.run = run
        self.slots = slots
        self.parent = parent
        self.children = NO_CHILDREN  # by their first token
        self.cache_key: Hashable = None  # roots only
        self.num_prompt = len(slots)  # leading tokens that a prompt computed; the others were generated
        self.locks = 0
        self.keeps = 0  # open states that end here
        self.needs = 0  # open states that end here or below
        self.returns = 0.0  # with ``keeps``: when the first state that ends here is expected to continue
        self.marked_until = 0.0  # until then a client wants the prefix that ends here; 0: no client does
        self.last_access = last_access
        # Of the last hashed block (``evicted_blocks``) that ends in it or above; None: not computed.
        self.last_hash: int | None = None
        self.moved_to: Node | None = None  # a removed node's former parent
        self.number = 0  # identifies it; 0 for a root

    @property
    def is_evictable(self) -> bool:
        return self.locks == 0 and not self.children and self.parent is not None

    @property
    def present(self) -> Node:
        """The node itself or, if it was evicted, the last remaining node on the path to it."""
        node = self
        while node.moved_to is not None:
            node = node.moved_to
        return node

    @property
    def rank(self) -> int:
        """The rank of the prefix that ends here. 2: an open state needs it. 1: a client marked it."""
        if self.keeps:
            return 2
        return 1 if self.marked_until else 0


class PrefixMatch(NamedTuple):
    """A matched prefix."""

    node: Node  # where the prefix ends, to lock or keep
    num_tokens: int
    num_output: int = 0  # tokens of it that were generated when they were first computed


class Holding:
    """Tokens of one owner in the cache."""

    def __init__(self, owner: Hashable) -> None:
        self.owner = owner
        self.num_cached = 0
        self.num_locked = 0  # of the cached tokens
        self.weight = 1.0  # against other owners
        self.last_used = 0  # tokens that had entered the cache when the owner last used it
        self.is_idle = False  # it has not used the cache for long
        self.queued_level = 0.0  # its level in the heap; 0: not in the heap

    @property
    def num_evictable(self) -> int:
        """Tokens that could be evicted now."""
        return self.num_cached - self.num_locked

    @property
    def current_weight(self) -> float:
        """Its weight, which is almost zero while it is idle."""
        return self.weight * IDLE_WEIGHT if self.is_idle else self.weight

    @property
    def level(self) -> float:
        """Cached tokens divided by its weight."""
        return self.num_cached / (self.current_weight if self.is_idle else self.weight)


class Holdings:
    """All owners' holdings, by level. ``idle_after``: an owner that does not use the cache while this many
    tokens enter it is idle (0: never)."""

    def __init__(self, idle_after: int) -> None:
        self._idle_after = idle_after
        self._num_entered = 0
        self._in_use: OrderedDict[Holding, None] = OrderedDict()  # not idle, the least recently used first
        self._by_level: list[tuple[float, int, Holding]] = []  # heap of (-level, tie-break, holding)
        self._max_entries = 64
        self._ties = itertools.count()

    def used(self, holding: Holding) -> None:
        """The owner uses the cache."""
        holding.last_used = self._num_entered
        holding.is_idle = False
        if holding.num_cached:
            self._in_use[holding] = None
            self._in_use.move_to_end(holding)

    def entered(self, holding: Holding, num_tokens: int) -> None:
        """Tokens of the owner enter the cache."""
        holding.num_cached += num_tokens
        self._num_entered += num_tokens
        self.used(holding)
        self.update(holding)

    def evicted(self, holding: Holding, num_tokens: int) -> None:
        """Tokens of the owner, whose holding was popped, leave the cache."""
        holding.num_cached -= num_tokens
        if not holding.num_cached:
            self._in_use.pop(holding, None)

    def update(self, holding: Holding) -> None:
        """Queues the holding if its level rose. A level that fell is corrected when it is the highest."""
        level = holding.level
        if level > holding.queued_level:
            holding.queued_level = level
            heapq.heappush(self._by_level, (-level, next(self._ties), holding))
            if len(self._by_level) > self._max_entries:
                live = {entry[2]: entry for entry in self._by_level if entry[2].queued_level == -entry[0]}
                self._by_level = list(live.values())
                heapq.heapify(self._by_level)
                self._max_entries = 64 + 4 * len(live)

    def pop(self) -> Holding | None:
        """Removes and returns the holding with the highest level. ``update`` puts it back."""
        while self._in_use and self._idle_after:
            holding = next(iter(self._in_use))
            if self._num_entered - holding.last_used <= self._idle_after:
                break
            del self._in_use[holding]
            holding.is_idle = True
            self.update(holding)
        highest = self._highest()
        if highest is not None:
            heapq.heappop(self._by_level)
            highest.queued_level = 0.0
        return highest

    def excess(self, holding: Holding) -> int:
        """How many tokens to evict from the holding just popped: down to the next level, at least a batch."""
        highest = self._highest()
        kept = 0 if highest is None else int(highest.level * holding.current_weight)
        return max(EVICTION_BATCH, holding.num_cached - kept)

    def excess_over(self, holding: Holding | None) -> int:
        """How many evictable tokens the holding with the highest level has above the level of ``holding``; 0
        if it is ``holding`` itself."""
        highest = self._highest()
        if highest is None or highest is holding:
            return 0
        kept = 0 if holding is None else int(holding.level * highest.current_weight)
        return max(0, min(highest.num_evictable, highest.num_cached - kept))

    def _highest(self) -> Holding | None:
        """Removes old entries, and returns the holding at the top of the heap."""
        while self._by_level:
            key, _, holding = self._by_level[0]
            if holding.queued_level != -key:
                heapq.heappop(self._by_level)
            elif (level := holding.level) < holding.queued_level:
                holding.queued_level = level
                heapq.heapreplace(self._by_level, (-level, next(self._ties), holding))
            else:
                return holding
        return None


class Account(Holding):
    """The trees of one owner."""

    def __init__(self, owner: Hashable) -> None:
        super().__init__(owner)
        self.leaves = EvictionQueue()  # the leaves that could be evicted
        self.roots: dict[Node, None] = {}  # of its trees, the newest last
        self.num_nodes = 0
        # The cache keys of the trees that have a block, by its hash (``evicted_blocks``).
        self.hashed_blocks: dict[int, dict[Hashable, None]] = {}
        self.num_held = 0  # tokens that are locked or that open states need


# Rank, when its states continue (negated), last access, tie-break, leaf.
_Entry = tuple[int, float, int, int, Node]


class EvictionQueue:
    """One owner's evictable leaves, in a heap with lazy deletion: a leaf that is used, locked, extended or
    removed leaves an old entry behind. ``num_leaves``: number of evictable leaves, counted by the cache."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._pushes = 0
        self.num_leaves = 0

    def __len__(self) -> int:
        """Number of entries, old ones included."""
        return len(self._entries)

    def push(self, node: Node) -> None:
        """Adds an evictable leaf, or updates its rank."""
        self._pushes += 1
        returns = -node.returns if node.keeps else 0.0
        heapq.heappush(self._entries, (node.rank, returns, node.last_access, self._pushes, node))
        if len(self._entries) > 64 + 4 * self.num_leaves:
            # Mostly old entries: keep one for each leaf. The cost is amortized over pushes.
            live = {id(entry[-1]): entry for entry in self._entries if _is_current(entry)}
            self._entries = list(live.values())
            heapq.heapify(self._entries)

    def pop(self) -> Node | None:
        """Removes and returns the leaf to evict first, or None if there is none."""
        while self._entries:
            entry = heapq.heappop(self._entries)
            if _is_current(entry):
                return entry[-1]
        return None

    def nodes(self) -> set[Node]:
        """All leaves in the queue. For checks."""
        return {entry[-1] for entry in self._entries if _is_current(entry)}


def _is_current(entry: _Entry) -> bool:
    rank, returns, last_access, _, node = entry
    if node.last_access != last_access or not node.is_evictable or node.rank != rank:
        return False
    return not node.keeps or node.returns == -returns
