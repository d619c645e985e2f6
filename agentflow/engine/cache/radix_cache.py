"""The radix cache: which token sequences have their keys and values in the KV pool, and where.

A token-level radix tree (RadixAttention; Zheng et al., "SGLang", 2024, section 3). Each edge is a
run of token ids with the slot of each. Under one *extra key* (model, adapter, tenant and salt)
hangs one tree; two requests share KV only under the same extra key. A *lock* on a node keeps it
and all its ancestors. What is not locked can be evicted from the ends of leaves, as many tokens as are
needed and no more: first of owners that hold most for their weight, of one owner first what no live state
still needs (``keep``), and of this the least recently used.

Costs: ``match``, ``peek`` and ``extend`` touch only the path; ``evict`` touches only the leaves it shortens
or removes (heaps with lazy deletion find them), and looks at each owner once. Token runs are held as
``bytes`` (four per token), which compare and hash in well under a microsecond where arrays take several.

The nodes of the radix cache's trees, what a match in them is, and which tokens are evicted first.

Each owner has an account: how much it has cached, and its evictable leaves in a heap with lazy deletion. A
leaf that is used, locked, extended or removed leaves an old entry behind, which is dropped when it comes up,
or when old entries are most of the heap. Between owners tokens are taken where most is cached: eviction
lowers the owners with the most cached tokens for their weight to one level (max-min fairness), so that an
owner below it loses nothing to the others.

Runs of token ids as ``bytes``, four for each token: as keys of trees they compare, slice and hash
faster than arrays.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenRun = bytes
TOKEN_BYTES = 4


def token_run(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> TokenRun:
    """The run of an int32 array."""
    return tokens.tobytes()


def common_prefix_len(a: TokenRun, b: TokenRun) -> int:
    """Number of equal tokens at the front of both."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // TOKEN_BYTES
    differs = np.frombuffer(a, np.int32, size // TOKEN_BYTES) != np.frombuffer(
        b, np.int32, size // TOKEN_BYTES
    )
    return int(differs.argmax())


def num_common_ids(old: list[int], new: list[int]) -> int:
    """The same for lists of ids, most often one of which goes on where the other ends."""
    if new[: len(old)] == old:
        return len(old)
    return next(
        (n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )


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


_EMPTY: SlotArray = np.empty(0, dtype=np.int32)


_NOTHING = PrefixMatch(Node(b"", _EMPTY, None, 0, Account(None)), 0)

OnEvict = Callable[[Any, Callable[[], TokenRun], int], None]
"""Called for each leaf that loses tokens: its extra key, what gives all tokens from the root to its old end,
and how many of these are still cached."""


class RadixCache:
    """The trees of one model. Slots enter by ``extend`` and leave by ``evict``; the caller owns the
    free list. ``num_cached``: tokens in the trees. ``num_locked``: those under a lock.

    ``owner_of``: whose an extra key is. ``idle_after``: an owner that does not look into the cache while so
    many tokens enter it has no claim to its part (0: it keeps it)."""

    def __init__(self, owner_of: Callable[[Any], Hashable] = lambda _: None, idle_after: int = 0) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._accounts: dict[Hashable, Account] = {}
        self._owner_of = owner_of
        self._idle_after = idle_after
        self._clock = 0
        self._num_entered = 0
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
            self._accounts[found.node.account.owner] = found.node.account
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
                node.account.num_locked += len(node.slots)
                node.account.leaves.num_leaves -= 0 if node.children else 1
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
                node.account.num_locked -= len(node.slots)
                if not node.children:
                    node.account.leaves.num_leaves += 1
                    node.account.leaves.push(node)
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

    def weigh(self, owner: Hashable, weight: float) -> None:
        """The weight of an owner's claim, against those of others. Ignored for one that has nothing
        cached."""
        account = self._accounts.get(owner)
        if account is not None:
            account.weight = weight

    def evict(self, count: int, on_evict: OnEvict | None = None) -> SlotArray:
        """Removes ``count`` tokens, or all that are evictable if these are fewer. Returns the slots that
        became free."""
        freed: list[SlotArray] = []
        accounts = [account for account in self._accounts.values() if account.num_evictable]
        if len(accounts) == 1:
            amounts = [min(count, accounts[0].num_evictable)]
        else:
            claims = [(a.num_cached, a.num_evictable, self._weight_of(a)) for a in accounts]
            amounts = shared_out(count, claims)
        for account, amount in zip(accounts, amounts, strict=True):
            while amount > 0:
                node = account.leaves.pop()
                assert node is not None
                num_kept = max(0, len(node.slots) - amount)
                amount -= len(node.slots) - num_kept
                freed.append(node.slots[num_kept:])
                if on_evict is not None:
                    self._report(node, num_kept, on_evict)
                if num_kept:
                    self._shorten(node, num_kept)
                else:
                    self._remove(node)
        return freed[0] if len(freed) == 1 else np.concatenate(freed) if freed else _EMPTY

    def _weight_of(self, account: Account) -> float:
        is_idle = 0 < self._idle_after < self._num_entered - account.last_used
        return account.weight * (IDLE_WEIGHT if is_idle else 1.0)

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
                child.account.leaves.push(child)
            num_output += len(child.slots) - child.num_prompt
            done += len(child.run)
            node = child
        return PrefixMatch(node, done // TOKEN_BYTES, num_output)

    def _root(self, extra_key: Hashable) -> Node:
        root = self._roots.get(extra_key)
        if root is None:  # registered when it gets a child, as its account is: keys come from clients
            owner = self._owner_of(extra_key)
            root = Node(b"", _EMPTY, None, 0, self._accounts.get(owner) or Account(owner))
            root.extra_key = extra_key
        root.account.last_used = self._num_entered
        return root

    def _grow(self, node: Node, run: TokenRun, slots: SlotArray, start: int, new_prompt: int) -> None:
        node.run += run[start * TOKEN_BYTES :]
        node.slots = np.concatenate((node.slots, slots[start:]))
        node.num_prompt += new_prompt
        node.last_access = self._clock
        node.account.num_locked += len(slots) - start
        self.num_locked += len(slots) - start
        self._entered(node.account, len(slots) - start)

    def _add_leaf(self, parent: Node, run: TokenRun, slots: SlotArray, start: int, new_prompt: int) -> Node:
        # A copy: the caller's slots are a buffer that goes on changing.
        leaf = Node(run[start * TOKEN_BYTES :], slots[start:].copy(), parent, self._clock, parent.account)
        leaf.num_prompt = new_prompt
        was_leaf = parent.is_evictable
        parent.children[leaf.run[:TOKEN_BYTES]] = leaf
        leaf.account.leaves.num_leaves += 0 if was_leaf else 1
        leaf.account.leaves.push(leaf)
        self._entered(leaf.account, len(leaf.slots))
        return leaf

    def _entered(self, account: Account, num_tokens: int) -> None:
        account.num_cached += num_tokens
        self.num_cached += num_tokens
        self._num_entered += num_tokens
        account.last_used = self._num_entered

    def _left(self, account: Account, num_tokens: int) -> None:
        account.num_cached -= num_tokens
        self.num_cached -= num_tokens
        if not account.num_cached:
            del self._accounts[account.owner]

    def _shorten(self, node: Node, length: int) -> None:
        """The leaf has only its first tokens from now on. What a live state needs of the rest is kept."""
        self._left(node.account, len(node.slots) - length)
        node.run, node.slots = node.run[: length * TOKEN_BYTES], node.slots[:length]
        node.num_prompt = min(node.num_prompt, length)
        node.account.leaves.push(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.run[:TOKEN_BYTES]]
        account = node.account
        self._left(account, len(node.slots))
        account.leaves.num_leaves -= 1
        parent.keeps += node.keeps  # what a live state needs of the rest is still needed
        node.parent, node.moved_to = None, parent
        if parent.is_evictable:
            account.leaves.num_leaves += 1
            account.leaves.push(parent)
        elif parent.parent is None and not parent.children:
            # Extra keys come from clients: the empty tree of a key nobody uses must not stay.
            self._roots.pop(parent.extra_key, None)

    def _split(self, node: Node, length: int) -> Node:
        """Cuts ``node`` after ``length`` tokens; the upper part is new and is returned. The lower
        part stays the same object, so that locks held on it go on covering both."""
        parent = node.parent
        assert parent is not None
        cut = length * TOKEN_BYTES
        upper = Node(node.run[:cut], node.slots[:length], parent, node.last_access, node.account)
        upper.locks, upper.num_prompt = node.locks, min(node.num_prompt, length)
        parent.children[upper.run[:TOKEN_BYTES]] = upper
        node.run, node.slots = node.run[cut:], node.slots[length:]
        node.num_prompt -= upper.num_prompt
        node.parent = upper
        upper.children[node.run[:TOKEN_BYTES]] = node
        return upper

    def _report(self, node: Node, num_kept: int, on_evict: OnEvict) -> None:
        """All tokens up to the leaf are put together only where ``on_evict`` asks for them."""
        runs = [node.run]
        start, above = 0, node.parent
        while above is not None and above.parent is not None:
            runs.append(above.run)
            start += len(above.slots)
            above = above.parent
        assert above is not None
        on_evict(above.extra_key, lambda: b"".join(reversed(runs)), start + num_kept)

    def _requeue(self, node: Node) -> None:
        if node.is_evictable:
            node.account.leaves.push(node)

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
        num_cached: Counter[Hashable] = Counter()
        num_locked: Counter[Hashable] = Counter()
        num_leaves: Counter[Hashable] = Counter()
        queued = {node for account in self._accounts.values() for node in account.leaves.nodes()}
        seen: set[int] = set()
        for node in self.nodes():
            owner = node.account.owner
            assert node.account is self._accounts[owner]
            assert node.parent is not None
            assert len(node.run) == len(node.slots) * TOKEN_BYTES > 0
            assert node.parent.children[node.run[:TOKEN_BYTES]] is node
            assert node.locks >= sum(child.locks for child in node.children.values())
            assert node.keeps >= 0
            num_cached[owner] += len(node.slots)
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
            assert account.leaves.num_leaves == num_leaves[owner]
