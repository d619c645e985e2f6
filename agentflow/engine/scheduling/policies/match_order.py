"""The waiting requests of one tenant by rank, then short ones before long ones, then the longest match first.

A request is *short* if it has at most ``short_tokens`` tokens to compute. Short and long ones have separate
trees (``waiting_tree``), by their length when they arrived. Requests that are held back together have other
trees, so that the search for another one passes all of them: requests that ``pace`` holds back, once it has
held some back, and requests that wait for the encoding of an image. While only a few requests wait, there are
no trees: to look through the few costs less than to change trees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from agentflow.engine.cache.token_run import TOKEN_BYTES, TokenRun, common_prefix_len
from agentflow.engine.request import CacheKey, Request
from agentflow.engine.scheduling.policies.waiting_tree import IsBlocked, WaitingTree

MAX_FEW = 4
"""At most this many waiting requests of a tenant are kept without trees."""
_LONG: Final = 1
_PACED: Final = 2
_UNENCODED: Final = 4
"""Which tree a request is in: the sum of the kinds that it belongs to."""
Rank: TypeAlias = tuple[int, int, int]
_Placed: TypeAlias = tuple[Request, int, Rank]
"""A request with its match and its rank."""


class MatchOrder:
    """The requests in this order. ``holds_back_paced``: in this step, requests that ``pace`` holds back
    together are blocked, except those that are cached completely. ``holds_back_unencoded``: so are requests
    that wait for the encoding of an image."""

    def __init__(self, short_tokens: float) -> None:
        self.holds_back_paced = self.holds_back_unencoded = False
        self._short_tokens = short_tokens
        self._divides_paced = False  # once ``pace`` has held requests back
        self._trees: dict[int, WaitingTree] = {}  # by kind
        self._few: list[_Few] = []  # in the order of their arrival

    def add(self, request: Request, run: TokenRun, match: int, rank: Rank) -> None:
        """Adds a request. ``run``: its tokens that may come from the cache, of which ``match`` are cached."""
        one = _Few(request, run, match, rank, self.is_short(request, match))
        if len(self._few) < MAX_FEW and (self._few or not self._has_planted):
            self._few.append(one)
            return
        if self._few:
            self._plant_few()
        self._plant(self._trees, one, divides_paced=self._divides_paced)

    def remove(self, request: Request) -> bool:
        """Removes the request. Returns whether it was there. After a fault, it may be in two trees."""
        for one in self._few:
            if one.request is request:
                self._few.remove(one)
                return True
        was_there = False
        for tree in self._trees.values():
            if request.id in tree.nodes:
                tree.remove(request)
                was_there = True
        return was_there

    def is_short(self, request: Request, match: int) -> bool:
        """Whether the request, of which ``match`` tokens are cached, is short."""
        return request.num_tokens + request.num_nodes - match <= self._short_tokens

    def count_match(self, request: Request) -> int:
        """How many tokens of a waiting request are cached."""
        for one in self._few:
            if one.request is request:
                return one.match
        for tree in self._trees.values():
            if request.id in tree.nodes:
                return tree.count_match(request)
        raise KeyError(request.id)

    def tokens_cached(self, cache_key: CacheKey, run: TokenRun) -> bool:
        """As in ``WaitingTree``."""
        has_changed = False
        for one in self._few:
            if one.request.cache_key == cache_key and (common := one.common(run)) > one.match:
                one.match = common
                has_changed = True
        for tree in self._trees.values():
            if tree.nodes and tree.tokens_cached(cache_key, run):
                has_changed = True
        return has_changed

    def tokens_evicted(self, cache_key: CacheKey, run: Callable[[], TokenRun], kept: int) -> bool:
        """As in ``WaitingTree``."""
        has_changed = False
        for one in self._few:
            if one.match > kept and one.request.cache_key == cache_key and one.common(run()) > kept:
                one.match = kept
                has_changed = True
        for tree in self._trees.values():
            if tree.tokens_evicted(cache_key, run, kept):
                has_changed = True
        return has_changed

    def start_step(self) -> None:
        """A step is being planned."""
        self.holds_back_paced = self.holds_back_unencoded = False
        for tree in self._trees.values():
            tree.start_step()

    def hold_back_paced(self) -> None:
        """As in ``Policy``."""
        self.holds_back_paced = True
        if self._divides_paced:
            return
        planted = [
            self._planted_as(kind, node.requests[number])
            for kind, tree in self._trees.items()
            for number, node in tree.nodes.items()
        ]
        trees: dict[int, WaitingTree] = {}
        for one in sorted(planted, key=_arrival):
            self._plant(trees, one, divides_paced=True)
        self._trees, self._divides_paced = trees, True  # after a fault, all wait as before

    def set_unencoded(self, request: Request, is_unencoded: bool) -> None:
        """As in ``Policy``."""
        if request.is_unencoded == is_unencoded:
            return
        request.is_unencoded = is_unencoded
        for kind, tree in self._trees.items():
            if request.id in tree.nodes:
                one = self._planted_as(kind, request)
                self._plant(self._trees, one, divides_paced=self._divides_paced)  # a fault does not lose it
                tree.remove(request)
                return

    @property
    def are_unencoded(self) -> bool:
        """Whether all requests wait for the encoding of an image."""
        if self._few:
            return all(one.request.is_unencoded for one in self._few)
        return not any(tree.nodes for kind, tree in self._trees.items() if not kind & _UNENCODED)

    @property
    def has_complete_paced(self) -> bool:
        """Whether a request that ``pace`` holds back may be cached completely. It is not blocked then."""
        return bool(self._few) or any(
            tree.has_complete() for kind, tree in self._trees.items() if kind & _PACED
        )

    def first(self, is_blocked: IsBlocked) -> Request | None:
        """The first request that is not blocked. A long request that the cache has made short since it
        arrived is short."""
        if self._few:
            return self._first_of_few(is_blocked)
        held_back = _PACED * self.holds_back_paced + _UNENCODED * self.holds_back_unencoded
        firsts: list[_Placed | None] = [None, None]  # of short and of long ones
        for kind, tree in self._trees.items():
            if tree.nodes:
                first = tree.first(is_blocked, only_complete=bool(kind & held_back))
                if first is not None:
                    other: _Placed = *first, tree.nodes[first[0].id].rank
                    known = firsts[kind & _LONG]
                    firsts[kind & _LONG] = other if known is None else min(known, other, key=_order_in_trees)
        return self._first_of_two(*firsts)

    def _first_of_few(self, is_blocked: IsBlocked) -> Request | None:
        """The same without trees: checks the few requests in the order in which trees would be searched."""
        if len(self._few) == 1:
            [one] = self._few
            return one.request if one.is_free(is_blocked) else None
        short: _Placed | None = None
        long: _Placed | None = None
        for one in sorted(self._few, key=_order_of_few):
            if one.is_short:
                short = one.placed if short is None and one.is_free(is_blocked) else short
            else:
                long = one.placed if long is None and one.is_free(is_blocked) else long
        return self._first_of_two(short, long)

    def _first_of_two(self, short: _Placed | None, long: _Placed | None) -> Request | None:
        """The first of the first short request and the first long one."""
        if short is None or long is None:
            found = short or long
        else:
            (request, match, rank), (_, short_match, short_rank) = long, short
            is_long_first = (rank, not self.is_short(request, match), -match) < (
                short_rank,
                False,
                -short_match,
            )
            found = long if is_long_first else short
        return None if found is None else found[0]

    def _plant_few(self) -> None:
        """Moves the few requests to new trees. After an exception, they still wait without trees."""
        trees: dict[int, WaitingTree] = {}
        for one in self._few:
            self._plant(trees, one, divides_paced=self._divides_paced)
        self._trees = trees
        self._few.clear()

    def _plant(self, trees: dict[int, WaitingTree], one: _Few, *, divides_paced: bool) -> None:
        request = one.request
        kind = _LONG * (not one.is_short) + _PACED * (divides_paced and request.is_paced)
        kind += _UNENCODED * request.is_unencoded
        tree = trees.get(kind)
        if tree is None:
            tree = trees[kind] = WaitingTree()
        tree.add(request, one.run, one.match, one.rank)

    def _planted_as(self, kind: int, request: Request) -> _Few:
        """A request in the tree of this kind."""
        tree = self._trees[kind]
        rank, match = tree.nodes[request.id].rank, tree.count_match(request)
        return _Few(request, request.reusable_run(), match, rank, not kind & _LONG)

    @property
    def _has_planted(self) -> bool:
        for tree in self._trees.values():  # noqa: SIM110 - faster than any()
            if tree.nodes:
                return True
        return False


class _Few:
    """One of a few requests that wait, and the other arguments of ``WaitingTree.add``. ``is_short``: when it
    arrived."""

    __slots__ = ("is_short", "match", "rank", "request", "run")

    def __init__(self, request: Request, run: TokenRun, match: int, rank: Rank, is_short: bool) -> None:
        self.request = request
        self.run = run
        self.match = match
        self.rank = rank
        self.is_short = is_short

    @property
    def placed(self) -> _Placed:
        return self.request, self.match, self.rank

    def is_free(self, is_blocked: IsBlocked) -> bool:
        """Whether it is not blocked. If nothing is left to compute that could be shared, only memory counts,
        or the time of steps."""
        if TOKEN_BYTES * self.match == len(self.run):
            return not self.request.is_held_back
        return not is_blocked(self.request, self.match)

    def common(self, run: TokenRun) -> int:
        """The tokens that it has in common with a run."""
        if self.run[:TOKEN_BYTES] != run[:TOKEN_BYTES]:
            return 0
        return common_prefix_len(self.run, run)


def _order_of_few(one: _Few) -> tuple[Rank, int]:
    return one.rank, -one.match


def _arrival(one: _Few) -> int:
    return one.request.arrival


def _order_in_trees(one: _Placed) -> tuple[Rank, int, int]:
    request, match, rank = one
    return rank, -match, request.arrival
