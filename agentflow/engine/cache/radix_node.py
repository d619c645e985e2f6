"""The nodes of the radix cache's trees, what a match in them is, and which tokens are evicted first.

Each owner has an account: how much it has cached, and its evictable leaves in a heap with lazy deletion. A
leaf that is used, locked, extended or removed leaves an old entry behind, which is dropped when it comes up,
or when old entries are most of the heap. Between owners tokens are taken where most is cached: eviction
lowers the owners with the most cached tokens for their weight to one level (max-min fairness), so that an
owner below it loses nothing to the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.cache.token_run import TokenRun

TokenArray: TypeAlias = NDArray[np.int32]
SlotArray: TypeAlias = NDArray[np.int32]


class Node:
    """One edge of the tree: ``run`` and the ``slots`` of its tokens, below ``parent``.

    ``num_prompt``: of the tokens, so many at the front were part of a prompt when they were first computed;
    the others were generated. ``account``: of its owner. ``keeps``: how many live states end here.
    ``moved_to``: of a removed node, its parent then.
    """

    __slots__ = (
        "account",
        "children",
        "extra_key",
        "keeps",
        "last_access",
        "locks",
        "moved_to",
        "num_prompt",
        "parent",
        "run",
        "slots",
    )

    def __init__(
        self, run: TokenRun, slots: SlotArray, parent: Node | None, last_access: int, account: Account
    ) -> None:
        self.account = account
        self.run = run
        self.slots = slots
        self.parent = parent
        self.children: dict[TokenRun, Node] = {}  # by their first token
        self.extra_key: Hashable = None  # of a root
        self.num_prompt = len(slots)
        self.locks = 0
        self.keeps = 0
        self.last_access = last_access
        self.moved_to: Node | None = None

    @property
    def is_evictable(self) -> bool:
        return self.locks == 0 and not self.children and self.parent is not None


class PrefixMatch(NamedTuple):
    """A matched prefix: its last node (to lock or keep), its length in tokens, and how many of them
    were generated rather than prompts when they were first computed."""

    node: Node
    num_tokens: int
    num_output: int = 0


_Entry = tuple[bool, int, int, Node]  # is it kept, its last access, a tie-break, the leaf


class EvictionQueue:
    """``num_leaves``: evictable leaves there are, as the cache counts them."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._pushes = 0
        self.num_leaves = 0

    def __len__(self) -> int:
        """Entries, old ones too."""
        return len(self._entries)

    def push(self, node: Node) -> None:
        """The node is an evictable leaf, and its rank may have changed."""
        self._pushes += 1
        heapq.heappush(self._entries, (node.keeps > 0, node.last_access, self._pushes, node))
        if len(self._entries) > 64 + 4 * self.num_leaves:
            # Mostly old entries: keep one for each leaf. Amortised over the pushes that made them.
            live = {id(entry[3]): entry for entry in self._entries if _is_current(entry)}
            self._entries = list(live.values())
            heapq.heapify(self._entries)

    def pop(self) -> Node | None:
        """The leaf of the least rank, or None where no leaf can be evicted."""
        while self._entries:
            entry = heapq.heappop(self._entries)
            if _is_current(entry):
                return entry[3]
        return None

    def nodes(self) -> set[Node]:
        """All leaves in the queue; for checks."""
        return {entry[3] for entry in self._entries if _is_current(entry)}


def _is_current(entry: _Entry) -> bool:
    is_kept, last_access, _, node = entry
    return node.last_access == last_access and node.is_evictable and (node.keeps > 0) == is_kept


IDLE_WEIGHT = 1e-6
"""What is left of the weight of an owner that did not use the cache for long."""


class Account:
    """What one owner has in the cache. ``num_cached`` and ``num_locked``: tokens. ``weight``: of its claim,
    against other owners. ``last_used``: tokens that had entered the cache when the owner last looked
    there."""

    def __init__(self, owner: Hashable) -> None:
        self.owner = owner
        self.leaves = EvictionQueue()
        self.num_cached = 0
        self.num_locked = 0
        self.weight = 1.0
        self.last_used = 0

    @property
    def num_evictable(self) -> int:
        """Tokens that could be evicted now."""
        return self.num_cached - self.num_locked


def shared_out(count: int, claims: Sequence[tuple[int, int, float]]) -> list[int]:
    """How many tokens each owner gives so that ``count`` go together, at most all that are evictable.
    ``claims``: (cached, evictable, weight) of each. What is left of those that give stands at one level of
    tokens for each weight, to a token, and no owner below that level gives any."""
    count = min(count, sum(evictable for _, evictable, _ in claims))
    low, high = 0.0, max((cached / weight for cached, _, weight in claims), default=0.0)

    def given(level: float) -> list[int]:
        return [min(e, max(0, int(cached - level * weight))) for cached, e, weight in claims]

    for _ in range(60):
        level = (low + high) / 2
        if sum(given(level)) < count:
            high = level
        else:
            low = level
    amounts = given(high)
    missing = count - sum(amounts)
    # What is missing to the level where it jumps: a token of each, those with the most left first.
    by_level = sorted(range(len(claims)), key=lambda i: (amounts[i] - claims[i][0]) / claims[i][2])
    while missing > 0:
        for index in by_level:
            if missing and amounts[index] < claims[index][1]:
                amounts[index] += 1
                missing -= 1
    return amounts
