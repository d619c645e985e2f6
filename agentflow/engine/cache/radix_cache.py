"""The radix cache: which token sequences have their keys and values in the KV pool, and in which slots.

A token-level radix tree (RadixAttention; Zheng et al., "SGLang", 2024, section 3). Each node is an edge: a
run of token ids with the slot of each. There is one tree for each *cache key* (tenant, salt and adapter), and
requests share KV only within a tree. A *lock* on a node protects it and all its ancestors from eviction.

Eviction frees tokens from the ends of unlocked leaves, and no more of them than needed, except inside a
medium. ``nodes`` has the order of the owners (tenants) and of the leaves.

Costs: ``match``, ``peek`` and ``extend`` touch only one path. ``evict`` touches the owners that lose tokens,
and the leaves that it shortens or removes, found in heaps with lazy deletion.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

import numpy as np

from agentflow.engine.cache.blocks import BlocksStored, NodeBlocks, OnBlocks, num_blocks
from agentflow.engine.cache.evicted_blocks import (
    HASHED_BLOCK_TOKENS,
    EvictedBlocks,
    block_hash,
    block_hashes,
    hashes_in,
    last_hash,
    next_end,
)
from agentflow.engine.cache.nodes import (
    NO_CHILDREN,
    NO_SLOTS,
    Account,
    Holding,
    Holdings,
    Node,
    PrefixMatch,
    SlotArray,
)
from agentflow.engine.cache.token_run import TOKEN_BYTES, TokenRun, common_prefix_len, prefix_end

MAX_RECENT = 8192

OnEvict = Callable[[Any, Callable[[], TokenRun], int], None]
"""Called for each leaf that loses tokens, with its cache key, a function that returns all tokens from the
root to the leaf's former end, and how many of these are still cached."""
MakeRoom = Callable[[Any], bool]
"""Called with a leaf that open states need, before it loses tokens. Returns whether its owner needs fewer
tokens now; another leaf is then chosen."""


class RadixCache:
    """The trees of one model. Slots enter by ``extend`` and leave by ``evict``; the caller has the free list.

    Args:
        owner_of: Returns the owner of a cache key.
        idle_after: An owner that does not use the cache while this many tokens enter it loses its claim to a
            part; 0: never.
        model: The model's identity.
        on_blocks: Called with blocks that enter and leave; the first blocks follow
            ``blocks.root_digest(model, cache_key)``.
    """

    def __init__(
        self,
        owner_of: Callable[[Any], Hashable] = lambda _: None,
        idle_after: int = 0,
        *,
        model: str = "",
        on_blocks: OnBlocks | None = None,
    ) -> None:
        self._reported = None if on_blocks is None else NodeBlocks(model, on_blocks)
        self._roots: dict[Hashable, Node] = {}
        self._accounts: dict[Hashable, Account] = {}
        self._holdings = Holdings(idle_after)
        self._owner_of = owner_of
        self._num_made = 0
        self._evicted = EvictedBlocks()
        self.clock = 0
        """The number of uses so far; ``last_access`` of a node is the number of its last use."""
        self.recent: OrderedDict[Node, None] = OrderedDict()
        """The nodes where the last ``MAX_RECENT`` used prefixes end, the least recent first."""
        self.num_cached = 0
        """Tokens in the trees."""
        self.num_locked = 0
        """Tokens in the trees that are locked."""
        self.on_split: Callable[[Node, Node], None] | None = None
        """Called with a node that was split, which now is the lower part, and the new node of the upper
        part."""

    def match(self, cache_key: Hashable, run: TokenRun, *, lock: bool = False) -> PrefixMatch:
        """The longest cached prefix of ``run``. Marks it as used now. ``lock``: also locks it."""
        self.clock += 1
        found = self._walk(PrefixMatch(self._root(cache_key), 0), run)
        if lock:
            self.move_lock(_NOTHING, found)
        return found

    def peek(self, cache_key: Hashable, run: TokenRun) -> int:
        """Length of the longest cached prefix of ``run``. Changes nothing, not even the time of its last
        use."""
        node = self._roots.get(cache_key)
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

    def find_block(self, match: PrefixMatch, cache_key: Hashable, tokens: TokenRun) -> tuple[bool, Hashable]:
        """Returns whether a block was cached in the tree and evicted, and the cache key of another tree of
        the same owner in which it is cached, or None.

        Args:
            match: The longest cached prefix of a sequence.
            cache_key: Its tree.
            tokens: The tokens of the block that ends at ``next_end(match.num_tokens)``, of which some are not
                cached.
        """
        block = block_hash(last_hash(match.node), tokens)
        account = self._accounts.get(self._owner_of(cache_key))
        trees = None if account is None else account.hashed_blocks.get(block)
        return self._evicted.has(cache_key, block), next(iter(trees)) if trees else None

    def extend(
        self,
        match: PrefixMatch,
        cache_key: Hashable,
        run: TokenRun,
        slots: SlotArray,
        *,
        num_prompt: int | None = None,
    ) -> tuple[PrefixMatch, int]:
        """Puts a run into the cache.

        Args:
            match: A prefix of the run that is locked, or empty.
            cache_key: Its tree.
            run: The tokens.
            slots: Their slots.
            num_prompt: Tokens from this index on count as generated; None: no token does.

        Returns:
            The match of all of ``run``, and how many of its tokens were cached already. The caller still owns
            the ``slots`` of these tokens; ``write_slots`` has the tree's slots for them.
        """
        self.clock += 1
        if match.node.parent is None:
            match = PrefixMatch(self._root(cache_key), 0)  # the former root may be gone
        if match.node.children or match.node.parent is None:
            found = self._walk(match, run)
        else:
            self._used(match.node)
            found = match
        existing, end = found.num_tokens, len(run) // TOKEN_BYTES
        if existing == end:
            return found, existing
        if found.node.parent is None:
            self._roots[cache_key] = found.node
            found.node.account.roots[found.node] = None
        new_prompt = end - existing if num_prompt is None else max(0, min(num_prompt, end) - existing)
        num_output = found.num_output + end - existing - new_prompt
        node = found.node
        before = last_hash(node) if existing // HASHED_BLOCK_TOKENS < end // HASHED_BLOCK_TOKENS else None
        # Locked only by the caller, without children, states or a mark: nothing else refers to its end.
        ends_here = node.keeps or node.marked_until
        can_grow = node is match.node and node.locks == 1 and not node.children and not ends_here
        if can_grow and (new_prompt == 0 or node.num_prompt == len(node.slots)):
            self._grow(node, run, slots, existing, new_prompt)
        else:
            node = self._add_leaf(node, run, slots, existing, new_prompt)
        if before is not None:
            first = existing // HASHED_BLOCK_TOKENS * HASHED_BLOCK_TOKENS * TOKEN_BYTES
            for block in block_hashes(before, run[first:]):
                node.account.hashed_blocks.setdefault(block, {})[cache_key] = None
                node.last_hash = block
        if self._reported is not None:
            self._reported.stored(node, cache_key, run, existing)
        return PrefixMatch(node, end, num_output), existing

    def write_slots(self, match: PrefixMatch, row: SlotArray) -> None:
        """Writes the slots of the matched tokens to the front of ``row``, in order."""
        node, end = match.node, match.num_tokens
        while node.parent is not None:
            start = end - len(node.slots)
            row[start:end] = node.slots
            node, end = node.parent, start

    def lock(self, match: PrefixMatch) -> None:
        """Protects the matched prefix from eviction until ``unlock``. Locks count."""
        self.move_lock(_NOTHING, match)

    def move_lock(self, old: PrefixMatch, new: PrefixMatch) -> None:
        """Moves a lock from ``old`` to ``new``, which continues it."""
        node = new.node
        while node.parent is not None and node is not old.node:
            if node.locks == 0:
                self.num_locked += len(node.slots)
                node.account.num_locked += len(node.slots)
                node.account.num_held += 0 if node.needs else len(node.slots)
                node.account.leaves.num_leaves -= 0 if node.children else 1
            node.locks += 1
            node = node.parent

    def unlock(self, match: PrefixMatch) -> None:
        """Removes one lock from the matched prefix, and marks it as used now."""
        node = match.node
        self.clock = clock = self.clock + 1
        self._used(node)
        while node.parent is not None:
            if node.locks <= 0:
                raise ValueError("unlock without lock")
            node.locks -= 1
            node.last_access = clock
            if node.locks == 0:
                self.num_locked -= len(node.slots)
                node.account.num_locked -= len(node.slots)
                node.account.num_held -= 0 if node.needs else len(node.slots)
                if not node.children:
                    node.account.leaves.num_leaves += 1
                    node.account.leaves.push(node)
            node = node.parent

    def keep(self, match: PrefixMatch, returns: float = 0.0) -> None:
        """An open state ends here: the prefix is evicted after tokens that no open state needs. Not a lock.
        Calls are counted, and parts of the match may have been evicted since. ``returns``: when the state is
        expected to continue; of kept leaves, the one that continues last is evicted first. If several states
        end at a node, the earliest time counts until none of them is left."""
        node = match.node.present
        _keep(node, 1, returns)
        self._requeue(node)
        while node.parent is not None:
            node.account.num_held += 0 if node.needs or node.locks else len(node.slots)
            node.needs += 1
            node = node.parent

    def unkeep(self, match: PrefixMatch) -> None:
        """Undoes one ``keep``, even if parts of the match have been evicted since."""
        node = match.node.present
        node.keeps -= 1
        self._requeue(node)
        while node.parent is not None:
            node.needs -= 1
            node.account.num_held -= 0 if node.needs or node.locks else len(node.slots)
            node = node.parent

    def mark(self, node: Node, until: float) -> Node | None:
        """Keeps the prefix that ends at ``node``, because a client asks for it until the time ``until`` (0:
        no client asks any more). A marked prefix is evicted after unmarked tokens, and before tokens that
        open states need. The latest time counts. Returns the last node that is left of the prefix, or None
        if all of it was evicted."""
        node = node.present
        if node.parent is None:
            return None
        node.marked_until = max(node.marked_until, until) if until else 0.0
        self._requeue(node)
        return node

    def supersede(self, match: PrefixMatch) -> None:
        """The matched prefix will not be used again: the part of its end that no other prefix needs is
        evicted before all other tokens of its owner. It becomes ordinary cache again when it is used."""
        node = match.node.present
        num_own = 0  # children of the node on the path to the prefix's end
        while node.parent is not None and not node.locks and not node.needs and not node.marked_until:
            if len(node.children) > num_own:
                return  # other prefixes need the node
            node.last_access = 0
            if not num_own:
                node.account.leaves.push(node)
            num_own = 1
            node = node.parent

    def weigh(self, owner: Hashable, weight: float) -> None:
        """Sets an owner's weight against other owners. Ignored if it has nothing cached."""
        account = self._accounts.get(owner)
        if account is not None:
            account.weight = weight
            self._holdings.update(account)

    def room_for(self, owner: Hashable) -> int:
        """Returns the number of tokens that eviction would give the owner before it takes tokens that an open
        state of the owner needs. Counts the owner's tokens, and the tokens that the owner with the most for
        its weight has above it."""
        account = self._accounts.get(owner)
        unneeded = 0 if account is None else account.num_cached - account.num_held
        return unneeded + self._holdings.excess_over(account)

    def evict(
        self, count: int, on_evict: OnEvict | None = None, make_room: MakeRoom | None = None
    ) -> SlotArray:
        """Removes ``count`` tokens, or all evictable ones if they are fewer. May remove more, because no
        prefix ends inside a medium whose tokens attend to each other. Returns the slots of the tokens."""
        freed: list[SlotArray] = []
        all_locked: list[Holding] = []
        while count > 0 and (holding := self._holdings.pop()) is not None:
            amount = min(count, holding.num_evictable, self._holdings.excess(holding))
            account = self._accounts[holding.owner]
            count -= amount
            while amount > 0:
                node = account.leaves.pop()
                assert node is not None
                if node.keeps and make_room is not None and make_room(node):
                    account.leaves.push(node)
                    continue
                size = len(node.slots)
                num_kept = prefix_end(node.run, size - amount) if size > amount else 0
                amount -= size - num_kept
                freed.append(node.slots[num_kept:] if num_kept else node.slots)
                if on_evict is not None:
                    self._report(node, num_kept, on_evict)
                if next_end(node.start + num_kept) <= node.start + size:
                    self._note_evicted(node, num_kept)
                if self._reported is not None:
                    self._reported.removed(node, num_kept)
                if num_kept:
                    self._shorten(node, num_kept)
                else:
                    self._remove(node)
            if holding.num_evictable:
                self._holdings.update(holding)
            else:
                all_locked.append(holding)
        for holding in all_locked:
            self._holdings.update(holding)
        return freed[0] if len(freed) == 1 else np.concatenate(freed) if freed else NO_SLOTS

    def stored_blocks(self) -> Iterator[BlocksStored]:
        """Reports all blocks that are cached, parents first, for a reader that has missed reports."""
        return iter(()) if self._reported is None else self._reported.all_stored(self._roots)

    def accounts(self, owner: Hashable = None) -> Collection[Account]:
        """The account of the owner, if it has cached tokens; for None, the accounts of all owners."""
        if owner is None:
            return self._accounts.values()
        account = self._accounts.get(owner)
        return () if account is None else (account,)

    def _walk(self, match: PrefixMatch, run: TokenRun) -> PrefixMatch:
        """Follows ``run`` from ``match`` as far as it is cached. Splits the last node where it ends."""
        node, num_output = match.node, match.num_output
        done, size, clock = match.num_tokens * TOKEN_BYTES, len(run), self.clock
        while done < size:
            child = node.children.get(run[done : done + TOKEN_BYTES])
            if child is None:
                break
            piece = run[done : done + len(child.run)]
            if piece != child.run:
                child = self._split(child, common_prefix_len(piece, child.run))
            child.last_access = clock
            if not child.children and not child.locks:
                child.account.leaves.push(child)
            num_output += len(child.slots) - child.num_prompt
            done += len(child.run)
            node = child
        self._used(node)
        return PrefixMatch(node, done // TOKEN_BYTES, num_output)

    def _used(self, node: Node) -> None:
        """A used prefix ends at ``node``."""
        if node.parent is not None:
            recent = self.recent
            recent[node] = None
            recent.move_to_end(node)
            if len(recent) > MAX_RECENT:
                recent.popitem(last=False)

    def _add(self, node: Node) -> None:
        """Counts a new node."""
        self._num_made += 1
        node.number = self._num_made
        node.account.num_nodes += 1

    def _requeue(self, node: Node) -> None:
        if node.is_evictable:
            node.account.leaves.push(node)

    def _root(self, cache_key: Hashable) -> Node:
        root = self._roots.get(cache_key)
        if root is None:  # registered with its first child only, because clients choose the keys
            owner = self._owner_of(cache_key)
            root = Node(b"", NO_SLOTS, None, 0, 0, self._accounts.get(owner) or Account(owner))
            root.cache_key, root.last_hash = cache_key, 0
        self._holdings.used(root.account)
        return root

    def _grow(self, node: Node, run: TokenRun, slots: SlotArray, start: int, new_prompt: int) -> None:
        account, num_new = node.account, len(slots) - start
        node.run += run[start * TOKEN_BYTES :]
        node.slots = np.concatenate((node.slots, slots[start:]))
        node.num_prompt += new_prompt
        node.last_access = self.clock
        account.num_locked += num_new
        account.num_held += num_new
        self.num_locked += num_new
        self.num_cached += num_new
        self._holdings.entered(account, num_new)

    def _add_leaf(self, parent: Node, run: TokenRun, slots: SlotArray, start: int, new_prompt: int) -> Node:
        # A copy: the caller's slots are a buffer that changes later.
        new = run[start * TOKEN_BYTES :]
        leaf = Node(new, slots[start:].copy(), parent, start, self.clock, parent.account)
        leaf.num_prompt = new_prompt
        self._add(leaf)
        self._used(leaf)
        was_leaf = parent.is_evictable
        _add_child(parent, leaf)
        leaf.account.leaves.num_leaves += 0 if was_leaf else 1
        leaf.account.leaves.push(leaf)
        self._accounts[leaf.account.owner] = leaf.account
        self.num_cached += len(leaf.slots)
        self._holdings.entered(leaf.account, len(leaf.slots))
        return leaf

    def _left(self, account: Account, num_tokens: int) -> None:
        self._holdings.evicted(account, num_tokens)
        self.num_cached -= num_tokens
        if not account.num_cached:
            del self._accounts[account.owner]

    def _shorten(self, node: Node, length: int) -> None:
        """Truncates a leaf. Its ``keeps`` and its mark stay with the rest."""
        self._left(node.account, len(node.slots) - length)
        node.account.num_held -= len(node.slots) - length if node.needs else 0
        node.last_hash = None
        node.run, node.slots = node.run[: length * TOKEN_BYTES], node.slots[:length]
        node.num_prompt = min(node.num_prompt, length)
        node.account.leaves.push(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.run[:TOKEN_BYTES]]
        account = node.account
        account.num_nodes -= 1
        account.num_held -= len(node.slots) if node.needs else 0
        self.recent.pop(node, None)
        self._left(account, len(node.slots))
        account.leaves.num_leaves -= 1
        if node.keeps:
            _keep(parent, node.keeps, node.returns)  # an open state still needs the rest of its prefix
        if parent.parent is not None:
            parent.marked_until = max(parent.marked_until, node.marked_until)
        node.parent, node.moved_to = None, parent
        node.run, node.slots = b"", NO_SLOTS  # states that ended here may refer to it for long
        if parent.is_evictable:
            account.leaves.num_leaves += 1
            account.leaves.push(parent)
        elif parent.parent is None and not parent.children:
            # Clients choose the cache keys: empty trees must not accumulate.
            self._roots.pop(parent.cache_key, None)
            account.roots.pop(parent, None)

    def _split(self, node: Node, length: int) -> Node:
        """Splits ``node`` after ``length`` tokens and returns the upper part, which is new. The lower part
        stays the same object, so that locks on it still cover both."""
        parent = node.parent
        assert parent is not None
        end = length * TOKEN_BYTES
        upper = Node(node.run[:end], node.slots[:length], parent, node.start, node.last_access, node.account)
        self._add(upper)
        num_above = num_blocks(node, length)
        upper.digests, node.digests = node.digests[:num_above], node.digests[num_above:]
        node.start += length
        upper.locks, upper.num_prompt = node.locks, min(node.num_prompt, length)
        upper.needs = node.needs
        _add_child(parent, upper)
        node.run, node.slots = node.run[end:], node.slots[length:]
        node.num_prompt -= upper.num_prompt
        node.parent = upper
        _add_child(upper, node)
        if self.on_split is not None:
            self.on_split(node, upper)
        return upper

    def _report(self, node: Node, num_kept: int, on_evict: OnEvict) -> None:
        """Calls ``on_evict``. The tokens up to the leaf are joined only if it asks for them."""
        runs = [node.run]
        start, above = 0, node.parent
        while above is not None and above.parent is not None:
            runs.append(above.run)
            start += len(above.slots)
            above = above.parent
        assert above is not None
        on_evict(above.cache_key, lambda: b"".join(reversed(runs)), start + num_kept)

    def _note_evicted(self, node: Node, num_kept: int) -> None:
        """Remembers the hashed blocks of a leaf that end after its first ``num_kept`` tokens, which are
        evicted."""
        above = node.parent
        assert above is not None
        num_before = (node.start + num_kept) // HASHED_BLOCK_TOKENS - node.start // HASHED_BLOCK_TOKENS
        hashes = hashes_in(node, last_hash(above))[num_before:]
        while above.parent is not None:
            above = above.parent
        self._evicted.add(above.cache_key, hashes)
        for block in hashes:
            trees = node.account.hashed_blocks[block]
            del trees[above.cache_key]
            if not trees:
                del node.account.hashed_blocks[block]

    def nodes(self) -> Iterator[Node]:
        """All nodes except the roots, parents first. Slow; for checks."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            if node.parent is not None:
                yield node
            pending.extend(node.children.values())

    def check(self) -> None:
        """For tests. ``AssertionError`` if an invariant of the trees is broken."""
        num_cached: Counter[Hashable] = Counter()
        num_locked: Counter[Hashable] = Counter()
        num_held: Counter[Hashable] = Counter()
        blocks: dict[Hashable, Counter[int]] = {owner: Counter() for owner in self._accounts}
        num_leaves: Counter[Hashable] = Counter()
        queued = {node for account in self._accounts.values() for node in account.leaves.nodes()}
        seen: set[int] = set()
        for node in self.nodes():
            owner = node.account.owner
            assert node.account is self._accounts[owner]
            assert node.parent is not None
            assert len(node.run) == len(node.slots) * TOKEN_BYTES > 0
            assert node.start == node.parent.start + len(node.parent.slots)
            assert node.parent.children[node.run[:TOKEN_BYTES]] is node
            assert node.locks >= sum(child.locks for child in node.children.values())
            assert node.needs == node.keeps + sum(child.needs for child in node.children.values())
            assert node.needs >= node.keeps >= 0
            num_held[owner] += len(node.slots) if node.locks or node.needs else 0
            num_cached[owner] += len(node.slots)
            blocks[owner].update(hashes_in(node, last_hash(node.parent)))
            num_locked[owner] += len(node.slots) if node.locks else 0
            if node.is_evictable:
                num_leaves[owner] += 1
                assert node in queued, "an evictable leaf is not in the queue"
            seen.update(node.slots.tolist())
        assert len(seen) == num_cached.total() == self.num_cached, (
            "a slot is cached twice, or the count is off"
        )
        assert num_locked.total() == self.num_locked
        assert num_cached.keys() == self._accounts.keys()
        for owner, account in self._accounts.items():
            assert account.num_cached == num_cached[owner]
            assert account.num_locked == num_locked[owner]
            assert account.num_held == num_held[owner]
            assert {block: len(trees) for block, trees in account.hashed_blocks.items()} == blocks[owner]
            assert account.leaves.num_leaves == num_leaves[owner]
            assert account.num_nodes == sum(node.account is account for node in self.nodes())
            assert set(account.roots) == {root for root in self._roots.values() if root.account is account}
        assert all(node.parent is not None for node in self.recent)


def _add_child(parent: Node, child: Node) -> None:
    if parent.children is NO_CHILDREN:
        parent.children = {}
    parent.children[child.run[:TOKEN_BYTES]] = child


def _keep(node: Node, num_states: int, returns: float) -> None:
    """More open states end at the node, and continue at ``returns`` or later."""
    node.returns = min(node.returns, returns) if node.keeps else returns
    node.keeps += num_states


# The match of an empty prefix.
_NOTHING = PrefixMatch(Node(b"", NO_SLOTS, None, 0, 0, Account(None)), 0)
