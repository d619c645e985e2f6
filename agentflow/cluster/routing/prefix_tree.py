"""Which tokens each replica holds: one token-level radix tree over all replicas.

An edge is a run of token ids. For each replica that holds a part of it, the edge knows where this part ends.
The cached part of a sequence is always a prefix, because caches lose leaves first. Two kinds of
holdings count:

- *reported*: blocks that entered the replica's cache and did not leave (``engine.cache.blocks``). A block is
  found by its digest, so a report of removed blocks needs no tokens.
- *in progress*: prompts of unfinished requests that were sent to the replica. It computes and locks them, so
  requests that share a prefix can follow them before any report comes.

Costs: ``match``, ``begin`` and ``end`` touch one path, ``store`` and ``remove`` the blocks that they are
called with and the edges that these blocks cover. An edge that is split or shortened costs its length and the
replicas that hold it, at most. Nothing depends on the size of the tree.

The tree is a guess: reports come late and can be lost. A wrong guess costs the time to compute a prefix
again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from agentflow.engine.cache.blocks import BLOCK_TOKENS, BlocksStored, root_digest
from agentflow.engine.cache.token_run import TOKEN_BYTES, TokenRun, common_prefix_len

ReplicaNumber: TypeAlias = int
POPULAR = 2


@dataclass(slots=True, eq=False)
class PromptKind:
    """Families that begin with the same tokens: how many there were, and requests that continued them, the
    latest at full weight (``request_families``)."""

    num_begun: float = 0.0
    num_continued: float = 0.0


@dataclass(slots=True, eq=False)
class RequestFamily:
    """A request and those that continue it (``request_families``)."""

    replica: ReplicaNumber  # where it began
    began_s: float
    num_expected: float  # requests that will probably continue it, besides those that have come
    kind: PromptKind = field(default_factory=PromptKind)


class Match(NamedTuple):
    """Which tokens of a prompt the replicas hold.

    - ``hits``: how many each replica holds. Replicas that hold none are missing.
    - ``num_popular``: tokens that at least ``POPULAR`` requests in progress share. A replica that computes
      them again will need them again.
    - ``family``: that the prompt continues: it begins with the whole prompt with which the family began.
    """

    hits: dict[ReplicaNumber, int]
    num_popular: int
    family: RequestFamily | None = None


class PrefixNode:
    """``run`` after ``start`` tokens, below ``parent``."""

    __slots__ = ("below", "children", "digests", "family", "held", "key", "parent", "run", "running", "start")

    def __init__(self, run: TokenRun, start: int, parent: PrefixNode | None) -> None:
        self.run = run
        self.start = start  # tokens above it
        self.parent = parent  # None: a root
        self.children: dict[TokenRun, PrefixNode] = {}  # by their first token
        self.digests: list[bytes] = []  # of the reported blocks that end in it
        self.held: dict[ReplicaNumber, int] = {}  # the end of each replica's reported part, from the root
        self.below: dict[ReplicaNumber, int] = {}  # how many children have a part that the replica reported
        self.running: dict[ReplicaNumber, int] = {}  # unfinished requests of which the prompt covers the edge
        self.key: Hashable = None  # roots only
        self.family: RequestFamily | None = None  # the prompt with which it began ends here

    @property
    def end(self) -> int:
        """Tokens up to its end."""
        return self.start + len(self.run) // TOKEN_BYTES


class PrefixTree:
    """The prefixes that the replicas of one model hold. ``model``: the identity in the digests of blocks."""

    def __init__(self, model: str = "") -> None:
        self._model = model
        self._roots: dict[Hashable, tuple[PrefixNode, bytes]] = {}  # with the first block's parent
        # For each reported block, an edge at or below the one in which it ends, and the tokens up to its end.
        self._blocks: dict[bytes, tuple[PrefixNode, int]] = {}
        self._edges: dict[ReplicaNumber, set[PrefixNode]] = {}  # with a part that the replica reported

    @property
    def num_blocks(self) -> int:
        """Reported blocks, each counted once."""
        return len(self._blocks)

    def match(self, key: Hashable, run: TokenRun) -> Match:
        """Which tokens of ``run`` the replicas hold."""
        hits: dict[ReplicaNumber, int] = {}
        num_popular = 0
        family: RequestFamily | None = None
        found = self._roots.get(key)
        if found is None:
            return Match(hits, 0)
        edge, done, size = found[0], 0, len(run)
        while done < size:
            child = edge.children.get(run[done : done + TOKEN_BYTES])
            if child is None:
                break
            if not run.startswith(child.run, done):
                end = done // TOKEN_BYTES + common_prefix_len(run[done : done + len(child.run)], child.run)
                for replica, held in child.held.items():
                    hits[replica] = min(held, end)
                if child.running:
                    hits.update(dict.fromkeys(child.running, end))
                    if sum(child.running.values()) >= POPULAR:
                        num_popular = end
                break
            done += len(child.run)
            family = child.family or family
            hits.update(child.held)
            if child.running:
                hits.update(dict.fromkeys(child.running, done // TOKEN_BYTES))
                if sum(child.running.values()) >= POPULAR:
                    num_popular = done // TOKEN_BYTES
            edge = child
        return Match(hits, num_popular, family)

    # Reports.

    def store(self, replica: ReplicaNumber, stored: BlocksStored) -> bool:
        """Adds blocks. Returns False, and adds nothing, if the replica did not report the blocks before
        them."""
        root, first_digest = self._root(stored.cache_key)
        edge, at = root, 0
        if stored.parent != first_digest:
            place = self._blocks.get(stored.parent)
            if place is None:
                return False
            edge, at = _edge_with(*place), place[1]
            if edge.held.get(replica, 0) < at:
                return False
        run, start = stored.run, at
        done, size = 0, len(run)
        while done < size:
            offset = (at - edge.start) * TOKEN_BYTES
            if offset < len(edge.run):
                rest = edge.run[offset:] if offset else edge.run
                piece = run[done : done + len(rest)]
                common = common_prefix_len(piece, rest)
                if common * TOKEN_BYTES < min(len(rest), size - done):
                    edge = self._split(edge, at - edge.start + common)
                done += common * TOKEN_BYTES
                at += common
                if edge.held.get(replica, 0) < at:
                    self._hold(edge, replica, at)
            else:
                child = edge.children.get(run[done : done + TOKEN_BYTES])
                edge = child if child is not None else self._add(edge, run[done:])
        new: list[tuple[PrefixNode, bytes, int]] = []
        for index in range(len(stored.digests) - 1, -1, -1):
            end = start + (index + 1) * BLOCK_TOKENS
            while end <= edge.start:
                assert edge.parent is not None
                edge = edge.parent
            if stored.digests[index] in self._blocks:
                break  # the blocks before a reported block are reported too
            new.append((edge, stored.digests[index], end))
        for edge, digest, end in reversed(new):
            edge.digests.append(digest)
            self._blocks[digest] = (edge, end)
        return True

    def remove(self, replica: ReplicaNumber, digests: Sequence[bytes]) -> bool:
        """Removes blocks, the last first. Returns False if the replica had not reported one of them, or holds
        blocks after it: the tree has then missed a report."""
        is_consistent = True
        for digest in reversed(digests):
            place = self._blocks.get(digest)
            if place is None:
                is_consistent = False
                continue
            edge, end = _edge_with(*place), place[1]
            if edge.held.get(replica) != end or edge.below.get(replica):
                is_consistent = False
                continue
            self._release(edge, replica, end - BLOCK_TOKENS)
        return is_consistent

    def forget(self, replica: ReplicaNumber) -> None:
        """Removes all that the replica reported. Its requests in progress stay until they ``end``."""
        edges = self._edges.pop(replica, set())
        for edge in edges:
            del edge.held[replica]
            edge.below.pop(replica, None)
            assert edge.parent is not None
            edge.parent.below.pop(replica, None)
        for edge in edges:
            self._prune(edge)

    # Requests in progress.

    def begin(self, replica: ReplicaNumber, key: Hashable, run: TokenRun) -> None:
        """A request with this prompt was sent to the replica."""
        edge, done, size = self._root(key)[0], 0, len(run)
        while done < size:
            child = edge.children.get(run[done : done + TOKEN_BYTES])
            if child is None:
                child = self._add(edge, run[done:])
            elif not run.startswith(child.run, done):
                piece = run[done : done + len(child.run)]
                child = self._split(child, common_prefix_len(piece, child.run))
            child.running[replica] = child.running.get(replica, 0) + 1
            done += len(child.run)
            edge = child

    def mark(self, key: Hashable, run: TokenRun, family: RequestFamily) -> None:
        """The family begins with this run, with which prompts in progress begin."""
        edge, done, size = self._root(key)[0], 0, len(run)
        while done < size:
            child = edge.children[run[done : done + TOKEN_BYTES]]
            if len(child.run) > size - done:
                child = self._split(child, (size - done) // TOKEN_BYTES)
            done += len(child.run)
            edge = child
        edge.family = family

    def end(self, replica: ReplicaNumber, key: Hashable, run: TokenRun) -> None:
        """Undoes one ``begin``."""
        edge, done, size = self._roots[key][0], 0, len(run)
        while done < size:
            edge = edge.children[run[done : done + TOKEN_BYTES]]
            done += len(edge.run)
            if edge.running[replica] == 1:
                del edge.running[replica]
            else:
                edge.running[replica] -= 1
        self._prune(edge)

    # The tree.

    def _root(self, key: Hashable) -> tuple[PrefixNode, bytes]:
        found = self._roots.get(key)
        if found is None:
            root = PrefixNode(b"", 0, None)
            root.key = key
            found = self._roots[key] = root, root_digest(self._model, key)
        return found

    def _add(self, parent: PrefixNode, run: TokenRun) -> PrefixNode:
        child = parent.children[run[:TOKEN_BYTES]] = PrefixNode(run, parent.end, parent)
        return child

    def _hold(self, edge: PrefixNode, replica: ReplicaNumber, end: int) -> None:
        """The replica holds the edge up to ``end``."""
        if replica not in edge.held:
            assert edge.parent is not None
            edge.parent.below[replica] = edge.parent.below.get(replica, 0) + 1
            self._edges.setdefault(replica, set()).add(edge)
        edge.held[replica] = end

    def _release(self, edge: PrefixNode, replica: ReplicaNumber, end: int) -> None:
        """The replica holds the path to the edge up to ``end`` only, and the parts that other paths need."""
        last = edge
        while edge.parent is not None and not edge.below.get(replica):
            if end > edge.start:
                edge.held[replica] = end
                break
            del edge.held[replica]
            self._edges[replica].discard(edge)
            edge = edge.parent
            if edge.below[replica] == 1:
                del edge.below[replica]
            else:
                edge.below[replica] -= 1
        self._prune(last)

    def _split(self, edge: PrefixNode, length: int) -> PrefixNode:
        """Splits an edge after ``length`` tokens. Returns the upper part, which is new: ``_blocks`` may still
        refer to the lower part for blocks that end in the upper one."""
        assert edge.parent is not None
        cut = edge.start + length
        upper = PrefixNode(edge.run[: length * TOKEN_BYTES], edge.start, edge.parent)
        num_blocks = cut // BLOCK_TOKENS - edge.start // BLOCK_TOKENS
        upper.digests, edge.digests = edge.digests[:num_blocks], edge.digests[num_blocks:]
        upper.running = dict(edge.running)
        for replica, end in edge.held.items():
            upper.held[replica] = min(end, cut)
            self._edges[replica].add(upper)
            if end > cut:
                upper.below[replica] = 1
            else:
                self._edges[replica].discard(edge)
        edge.held = {replica: end for replica, end in edge.held.items() if end > cut}
        edge.run, edge.start = edge.run[length * TOKEN_BYTES :], cut
        edge.parent.children[upper.run[:TOKEN_BYTES]] = upper
        edge.parent = upper
        upper.children[edge.run[:TOKEN_BYTES]] = edge
        return upper

    def _prune(self, edge: PrefixNode) -> None:
        """Removes the part that no replica holds any more, from the end of the edge upwards."""
        while edge.parent is not None:
            longest = max(edge.held.values(), default=edge.start)
            num_blocks = longest // BLOCK_TOKENS - edge.start // BLOCK_TOKENS
            while len(edge.digests) > num_blocks:
                del self._blocks[edge.digests.pop()]
            if edge.children or edge.running:
                return
            if longest > edge.start:
                if edge.end - longest >= BLOCK_TOKENS:
                    edge.family = None  # others may begin with the rest
                edge.run = edge.run[: (longest - edge.start) * TOKEN_BYTES]
                return
            parent = edge.parent
            if parent.children.get(edge.run[:TOKEN_BYTES]) is edge:
                del parent.children[edge.run[:TOKEN_BYTES]]
            edge = parent
        if not edge.children:  # clients choose the keys: empty trees must not accumulate
            self._roots.pop(edge.key, None)

    def edges(self) -> Iterator[PrefixNode]:
        """All edges, parents first. Slow; for checks."""
        pending = [root for root, _ in self._roots.values()]
        while pending:
            edge = pending.pop()
            if edge.parent is not None:
                yield edge
            pending += edge.children.values()

    def check(self) -> None:
        """For tests. ``AssertionError`` if an invariant of the tree is broken."""
        digests: list[bytes] = []
        of_replica: dict[ReplicaNumber, set[PrefixNode]] = {}
        for root, _ in self._roots.values():
            assert root.children, "an empty tree"
        for edge in self.edges():
            assert edge.parent is not None
            assert edge.run
            assert edge.start == edge.parent.end
            assert edge.parent.children[edge.run[:TOKEN_BYTES]] is edge
            assert edge.held or edge.running or edge.children
            for replica, end in edge.held.items():
                of_replica.setdefault(replica, set()).add(edge)
                assert edge.start < end <= edge.end
                assert edge.parent.parent is None or edge.parent.held[replica] == edge.start
                below = sum(replica in child.held for child in edge.children.values())
                assert edge.below.get(replica, 0) == below
                assert below or end % BLOCK_TOKENS == 0
            longest = max(edge.held.values(), default=edge.start)
            if not edge.children and not edge.running:
                assert longest == edge.end
            assert len(edge.digests) == longest // BLOCK_TOKENS - edge.start // BLOCK_TOKENS
            for index, digest in enumerate(edge.digests):
                found, end = self._blocks[digest]
                assert _edge_with(found, end) is edge
                assert end == (edge.start // BLOCK_TOKENS + index + 1) * BLOCK_TOKENS
            digests += edge.digests
            for replica, count in edge.running.items():
                assert count >= sum(child.running.get(replica, 0) for child in edge.children.values())
        assert len(digests) == len(self._blocks)
        assert of_replica == {replica: edges for replica, edges in self._edges.items() if edges}


def _edge_with(edge: PrefixNode, end: int) -> PrefixNode:
    """The edge in which the block that ends after ``end`` tokens ends, from one at or below it."""
    while end <= edge.start:
        assert edge.parent is not None
        edge = edge.parent
    return edge
