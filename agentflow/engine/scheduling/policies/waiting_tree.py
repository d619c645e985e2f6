"""Which waiting request has the longest cached prefix, kept up to date instead of searched.

A radix tree over the prompts of waiting requests, for each cache key and *rank*: requests of a lower rank go
first, whatever is cached. Each edge knows how many of its tokens are cached. When a step computes or evicts
tokens, only one path of each rank is updated, however many requests wait below it. All requests below the
point where the cached part of a path ends have the same match; such a point is a *frontier*. A heap of
frontiers, by rank and then by match, gives the first request without looking at the others.

Within a step requests only become blocked. A frontier whose requests are all blocked is not looked at again
before the next step, nor is such a child of another frontier.

A client can nest its prompts, each of which is a prefix of the next: the tree is then as deep as there are
requests. A walk of ``SKIPPED`` edges, down or up, leaves a skip, which later walks take instead if nothing
between its ends concerns them. Nearly all walks are shorter. So each walk begins in a plain loop, and ends
there unless it is that long or meets a skip.

Prompts that leave may leave nodes where others branched from them. These are rarely many, and later prompts
often branch there again. Edges are joined there only once most nodes are of this kind.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from agentflow.engine.cache.token_run import TOKEN_BYTES, TokenRun, common_prefix_len
from agentflow.engine.request import Request

IsBlocked = Callable[[Request, int | None], bool]
"""Whether a request should wait because a running one is computing the tokens it needs next, or because it
does not fit into memory in this step (``Request.is_held_back``). The second argument is the request's match
if the policy knows it. May raise ``SearchEnds``."""
Rank = tuple[Any, ...]
SKIPPED = 64
"""A skip is made after this many edges in a row without one."""
MIN_SKIPPED = 8
"""A skip is made to the start of another one after at least this many edges."""
NODES_PER_REQUEST = 4
SPARE_NODES = 64
"""Edges are joined once there are more nodes than this, and NODES_PER_REQUEST for each request. The requests
alone need two each, without roots."""


class SearchEnds(Exception):
    """The step has passed enough requests. No other request of the tenant is admitted in it."""


class WaitingNode:
    """One edge: tokens ``start`` to ``end`` of all requests below, of which the first ``cached`` are cached.

    - ``rank``: the rank of all requests in its tree.
    - ``first_token``: the key among its parent's children.
    - ``children``: by their first token. ``uncached``: the children without any cached token.
    - ``requests``: the requests that end here, by id.
    - ``queued_match``: its match in the heap; -1 if it is not in the heap.
    - ``skips``: from here and to here; None as long as there were none.
    """

    __slots__ = (
        "cached",
        "children",
        "end",
        "first_token",
        "parent",
        "queued_match",
        "rank",
        "requests",
        "run",
        "skips",
        "start",
        "uncached",
    )

    def __init__(self, run: TokenRun, start: int, parent: WaitingNode | None, rank: Rank) -> None:
        self.run = run
        self.first_token = run[:TOKEN_BYTES]
        self.start = start
        self.end = start + len(run) // TOKEN_BYTES
        self.parent = parent
        self.rank = rank
        # Most nodes have no children or no requests: they share these empty dicts.
        self.children = _NO_CHILDREN
        self.uncached = _NO_CHILDREN
        self.requests = _NO_REQUESTS
        self.cached = 0
        self.queued_match = -1
        self.skips: Skips | None = None

    @property
    def frontier_match(self) -> int:
        """The match of the requests whose cached part ends here; -1 if there are none."""
        if self.start + self.cached < self.end:
            return self.start + self.cached if self.cached else -1
        return self.end if self.requests or self.uncached else -1

    @property
    def has_requests(self) -> bool:
        """Whether requests end here or below. A node without any is removed."""
        return bool(self.requests or self.children)

    def unblocked(self, match: int | None, is_blocked: IsBlocked) -> Request | None:
        """A request here or below that is not blocked. All of them need the same token next, so one of them
        decides for the others, unless it is held back by itself."""
        for request in self._requests_below():
            if request.is_held_back:
                continue
            if not is_blocked(request, match):
                return request
            if not request.is_held_back:
                return None
        return None

    def _requests_below(self) -> Iterator[Request]:
        pending = [iter([self])]
        while pending:
            node = next(pending[-1], None)
            if node is None:
                pending.pop()
                continue
            yield from node.requests.values()
            pending.append(iter(node.children.values()))


class Skips:
    """The skips of a node.

    - ``down``: the last one that was made down from here.
    - ``up``: the node above, not a root, where the last one ends that was made up from here.
    - ``starts``: the nodes above whose skips end here, and some whose skips did.
    """

    __slots__ = ("down", "starts", "up")

    def __init__(self) -> None:
        self.down: Skip | None = None
        self.up: WaitingNode | None = None
        self.starts: set[WaitingNode] = set()


class Skip(NamedTuple):
    """A way down from a node. It leads where it did, even if edges are split, until ``node`` is removed or
    edges are joined, and the skip with it."""

    run: TokenRun  # the tokens of all its edges
    node: WaitingNode  # where it ends


class WaitingTree:
    """Requests by rank and match.

    - ``roots``: the trees with requests, by cache key and rank. Other modules read it.
    - ``nodes``: where each request ends, by its id. Other modules read it.
    - ``on_joined``: called with the nodes whose edges were joined, from the upper to the lower end. Only the
      last one is left, and has all their tokens.
    """

    on_joined: Callable[[Sequence[WaitingNode]], None] | None = None

    def __init__(self) -> None:
        self.roots: dict[Hashable, dict[Rank, WaitingNode]] = {}
        self.nodes: dict[int, WaitingNode] = {}
        self._num_nodes = 0  # without roots
        self._frontiers: list[_Frontier] = []  # a heap, without frontiers that are blocked in this step
        self._blocked: list[_Frontier] = []
        self._blocked_children: set[WaitingNode] = set()  # in this step, below frontiers that are not blocked
        self._complete: set[WaitingNode] = set()  # where requests end whose tokens are all cached
        self._ties = itertools.count()

    def count_match(self, request: Request) -> int:
        """How many of the request's tokens are cached."""
        node = begin = self.nodes[request.id]
        for num_walked in range(SKIPPED - 1):
            if node.cached:
                return node.start + node.cached
            parent = node.parent
            if parent is None:
                return 0
            if node.skips is not None:
                return _count_cached_above(node, begin, num_walked)
            node = parent
        return _count_cached_above(node, begin, SKIPPED - 1)

    def add(self, request: Request, run: TokenRun, match: int, rank: Rank = ()) -> None:
        """Adds a request.

        Args:
            request: The request.
            run: Its tokens that may come from the cache.
            match: How many of these are cached.
            rank: Its rank. There are only a few different ones.
        """
        roots = self.roots.get(request.cache_key)
        if roots is None:
            roots = self.roots[request.cache_key] = {}
        node = roots.get(rank)
        if node is None:
            node = roots[rank] = WaitingNode(b"", 0, None, rank)
        root, common = node, 0
        for node, common in _along(root, run, _skips_all):  # noqa: B007 - the last ones are read below
            pass
        if node.start + common < node.end:
            node = self._split(node, common)
        if node.end * TOKEN_BYTES < len(run):
            # The rank of the root: one object for all nodes, as equal objects are compared faster.
            child = WaitingNode(run[node.end * TOKEN_BYTES :], node.end, node, root.rank)
            child.requests = {request.id: request}
            _add_child(node, child)
            self._num_nodes += 1
            self._set_cached(child, match - child.start if match > child.start else 0)
            node = child
        else:
            if node.requests is _NO_REQUESTS:
                node.requests = {}
            node.requests[request.id] = request
            self._count_complete(node)
            self._queue(node)
        self.nodes[request.id] = node

    def remove(self, request: Request) -> None:
        """The request no longer waits."""
        node: WaitingNode | None = self.nodes.pop(request.id)
        assert node is not None
        del node.requests[request.id]
        if node.requests:
            return
        self._complete.discard(node)
        while not (node.requests or node.children):
            node.queued_match = -1
            if node.skips is not None:
                _forget_skips(node)
            parent = node.parent
            if parent is None:
                self._remove_root(request.cache_key, node.rank)
                break
            node.parent = None  # a node in an old entry of the heap would keep the ones above it
            del parent.children[node.first_token]
            if not node.cached:
                parent.uncached.pop(node.first_token, None)
            self._num_nodes -= 1
            node = parent
        if self._num_nodes > SPARE_NODES + NODES_PER_REQUEST * len(self.nodes):
            self._join_edges()

    def tokens_cached(self, cache_key: Hashable, run: TokenRun) -> bool:
        """The whole of ``run`` is cached now. Returns whether the match of a request has changed."""
        has_changed = False
        for root in self.roots.get(cache_key, _NO_ROOTS).values():
            for child, common in _along(root, run, _skips_cached):
                if common > child.cached:
                    self._set_cached(child, common)
                    has_changed = True
        return has_changed

    def tokens_evicted(self, cache_key: Hashable, run: Callable[[], TokenRun], kept: int) -> bool:
        """Of the run that ``run()`` returns, and of all its continuations, only the first ``kept`` tokens are
        still cached. Returns whether the match of a request has changed."""
        roots = self.roots.get(cache_key)
        if roots is None:
            return False
        evicted = run()
        has_changed = False
        for root in roots.values():
            for child, common in _along(root, evicted, lambda node: node.end <= kept):
                if not child.cached:
                    break  # nor is anything below
                if child.start + common > kept:
                    self._set_cached(child, min(child.cached, max(0, kept - child.start)))
                    has_changed = True
        return has_changed

    def start_step(self) -> None:
        """A step is being planned: requests that were blocked may be free again."""
        while self._blocked:
            heapq.heappush(self._frontiers, self._blocked.pop())
        self._blocked_children.clear()

    def first(self, is_blocked: IsBlocked, *, only_complete: bool = False) -> tuple[Request, int] | None:
        """Of the requests that are not blocked, the one with the lowest rank and then the longest match.
        Returns it with its match. ``only_complete``: all are held back together, except requests that are
        cached completely."""
        while self._frontiers:
            entry = self._frontiers[0]
            match, node = -entry[1], entry[3]
            if node.queued_match != match or node.frontier_match != match:
                heapq.heappop(self._frontiers)  # an old entry
                if node.queued_match == match:
                    node.queued_match = -1
                continue
            if not only_complete:
                request = self._unblocked(node, match, is_blocked)
            else:
                request = _complete_request(node)
                if request is None and not self.has_complete():
                    break  # nor has a later one
            if request is not None:
                return request, match
            self._blocked.append(heapq.heappop(self._frontiers))
        return None

    def _unblocked(self, node: WaitingNode, match: int, is_blocked: IsBlocked) -> Request | None:
        """A request whose cached part ends at this frontier and that is not blocked."""
        if match < node.end:
            return node.unblocked(match, is_blocked)
        if node.requests and (complete := _complete_request(node)) is not None:
            return complete
        for child in node.uncached.values():
            if child in self._blocked_children:
                continue
            request = child.unblocked(match, is_blocked)
            if request is not None:
                return request
            self._blocked_children.add(child)
        return None

    def has_complete(self) -> bool:
        """Whether a request is complete and not held back. In a step only a few are held back."""
        return any(_complete_request(node) is not None for node in self._complete)

    def _count_complete(self, node: WaitingNode) -> None:
        if node.requests and node.start + node.cached == node.end:
            self._complete.add(node)
        else:
            self._complete.discard(node)

    def _remove_root(self, cache_key: Hashable, rank: Rank) -> None:
        roots = self.roots[cache_key]
        del roots[rank]
        if not roots:
            del self.roots[cache_key]

    def _set_cached(self, node: WaitingNode, cached: int) -> None:
        parent = node.parent
        assert parent is not None
        node.cached = cached
        if node.requests:
            self._count_complete(node)
        if cached:
            parent.uncached.pop(node.first_token, None)
            self._queue(node)
        else:
            if parent.uncached is _NO_CHILDREN:
                parent.uncached = {}
            parent.uncached[node.first_token] = node
            self._queue(parent)

    def _split(self, node: WaitingNode, length: int) -> WaitingNode:
        """Splits an edge after ``length`` tokens and returns the upper part, which is new."""
        parent = node.parent
        assert parent is not None
        upper = WaitingNode(node.run[: length * TOKEN_BYTES], node.start, parent, node.rank)
        _add_child(parent, upper)
        self._num_nodes += 1
        parent.uncached.pop(upper.first_token, None)
        cached = node.cached
        node.run, node.start, node.parent = node.run[length * TOKEN_BYTES :], upper.end, upper
        node.first_token = node.run[:TOKEN_BYTES]
        _add_child(upper, node)
        self._set_cached(node, max(0, cached - length))
        self._set_cached(upper, min(cached, length))
        return upper

    def _join_edges(self) -> None:
        """Joins the edges above and below all nodes where no request ends and no prompts branch."""
        heirs: dict[WaitingNode, WaitingNode] = {}
        pending = [root for by_rank in self.roots.values() for root in by_rank.values()]
        while pending:
            node = pending.pop()
            node.skips = None  # they may end at nodes that are removed
            for child in [*node.children.values()]:
                joined = [child]
                while not joined[-1].requests and len(joined[-1].children) == 1:
                    joined += joined[-1].children.values()
                pending.append(joined[-1])
                if len(joined) > 1:
                    self._join(node, joined)
                    heirs.update(dict.fromkeys(joined[:-1], joined[-1]))
        # Frontiers keep their places among equals. Old entries stay too, because they may be valid again,
        # except those of nodes that are joined.
        for entries in (self._frontiers, self._blocked):
            entries[:] = [(*entry[:3], heirs.get(entry[3], entry[3])) for entry in entries]

    def _join(self, parent: WaitingNode, joined: Sequence[WaitingNode]) -> None:
        """Joins the edges of nodes below one another: the last one gets the tokens of all."""
        upper, lower = joined[0], joined[-1]
        # At most one of them is a frontier, as the tokens after the first that is not cached are not cached.
        queued_match = max([one.queued_match for one in joined if one.frontier_match >= 0], default=-1)
        lower.run = b"".join([one.run for one in joined])
        lower.cached = sum([one.cached for one in joined])
        lower.start, lower.first_token, lower.parent = upper.start, upper.first_token, parent
        lower.queued_match = queued_match
        parent.children[lower.first_token] = lower
        if not lower.cached:
            parent.uncached[lower.first_token] = lower
        is_blocked = upper in self._blocked_children
        self._blocked_children.difference_update(joined)
        if is_blocked:
            self._blocked_children.add(lower)
        self._num_nodes -= len(joined) - 1
        for node in joined[:-1]:
            node.queued_match = -1
            node.parent = node.skips = None
            node.children = node.uncached = _NO_CHILDREN
        if self.on_joined is not None:
            self.on_joined(joined)

    def _queue(self, node: WaitingNode) -> None:
        match = node.start + node.cached
        if match < node.end:  # as in ``frontier_match``
            if not node.cached:
                return
        elif not (node.requests or node.uncached):
            return
        if node.queued_match != match:
            node.queued_match = match
            heapq.heappush(self._frontiers, (node.rank, -match, next(self._ties), node))
            if len(self._frontiers) > 64 + 8 * len(self.nodes):
                self._drop_old_entries()

    def _drop_old_entries(self) -> None:
        live = {id(entry[3]): entry for entry in self._frontiers if entry[3].queued_match == -entry[1]}
        self._frontiers = list(live.values())
        heapq.heapify(self._frontiers)


_Frontier = tuple[Rank, int, int, WaitingNode]  # rank, -match, tie-break, node
_NO_ROOTS: dict[Rank, WaitingNode] = {}
_NO_CHILDREN: dict[TokenRun, WaitingNode] = {}
_NO_REQUESTS: dict[int, Request] = {}


def _add_child(parent: WaitingNode, child: WaitingNode) -> None:
    if parent.children is _NO_CHILDREN:
        parent.children = {}
    parent.children[child.first_token] = child


def _along(
    start: WaitingNode, run: TokenRun, may_skip: Callable[[WaitingNode], bool]
) -> Iterable[tuple[WaitingNode, int]]:
    """The edges below ``start`` along ``run``, each with the number of its tokens that match. ``may_skip``:
    whether the edges above a node, and its own, concern the caller no more than the node itself does."""
    found: list[tuple[WaitingNode, int]] = []
    node, done = start, 0
    for _ in range(SKIPPED - 1):
        if node.skips is not None:
            break
        child = node.children.get(run[done : done + TOKEN_BYTES])
        if child is None:
            return found
        edge = child.run
        if not run.startswith(edge, done):
            found.append((child, common_prefix_len(run[done : done + len(edge)], edge)))
            return found
        found.append((child, child.end - child.start))
        done += len(edge)
        node = child
    return itertools.chain(found, _along_deep(node, run, may_skip, start, len(found)))


def _along_deep(
    node: WaitingNode,
    run: TokenRun,
    may_skip: Callable[[WaitingNode], bool],
    begin: WaitingNode,
    num_walked: int,
) -> Iterator[tuple[WaitingNode, int]]:
    """The edges below ``node``, likewise. Takes skips and makes them. ``begin``: where a skip would start,
    ``num_walked`` edges above the node."""
    done, begin_done = node.end * TOKEN_BYTES, begin.end * TOKEN_BYTES
    while done < len(run):
        skips = node.skips
        if skips is not None and (skip := skips.down) is not None and run.startswith(skip.run, done):
            if num_walked >= MIN_SKIPPED:
                _make_skip(begin, run[begin_done:done], node)
            if may_skip(skip.node):
                node = skip.node
                done += len(skip.run)
                begin, begin_done, num_walked = node, done, 0
                yield node, node.end - node.start
                continue
            begin, begin_done, num_walked = node, done, 0
        child = node.children.get(run[done : done + TOKEN_BYTES])
        if child is None:
            return
        edge = child.run
        if not run.startswith(edge, done):
            yield child, common_prefix_len(run[done : done + len(edge)], edge)
            return
        done += len(edge)
        node = child
        num_walked += 1
        if num_walked == SKIPPED:
            _make_skip(begin, run[begin_done:done], node)
            begin, begin_done, num_walked = node, done, 0
        yield node, node.end - node.start


def _count_cached_above(node: WaitingNode, begin: WaitingNode, num_walked: int) -> int:
    """The match of the requests that end at ``node``, or below it at ``begin``, without cached tokens between
    these. Takes skips and makes them. ``num_walked``: the edges from ``begin`` to the node."""
    while (parent := node.parent) is not None and not node.cached:
        skips = node.skips
        if skips is not None and (above := skips.up) is not None and not above.cached:
            if num_walked >= MIN_SKIPPED:
                _skips_of(begin).up = node
            node = begin = above
            num_walked = 0
            continue
        node = parent
        num_walked += 1
        if num_walked == SKIPPED and node.parent is not None:
            _skips_of(begin).up = node
            begin, num_walked = node, 0
    return node.start + node.cached


def _skips_of(node: WaitingNode) -> Skips:
    if node.skips is None:
        node.skips = Skips()
    return node.skips


def _make_skip(begin: WaitingNode, run: TokenRun, end: WaitingNode) -> None:
    _skips_of(begin).down = Skip(run, end)
    _skips_of(end).starts.add(begin)


def _forget_skips(removed: WaitingNode) -> None:
    """Removes the references between a removed node and others. A node above would keep it, and the removed
    ones below it in a chain of skips."""
    assert removed.skips is not None
    for begin in removed.skips.starts:
        if begin.skips is not None and begin.skips.down is not None and begin.skips.down.node is removed:
            begin.skips.down = None
    removed.skips = None


def _skips_all(node: WaitingNode) -> bool:
    return True


def _skips_cached(node: WaitingNode) -> bool:
    return node.start + node.cached == node.end


def _complete_request(node: WaitingNode) -> Request | None:
    """A request that ends here, all of whose tokens are cached, if it is not held back: nothing left to
    compute could be shared."""
    if node.start + node.cached == node.end:
        for request in node.requests.values():
            if not request.is_held_back:
                return request
    return None
