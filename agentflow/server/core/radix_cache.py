"""The radix cache: which token sequences have their keys and values in the KV pool, and where.

A token-level radix tree (RadixAttention; Zheng et al., "SGLang", 2024, section 3). Each edge is a
run of token ids with the slot of each. Under one *extra key* (model, adapter, cache salt) hangs
one tree; two requests share KV only under the same extra key. A *lock* on a node keeps it and all
its ancestors; what is not locked can be evicted, leaf by leaf, least recently used first.

Costs: ``match`` and ``insert`` touch only the path; ``evict`` touches only the leaves it removes
(a heap with lazy deletion finds them).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.int32]
SlotArray = NDArray[np.int32]

_EMPTY: SlotArray = np.empty(0, dtype=np.int32)


class Node:
    """One edge of the tree: ``tokens`` and their ``slots`` (equal lengths), below ``parent``."""

    __slots__ = ("children", "extra_key", "last_access", "locks", "parent", "slots", "tokens")

    def __init__(self, tokens: TokenArray, slots: SlotArray, parent: Node | None, last_access: int) -> None:
        self.tokens = tokens
        self.slots = slots
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.extra_key: Hashable = None  # of a root
        self.locks = 0
        self.last_access = last_access

    @property
    def is_evictable(self) -> bool:
        return self.locks == 0 and not self.children and self.parent is not None


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A matched prefix: its last node (to lock), its length in tokens, the slots of those tokens."""

    node: Node
    num_tokens: int
    slots: SlotArray


def common_prefix_len(a: TokenArray, b: TokenArray) -> int:
    """Number of equal tokens at the front of both."""
    length = min(len(a), len(b))
    if length == 0 or a[0] != b[0]:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


class RadixCache:
    """The trees of one model. Slots enter by ``insert`` and leave by ``evict``; the caller owns the
    free list. ``num_cached``: tokens in the trees. ``num_locked``: those under a lock."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (last_access, tie-break, node)
        self._pushes = 0
        self._num_leaves = 0
        self.num_cached = 0
        self.num_locked = 0

    @property
    def num_evictable(self) -> int:
        """Tokens that ``evict`` could give back now."""
        return self.num_cached - self.num_locked

    def match(self, extra_key: Hashable, tokens: TokenArray) -> PrefixMatch:
        """The longest cached prefix of ``tokens``. Marks it as used now."""
        node = self._roots.get(extra_key) or self._new_root(extra_key)
        self._clock += 1
        found: list[SlotArray] = []
        done = 0
        while done < len(tokens):
            child = node.children.get(int(tokens[done]))
            if child is None:
                break
            length = common_prefix_len(child.tokens, tokens[done:])
            if length < len(child.tokens):
                child = self._split(child, length)
            self._touch(child)
            found.append(child.slots)
            done += length
            node = child
        return PrefixMatch(node, done, np.concatenate(found) if found else _EMPTY)

    def insert(self, extra_key: Hashable, tokens: TokenArray, slots: SlotArray) -> tuple[PrefixMatch, int]:
        """Makes ``tokens`` cached, in ``slots`` where they are not cached yet.

        Returns the match of the whole of ``tokens`` and how many of them had been cached already:
        the caller still owns ``slots`` of that many leading tokens (the match has the tree's own).
        """
        match = self.match(extra_key, tokens)
        existing = match.num_tokens
        if existing == len(tokens):
            return match, existing
        if match.node.parent is None:
            self._roots[extra_key] = match.node
        # Copies: the caller's arrays are buffers that go on changing.
        leaf = Node(tokens[existing:].copy(), slots[existing:].copy(), match.node, self._clock)
        was_leaf = match.node.is_evictable
        match.node.children[int(leaf.tokens[0])] = leaf
        self._num_leaves += 0 if was_leaf else 1
        self._push_leaf(leaf)
        self.num_cached += len(leaf.tokens)
        return PrefixMatch(leaf, len(tokens), np.concatenate((match.slots, leaf.slots))), existing

    def lock(self, match: PrefixMatch) -> None:
        """Protects the matched prefix from eviction until ``unlock``. Locks count."""
        node: Node | None = match.node
        while node is not None and node.parent is not None:
            if node.locks == 0:
                self.num_locked += len(node.tokens)
                self._num_leaves -= 0 if node.children else 1
            node.locks += 1
            node = node.parent

    def unlock(self, match: PrefixMatch) -> None:
        """Takes one lock off the matched prefix."""
        node: Node | None = match.node
        while node is not None and node.parent is not None:
            if node.locks <= 0:
                raise ValueError("unlock without lock")
            node.locks -= 1
            if node.locks == 0:
                self.num_locked -= len(node.tokens)
                if not node.children:
                    self._num_leaves += 1
                    self._push_leaf(node)
            node = node.parent

    def evict(self, count: int) -> SlotArray:
        """Removes least recently used leaves until at least ``count`` tokens went, or nothing
        evictable is left. Returns the slots that became free."""
        freed: list[SlotArray] = []
        num_freed = 0
        while num_freed < count and self._leaves:
            last_access, _, node = heapq.heappop(self._leaves)
            if not node.is_evictable or node.last_access != last_access:
                continue  # an old entry: the node was used, locked, extended or removed since
            freed.append(node.slots)
            num_freed += len(node.slots)
            self._remove(node)
        return np.concatenate(freed) if freed else _EMPTY

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[int(node.tokens[0])]
        self.num_cached -= len(node.tokens)
        self._num_leaves -= 1
        node.parent = None
        if parent.is_evictable:
            self._num_leaves += 1
            self._push_leaf(parent)
        elif parent.parent is None and not parent.children:
            # Extra keys come from clients: the empty tree of a key nobody uses must not stay.
            self._roots.pop(parent.extra_key, None)

    def _new_root(self, extra_key: Hashable) -> Node:
        root = Node(_EMPTY, _EMPTY, None, 0)
        root.extra_key = extra_key
        return root

    def _split(self, node: Node, length: int) -> Node:
        """Cuts ``node`` after ``length`` tokens; the upper part is new and is returned. The lower
        part stays the same object, so that locks held on it go on covering both."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.tokens[:length], node.slots[:length], parent, node.last_access)
        upper.locks = node.locks
        parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.slots = node.tokens[length:], node.slots[length:]
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _touch(self, node: Node) -> None:
        node.last_access = self._clock
        if node.is_evictable:
            self._push_leaf(node)

    def _push_leaf(self, node: Node) -> None:
        self._pushes += 1
        heapq.heappush(self._leaves, (node.last_access, self._pushes, node))
        if len(self._leaves) > 64 + 4 * self._num_leaves:
            # Mostly old entries: keep one for each leaf. Amortised over the pushes that made them.
            live = {
                id(n): (at, tie, n) for at, tie, n in self._leaves if n.is_evictable and n.last_access == at
            }
            self._leaves = list(live.values())
            heapq.heapify(self._leaves)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first. For checks and drawings; walks everything."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            if node.parent is not None:
                yield node
            pending.extend(node.children.values())

    def check(self) -> None:
        """Raises ``AssertionError`` where an invariant of the tree is broken. Walks everything."""
        num_cached = num_locked = num_leaves = 0
        entries = {(id(n), at) for at, _, n in self._leaves}
        seen: set[int] = set()
        for node in self.nodes():
            assert node.parent is not None
            assert len(node.tokens) == len(node.slots) > 0
            assert node.parent.children[int(node.tokens[0])] is node
            assert node.locks >= sum(child.locks for child in node.children.values())
            num_cached += len(node.tokens)
            num_locked += len(node.tokens) if node.locks else 0
            if node.is_evictable:
                num_leaves += 1
                assert (id(node), node.last_access) in entries, "an evictable leaf is not in the heap"
            seen.update(node.slots.tolist())
        assert len(seen) == num_cached == self.num_cached, "a slot is cached twice, or the count is off"
        assert num_locked == self.num_locked
        assert num_leaves == self._num_leaves
