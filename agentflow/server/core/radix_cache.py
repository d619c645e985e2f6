"""The radix cache: which token sequences have their keys and values in the KV pool, and where.

A token-level radix tree (RadixAttention; Zheng et al., "SGLang", 2024, section 3). Each edge is a
run of token ids with the slot of each. Under one *extra key* (model, adapter, tenant and salt)
hangs one tree; two requests share KV only under the same extra key. A *lock* on a node keeps it
and all its ancestors. What is not locked can be evicted leaf by leaf: first what no live state
still needs (``keep``), and of these the least recently used.

Costs: ``match``, ``peek`` and ``extend`` touch only the path; ``evict`` touches only the leaves it
removes (a heap with lazy deletion finds them). Token runs are held as ``bytes`` (four per token),
which compare and hash in well under a microsecond where arrays take several.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np

from agentflow.server.core.eviction_queue import EvictionQueue
from agentflow.server.core.radix_node import Node, PrefixMatch, SlotArray
from agentflow.server.core.token_run import TOKEN_BYTES, TokenRun, common_prefix_len

_EMPTY: SlotArray = np.empty(0, dtype=np.int32)


_NOTHING = PrefixMatch(Node(b"", _EMPTY, None, 0), 0)

OnEvict = Callable[[Any, TokenRun, int], None]
"""Called for each evicted node: its extra key, all tokens from the root to its end, and how many of
them are still cached."""


class RadixCache:
    """The trees of one model. Slots enter by ``extend`` and leave by ``evict``; the caller owns the
    free list. ``num_cached``: tokens in the trees. ``num_locked``: those under a lock."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self._leaves = EvictionQueue()
        self.num_cached = 0
        self.num_locked = 0

    @property
    def num_evictable(self) -> int:
        """Tokens that ``evict`` could give back now."""
        return self.num_cached - self.num_locked

    def match(self, extra_key: Hashable, run: TokenRun) -> PrefixMatch:
        """The longest cached prefix of ``run``. Marks it as used now."""
        self._clock += 1
        return self._walk(PrefixMatch(self._root(extra_key), 0), run)

    def peek(self, extra_key: Hashable, run: TokenRun) -> int:
        """Length of the longest cached prefix of ``run``. Changes nothing, not even its age."""
        node = self._roots.get(extra_key)
        done, size = 0, len(run)  # in bytes
        while node is not None and done < size:
            child = node.children.get(run[done : done + TOKEN_BYTES])
            if child is None:
                break
            piece = run[done : done + len(child.run)]
            if piece != child.run:
                return done // TOKEN_BYTES + common_prefix_len(piece, child.run)
            done += len(piece)
            node = child
        return done // TOKEN_BYTES

    def extend(
        self,
        match: PrefixMatch,
        extra_key: Hashable,
        run: TokenRun,
        slots: SlotArray,
        *,
        num_prompt: int | None = None,
    ) -> tuple[PrefixMatch, int]:
        """Makes ``run`` cached, in ``slots`` where it is not cached yet, from ``match`` on, which is
        a prefix of it and locked (or empty). Tokens from index ``num_prompt`` on count as generated.

        Returns the match of the whole of ``run`` and how many of its tokens had been cached already:
        the caller still owns ``slots`` of that many leading tokens (``write_slots`` gives the tree's own).
        """
        self._clock += 1
        if match.node.parent is None:
            match = PrefixMatch(self._root(extra_key), 0)  # the one it was found in may be gone
        found = self._walk(match, run)
        existing, end = found.num_tokens, len(run) // TOKEN_BYTES
        if existing == end:
            return found, existing
        if found.node.parent is None:
            self._roots[extra_key] = found.node
        new_prompt = end - existing if num_prompt is None else max(0, min(num_prompt, end) - existing)
        num_output = found.num_output + end - existing - new_prompt
        node = found.node
        # Locked by the caller alone and without children: nobody else knows where this edge ends.
        can_grow = node is match.node and node.locks == 1 and not node.children
        if can_grow and (new_prompt == 0 or node.num_prompt == len(node.slots)):
            self._grow(node, run, slots, existing, new_prompt)
        else:
            node = self._add_leaf(node, run, slots, existing, new_prompt)
        return PrefixMatch(node, end, num_output), existing

    def write_slots(self, match: PrefixMatch, row: SlotArray) -> None:
        """Writes the slots of the matched tokens to the front of ``row``, in their order."""
        node, end = match.node, match.num_tokens
        while node.parent is not None:
            start = end - len(node.slots)
            row[start:end] = node.slots
            node, end = node.parent, start

    def lock(self, match: PrefixMatch) -> None:
        """Protects the matched prefix from eviction until ``unlock``. Locks count."""
        self.move_lock(_NOTHING, match)

    def move_lock(self, old: PrefixMatch, new: PrefixMatch) -> None:
        """Makes the lock on ``old`` one on ``new``, which goes on where ``old`` ends."""
        node = new.node
        while node.parent is not None and node is not old.node:
            if node.locks == 0:
                self.num_locked += len(node.slots)
                self._leaves.num_leaves -= 0 if node.children else 1
            node.locks += 1
            node = node.parent

    def unlock(self, match: PrefixMatch) -> None:
        """Takes one lock off the matched prefix, and marks it as used now."""
        node = match.node
        self._clock = clock = self._clock + 1
        while node.parent is not None:
            if node.locks <= 0:
                raise ValueError("unlock without lock")
            node.locks -= 1
            node.last_access = clock
            if node.locks == 0:
                self.num_locked -= len(node.slots)
                if not node.children:
                    self._leaves.num_leaves += 1
                    self._leaves.push(node)
            node = node.parent

    def keep(self, match: PrefixMatch) -> None:
        """A live state ends here: evict this after what no state needs. Not a lock. Keeps count."""
        match.node.keeps += 1
        self._requeue(match.node)

    def unkeep(self, match: PrefixMatch) -> None:
        """Takes back one ``keep``, whatever of the match has been evicted since."""
        node = match.node
        while node.moved_to is not None:
            node = node.moved_to
        node.keeps -= 1
        self._requeue(node)

    def evict(self, count: int, on_evict: OnEvict | None = None) -> SlotArray:
        """Removes leaves, least rank first, until at least ``count`` tokens went, or nothing
        evictable is left. Returns the slots that became free."""
        freed: list[SlotArray] = []
        num_freed = 0
        while num_freed < count and (node := self._leaves.pop()) is not None:
            freed.append(node.slots)
            num_freed += len(node.slots)
            if on_evict is not None:
                extra_key, run = self._path(node)
                on_evict(extra_key, run, (len(run) - len(node.run)) // TOKEN_BYTES)
            self._remove(node)
        return freed[0] if len(freed) == 1 else np.concatenate(freed) if freed else _EMPTY

    def _walk(self, match: PrefixMatch, run: TokenRun) -> PrefixMatch:
        """Goes on from ``match`` as far as ``run`` is cached, cutting the last node to fit."""
        node, num_output = match.node, match.num_output
        done, size, clock = match.num_tokens * TOKEN_BYTES, len(run), self._clock
        while done < size:
            child = node.children.get(run[done : done + TOKEN_BYTES])
            if child is None:
                break
            piece = run[done : done + len(child.run)]
            if piece != child.run:
                child = self._split(child, common_prefix_len(piece, child.run))
            child.last_access = clock
            if not child.children and not child.locks:
                self._leaves.push(child)
            num_output += len(child.slots) - child.num_prompt
            done += len(child.run)
            node = child
        return PrefixMatch(node, done // TOKEN_BYTES, num_output)

    def _root(self, extra_key: Hashable) -> Node:
        root = self._roots.get(extra_key)
        if root is None:  # registered when it gets a child: keys come from clients
            root = Node(b"", _EMPTY, None, 0)
            root.extra_key = extra_key
        return root

    def _grow(self, node: Node, run: TokenRun, slots: SlotArray, start: int, new_prompt: int) -> None:
        node.run += run[start * TOKEN_BYTES :]
        node.slots = np.concatenate((node.slots, slots[start:]))
        node.num_prompt += new_prompt
        node.last_access = self._clock
        self.num_cached += len(slots) - start
        self.num_locked += len(slots) - start

    def _add_leaf(self, parent: Node, run: TokenRun, slots: SlotArray, start: int, new_prompt: int) -> Node:
        # A copy: the caller's slots are a buffer that goes on changing.
        leaf = Node(run[start * TOKEN_BYTES :], slots[start:].copy(), parent, self._clock)
        leaf.num_prompt = new_prompt
        was_leaf = parent.is_evictable
        parent.children[leaf.run[:TOKEN_BYTES]] = leaf
        self._leaves.num_leaves += 0 if was_leaf else 1
        self._leaves.push(leaf)
        self.num_cached += len(leaf.slots)
        return leaf

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.run[:TOKEN_BYTES]]
        self.num_cached -= len(node.slots)
        self._leaves.num_leaves -= 1
        parent.keeps += node.keeps  # what a live state needs of the rest is still needed
        node.parent, node.moved_to = None, parent
        if parent.is_evictable:
            self._leaves.num_leaves += 1
            self._leaves.push(parent)
        elif parent.parent is None and not parent.children:
            # Extra keys come from clients: the empty tree of a key nobody uses must not stay.
            self._roots.pop(parent.extra_key, None)

    def _split(self, node: Node, length: int) -> Node:
        """Cuts ``node`` after ``length`` tokens; the upper part is new and is returned. The lower
        part stays the same object, so that locks held on it go on covering both."""
        parent = node.parent
        assert parent is not None
        cut = length * TOKEN_BYTES
        upper = Node(node.run[:cut], node.slots[:length], parent, node.last_access)
        upper.locks, upper.num_prompt = node.locks, min(node.num_prompt, length)
        parent.children[upper.run[:TOKEN_BYTES]] = upper
        node.run, node.slots = node.run[cut:], node.slots[length:]
        node.num_prompt -= upper.num_prompt
        node.parent = upper
        upper.children[node.run[:TOKEN_BYTES]] = node
        return upper

    def _path(self, node: Node) -> tuple[Hashable, TokenRun]:
        runs = []
        while node.parent is not None:
            runs.append(node.run)
            node = node.parent
        return node.extra_key, b"".join(reversed(runs))

    def _requeue(self, node: Node) -> None:
        if node.is_evictable:
            self._leaves.push(node)

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
        queued = self._leaves.nodes()
        seen: set[int] = set()
        for node in self.nodes():
            assert node.parent is not None
            assert len(node.run) == len(node.slots) * TOKEN_BYTES > 0
            assert node.parent.children[node.run[:TOKEN_BYTES]] is node
            assert node.locks >= sum(child.locks for child in node.children.values())
            assert node.keeps >= 0
            num_cached += len(node.slots)
            num_locked += len(node.slots) if node.locks else 0
            if node.is_evictable:
                num_leaves += 1
                assert node in queued, "an evictable leaf is not in the queue"
            seen.update(node.slots.tolist())
        assert len(seen) == num_cached == self.num_cached, "a slot is cached twice, or the count is off"
        assert num_locked == self.num_locked
        assert num_leaves == self._leaves.num_leaves
