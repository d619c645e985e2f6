"""Other routers' rules, for comparison in simulations.

Each follows the rules of its source, on tokens instead of characters. None of them knows programs.
"""

from __future__ import annotations

import bisect
import hashlib
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agentflow.cluster.routing.feed import Update
from agentflow.cluster.routing.load import RoutedRequest
from agentflow.cluster.routing.prefix_tree import ReplicaNumber
from agentflow.engine.cache.token_run import TOKEN_BYTES, TokenRun, common_prefix_len


class RoundRobin:
    """Each replica in turn."""

    reads_feed = False

    def __init__(self) -> None:
        self.num_unfinished: Counter[ReplicaNumber] = Counter()
        self.replicas: list[ReplicaNumber] = []
        self._turn = -1

    def add(self, replica: ReplicaNumber) -> None:
        """A replica joins."""
        bisect.insort(self.replicas, replica)
        self.num_unfinished[replica] = 0

    def lose(self, replica: ReplicaNumber) -> None:
        """A replica is gone."""
        self.replicas.remove(replica)

    def receive(self, update: Update) -> bool:
        """Not used."""
        return True

    def place(self, calls: Sequence[RoutedRequest], now_s: float) -> None:
        """Sets the ``replica`` of requests that came together."""
        for call in calls:
            call.replica = self._choose(call)
            self.num_unfinished[call.replica] += 1

    def started(self, call: RoutedRequest, now_s: float) -> None:
        """Not used."""

    def ended(self, call: RoutedRequest, num_output: int, now_s: float) -> None:
        """A request left its replica."""
        self.num_unfinished[call.replica] -= 1

    def _choose(self, call: RoutedRequest) -> ReplicaNumber:
        self._turn += 1
        return self.replicas[self._turn % len(self.replicas)]

    def _shortest(self, replicas: Sequence[ReplicaNumber]) -> ReplicaNumber:
        """The replica with the fewest unfinished requests."""
        return min(replicas, key=lambda replica: (self.num_unfinished[replica], replica))


class LeastLoaded(RoundRobin):
    """The replica with the fewest unfinished requests."""

    def _choose(self, call: RoutedRequest) -> ReplicaNumber:
        return self._shortest(self.replicas)


class LeastTokens(RoundRobin):
    """The replica with the fewest tokens of unfinished requests, outputs included."""

    def __init__(self) -> None:
        super().__init__()
        self._num_tokens: Counter[ReplicaNumber] = Counter()

    def _choose(self, call: RoutedRequest) -> ReplicaNumber:
        chosen = min(self.replicas, key=lambda replica: self._num_tokens[replica])
        self._num_tokens[chosen] += call.num_tokens + call.output_tokens
        return chosen

    def ended(self, call: RoutedRequest, num_output: int, now_s: float) -> None:
        """A request left its replica."""
        super().ended(call, num_output, now_s)
        self._num_tokens[call.replica] -= call.num_tokens + call.output_tokens


class ConsistentHashing(RoundRobin):
    """A ring of ``points`` for each replica (Karger et al., 1997). A request is hashed by its first
    ``num_tokens`` tokens and its key."""

    def __init__(self, points: int = 160, num_tokens: int = 256) -> None:
        super().__init__()
        self._points, self._num_tokens = points, num_tokens
        self._ring: list[tuple[int, ReplicaNumber]] = []

    def add(self, replica: ReplicaNumber) -> None:
        """A replica joins."""
        super().add(replica)
        for point in range(self._points):
            bisect.insort(self._ring, (_hash(f"{replica}/{point}".encode()), replica))

    def lose(self, replica: ReplicaNumber) -> None:
        """A replica is gone."""
        super().lose(replica)
        self._ring = [entry for entry in self._ring if entry[1] != replica]

    def _choose(self, call: RoutedRequest) -> ReplicaNumber:
        number = _hash(repr(call.key).encode() + call.run[: self._num_tokens * TOKEN_BYTES])
        return self._ring[bisect.bisect(self._ring, (number, -1)) % len(self._ring)][1]


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


class _KnowsSent(RoundRobin):
    """Knows the prompts that each replica was sent. ``max_tokens``: as in ``SentTree``."""

    def __init__(self, max_tokens: int = 2**62) -> None:
        super().__init__()
        self._sent = SentTree(max_tokens)

    def add(self, replica: ReplicaNumber) -> None:
        """A replica joins."""
        super().add(replica)
        self._sent.num_tokens[replica] = 0

    def lose(self, replica: ReplicaNumber) -> None:
        """A replica is gone."""
        super().lose(replica)
        self._sent.remove(replica)


class RayPrefixAware(_KnowsSent):
    """``PrefixCacheAffinityRouter`` of Ray Serve 2.60. Unless queues differ by more than
    ``imbalanced_threshold`` (by default never), the replicas that were sent the longest matching prefix, if
    it is at least ``MATCH_RATE`` of the prompt, else the replicas that were sent the least; of
    these the one with the shortest queue. Of two random replicas if queues differ. Its tree is of prompts
    only, and by default nothing leaves it."""

    MATCH_RATE: Final = 0.1

    def __init__(self, imbalanced_threshold: float = float("inf")) -> None:
        super().__init__()
        self._imbalanced_threshold = imbalanced_threshold
        self._random = random.Random(0)

    def _choose(self, call: RoutedRequest) -> ReplicaNumber:
        chosen = self._shortest(self._candidates(call))
        self._sent.insert(call.key, call.run, chosen)
        return chosen

    def _candidates(self, call: RoutedRequest) -> Sequence[ReplicaNumber]:
        queues = [self.num_unfinished[replica] for replica in self.replicas]
        if max(queues) - min(queues) > self._imbalanced_threshold:
            return self._random.sample(self.replicas, min(2, len(self.replicas)))
        num_matched, owners = self._sent.match(call.key, call.run)
        if num_matched >= self.MATCH_RATE * call.num_tokens and owners:
            return list(owners)
        return self._sent.smallest()


class SGLangCacheAware(_KnowsSent):
    """The policy ``cache_aware`` of SGLang's router. The replica with the shortest queue if the longest and
    the shortest differ by more than ``balance_abs`` and by a factor of more than ``balance_rel``. Otherwise
    the replica that was sent the longest matching prefix, if it is more than ``cache_threshold`` of the
    prompt, else the replica that was sent the least. Prompts leave its tree, the least recent first, when a
    replica has more than ``max_tree`` tokens."""

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
        max_tree: int = 2**24,
    ) -> None:
        super().__init__(max_tree)
        self._cache_threshold = cache_threshold
        self._balance_abs, self._balance_rel = balance_abs, balance_rel

    def _choose(self, call: RoutedRequest) -> ReplicaNumber:
        queues = [self.num_unfinished[replica] for replica in self.replicas]
        longest, shortest = max(queues), min(queues)
        if longest - shortest > self._balance_abs and longest > self._balance_rel * shortest:
            chosen = self._shortest(self.replicas)
        else:
            num_matched, owners = self._sent.match(call.key, call.run)
            if num_matched > self._cache_threshold * call.num_tokens and owners:
                chosen = next(iter(owners))
            else:
                chosen = self._sent.smallest()[0]
        self._sent.insert(call.key, call.run, chosen)
        return chosen


@dataclass(slots=True, eq=False)
class _Sent:
    """A part of prompts, below ``parent``, and the replicas that were sent it."""

    run: TokenRun
    parent: _Sent | None
    children: dict[TokenRun, _Sent] = field(default_factory=dict)
    owners: dict[ReplicaNumber, None] = field(default_factory=dict)


class SentTree:
    """The prompts that each replica was sent. ``max_tokens``: of a replica."""

    def __init__(self, max_tokens: int = 2**62) -> None:
        self.num_tokens: Counter[ReplicaNumber] = Counter()
        self._max_tokens = max_tokens
        self._roots: dict[Hashable, _Sent] = {}
        self._order: dict[ReplicaNumber, OrderedDict[_Sent, None]] = {}  # the least recently sent first

    def match(self, key: Hashable, run: TokenRun) -> tuple[int, Mapping[ReplicaNumber, None]]:
        """The length of the longest prefix that was sent, and the owners of the edge in which it ends."""
        node, done = self._roots.get(key), 0
        if node is None:
            return 0, {}
        while done < len(run):
            child = node.children.get(run[done : done + TOKEN_BYTES])
            if child is None or not child.owners:
                break
            piece = run[done : done + len(child.run)]
            done += len(piece) if piece == child.run else common_prefix_len(piece, child.run) * TOKEN_BYTES
            node = child
            if piece != child.run:
                break
        return done // TOKEN_BYTES, node.owners

    def insert(self, key: Hashable, run: TokenRun, replica: ReplicaNumber) -> None:
        """The replica is sent a prompt."""
        node, done = self._roots.setdefault(key, _Sent(b"", None)), 0
        order = self._order.setdefault(replica, OrderedDict())
        path: list[_Sent] = []
        while done < len(run):
            child = node.children.get(run[done : done + TOKEN_BYTES])
            if child is None:
                child = node.children[run[done : done + TOKEN_BYTES]] = _Sent(run[done:], node)
            else:
                piece = run[done : done + len(child.run)]
                if piece != child.run:
                    child = self._split(child, common_prefix_len(piece, child.run) * TOKEN_BYTES)
            if replica not in child.owners:
                child.owners[replica] = None
                self.num_tokens[replica] += len(child.run) // TOKEN_BYTES
            path.append(child)
            done += len(child.run)
            node = child
        for node in reversed(path):  # leaves leave first
            order[node] = None
            order.move_to_end(node)
        while self.num_tokens[replica] > self._max_tokens:
            self._disown(next(iter(order)), replica)

    def remove(self, replica: ReplicaNumber) -> None:
        """The replica is gone."""
        for node in [*self._order.get(replica, ())]:
            self._disown(node, replica)
        self.num_tokens.pop(replica, None)

    def smallest(self) -> list[ReplicaNumber]:
        """The replicas that were sent the fewest tokens."""
        least = min(self.num_tokens.values())
        return [replica for replica, count in self.num_tokens.items() if count == least]

    def _split(self, node: _Sent, size: int) -> _Sent:
        assert node.parent is not None
        upper = _Sent(node.run[:size], node.parent, owners=dict(node.owners))
        node.parent.children[upper.run[:TOKEN_BYTES]] = upper
        node.run, node.parent = node.run[size:], upper
        upper.children[node.run[:TOKEN_BYTES]] = node
        for replica in upper.owners:
            self._order[replica][upper] = None
        return upper

    def _disown(self, node: _Sent, replica: ReplicaNumber) -> None:
        del node.owners[replica]
        del self._order[replica][node]
        self.num_tokens[replica] -= len(node.run) // TOKEN_BYTES
        if not node.owners and not node.children and node.parent is not None:
            node.parent.children.pop(node.run[:TOKEN_BYTES], None)


NewRoutingPolicy = Callable[[], RoundRobin]
PUBLISHED_ROUTERS: Mapping[str, NewRoutingPolicy] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "consistent-hashing": ConsistentHashing,
    "ray": RayPrefixAware,
    "ray-32": lambda: RayPrefixAware(imbalanced_threshold=32),
    "sglang": SGLangCacheAware,
}
"""``ray-32``: with a limit on the difference of queues, which Ray leaves open."""
