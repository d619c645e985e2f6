"""Places requests on the replicas of one model.

The order follows Algorithm 1 of "Parrot" (Lin et al., OSDI 2024, section 5.4): requests in topological
order; a task group is placed as a whole; a request follows those that share its prefix, in a queue or
running, if that costs least; otherwise it goes alone. ``FindEngine`` of the paper is the replica with the
least cost (``load``), which has the tokens that a hit saves, the queue, the batch and the memory of each
replica in seconds. So a fork stays where its prefix is, and leaves when waiting there costs more than to
compute the prefix again elsewhere.

A task group is divided over replicas where its last member would end later on one: each part computes the
prefix that they share. Unlike the paper's engines, a replica batches whatever it runs, so a group gains
nothing else from one place.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import numpy as np

from agentflow.cluster.routing.feed import Follower, Update
from agentflow.cluster.routing.load import EngineShape, Loads, RoutedRequest
from agentflow.cluster.routing.prefix_tree import Match, PrefixTree, ReplicaNumber, RequestFamily
from agentflow.cluster.routing.request_families import RequestFamilies, begins_family
from agentflow.engine.cache.blocks import BLOCK_TOKENS, BlocksStored
from agentflow.engine.cache.token_run import TOKEN_BYTES, common_prefix_len
from agentflow.errors import Overloaded

AFFINITY_S = 1e-3
"""The preference for the replica of a program's latest request, and so for the replica of a task group."""
MAX_REMEMBERED = 65_536
"""Programs and task groups whose replica is remembered."""


class RoutingPolicy(Protocol):
    """Chooses replicas. The caller reports each placed request: its first token (``started``), and when it
    left its replica (``ended``)."""

    reads_feed: bool
    """Whether it reads the reports of the replicas' caches."""

    def add(self, replica: ReplicaNumber) -> None:
        """A replica joins."""

    def lose(self, replica: ReplicaNumber) -> None:
        """A replica is gone. Its requests end before or later."""

    def receive(self, update: Update) -> bool:
        """Reads a report. Returns False if a snapshot is needed."""

    def place(self, calls: Sequence[RoutedRequest], now_s: float) -> None:
        """Sets the ``replica`` of requests that came together, to none that they bar. The members of a task
        group bar the same replicas."""

    def started(self, call: RoutedRequest, now_s: float) -> None:
        """A request has its first token."""

    def ended(self, call: RoutedRequest, num_output: int, now_s: float) -> None:
        """A request left its replica, with this many generated tokens; 0: it did not end by itself."""


def units(calls: Sequence[RoutedRequest]) -> Sequence[Sequence[RoutedRequest]]:
    """The units of placement in topological order: requests without a task group, and task groups."""
    if len(calls) == 1:
        return [calls]
    found: list[list[RoutedRequest]] = []
    groups: dict[Hashable, list[RoutedRequest]] = {}
    for call in sorted(calls, key=lambda call: call.rank):
        if call.task_group in groups:
            groups[call.task_group].append(call)
            continue
        found.append([call])
        if call.task_group is not None:
            groups[call.task_group] = found[-1]
    return found


class Router:
    """Places requests by one cost.

    Args:
        shape: The shape of each engine.
        model: The identity of the model.
        divides_groups: Task groups may be divided; False: never, as in the paper.
    """

    reads_feed = True

    def __init__(self, shape: EngineShape, model: str = "", *, divides_groups: bool = True) -> None:
        self.tree = PrefixTree(model)
        self.loads = Loads(shape)
        self.families = RequestFamilies()
        self._divides_groups = divides_groups
        self._followers: dict[ReplicaNumber, Follower] = {}
        self._num_cached: dict[ReplicaNumber, int] = {}  # reported tokens
        self._last_replica: dict[tuple[str, Hashable], ReplicaNumber] = {}  # of programs and task groups

    def add(self, replica: ReplicaNumber) -> None:
        """A replica joins, without requests. It may have been lost before, and requests of that time may
        not have ended."""
        if replica not in self._followers:
            self._followers[replica] = Follower(self.tree, replica)
        self._num_cached[replica] = 0
        self.loads.add(replica)
        self.families.add(replica)

    def lose(self, replica: ReplicaNumber) -> None:
        """A replica is gone, with its cache."""
        self.loads.remove(replica)
        self._followers[replica].lost()
        self._num_cached[replica] = 0

    def forget(self, replica: ReplicaNumber) -> None:
        """A replica's cache is gone. Its requests in progress stay until they end."""
        self._followers[replica].lost()
        self._num_cached[replica] = 0
        self.loads.cached(replica, 0)

    def receive(self, update: Update) -> bool:
        """Reads a report. Returns False if a snapshot is needed."""
        follower = self._followers[update.replica]
        is_right = follower.receive(update)
        num_blocks = sum(
            len(change.digests) if isinstance(change, BlocksStored) else -len(change.digests)
            for change in update.changes
        )
        before = 0 if update.is_snapshot else self._num_cached[update.replica]
        self._num_cached[update.replica] = max(0, before + BLOCK_TOKENS * num_blocks)
        self.loads.cached(update.replica, self._num_cached[update.replica])
        return is_right

    def place(self, calls: Sequence[RoutedRequest], now_s: float) -> None:
        """Sets the ``replica`` of requests that came together. Raises ``Overloaded`` without replicas."""
        if len(calls) == 1:
            self._place_one(calls[0], now_s)
            return
        for unit in units(calls):
            if len(unit) == 1:
                self._place_one(unit[0], now_s)
            else:
                self._place_group(unit, now_s)

    def started(self, call: RoutedRequest, now_s: float) -> None:
        """A request has its first token."""
        self.loads.started(call, now_s)

    def ended(self, call: RoutedRequest, num_output: int, now_s: float) -> None:
        """A request left its replica, with this many generated tokens; 0: it did not end by itself."""
        self.loads.ended(call, num_output, now_s)
        if num_output:
            self.families.ended(now_s - call.placed_s, self.loads.work_s(call, num_output))
        self.tree.end(call.replica, call.key, call.run)

    def _place_one(self, call: RoutedRequest, now_s: float) -> None:
        match = self.tree.match(call.key, call.run)
        own, others = self.loads.terms(call, match.hits, now_s, num_popular=match.num_popular)
        own += others
        begins = begins_family(match, call.num_tokens, self.loads.num_replicas)
        if begins and (delay_s := self.families.delay_s(call.kind, len(own), now_s)) is not None:
            own += delay_s
        for place in (("program", call.program), ("group", call.task_group)):
            if place[1] is not None and (last := self._last_replica.get(place)) is not None:
                own[last] -= AFFINITY_S
        replica = int(own.argmin())
        self._send(call, replica, float(own[replica]), match.hits, now_s)
        if begins:
            self.tree.mark(call.key, call.run, self.families.began(call.kind, replica, now_s))
        elif match.family is not None:
            self.families.continued(match.family, now_s)

    def _place_group(self, members: Sequence[RoutedRequest], now_s: float) -> None:
        """Places a task group on 1, 2, 4, … replicas: the number with the least cost."""
        first, count = members[0], len(members)
        matches = [self.tree.match(call.key, call.run) for call in members]
        hits = [match.hits for match in matches]
        num_popular = min([match.num_popular for match in matches])
        longest = max(members, key=lambda call: len(call.run))
        num_common = min(common_prefix_len(first.run, call.run) for call in members[1:])
        mean_hits = _mean(hits)
        num_replicas = self.loads.num_replicas
        common_match = Match(mean_hits, num_popular, matches[0].family)
        begins = begins_family(common_match, longest.num_tokens, num_replicas)
        best: tuple[float, list[ReplicaNumber]] | None = None
        parts = 1
        while parts <= min(count, num_replicas):
            size = -(-count // parts)
            own, others = self.loads.terms(
                longest, mean_hits, now_s, num_popular=num_popular, count=size, num_common=num_common
            )
            if begins and (delay_s := self.families.delay_s(first.kind, len(own), now_s)) is not None:
                others += delay_s / parts
            total = count * own + others
            chosen = np.argpartition(total, parts - 1)[:parts]
            cost = count * float(own[chosen].max()) + float(others[chosen].sum())
            if best is None or cost < best[0]:
                best = cost, chosen[np.argsort(total[chosen], kind="stable")].tolist()
            if not self._divides_groups:
                break
            parts *= 2
        if best is None or best[0] == np.inf:
            raise _no_replica()
        size = -(-count // len(best[1]))
        common = first.run[: num_common * TOKEN_BYTES]
        is_one = 2 * num_common >= longest.num_tokens  # family in each part, not one for each member
        family: RequestFamily | None = None
        for number, (call, match) in enumerate(zip(members, matches, strict=True)):
            replica, its_hits = best[1][number // size], match.hits
            if number % size:
                its_hits = {**its_hits, replica: max(its_hits.get(replica, 0), num_common)}
            self._send(call, replica, 0.0, its_hits, now_s)
            if begins and not (is_one and number % size):
                family = self.families.began(call.kind, replica, now_s)
                self.tree.mark(call.key, common if is_one else call.run, family)
            elif (family := family if begins else match.family) is not None:
                self.families.continued(family, now_s)

    def _send(
        self,
        call: RoutedRequest,
        replica: ReplicaNumber,
        cost: float,
        hits: Mapping[ReplicaNumber, int],
        now_s: float,
    ) -> None:
        if cost == np.inf:
            raise _no_replica()
        self.loads.placed(call, replica, hits.get(replica, 0), now_s)
        self.tree.begin(replica, call.key, call.run)
        for place in (("program", call.program), ("group", call.task_group)):
            if place[1] is not None:
                self._last_replica.pop(place, None)
                self._last_replica[place] = replica
                if len(self._last_replica) > MAX_REMEMBERED:
                    del self._last_replica[next(iter(self._last_replica))]


def _mean(hits: Sequence[Mapping[ReplicaNumber, int]]) -> dict[ReplicaNumber, int]:
    """The mean hit of several requests on each replica."""
    total: dict[ReplicaNumber, int] = {}
    for one in hits:
        for replica, num_tokens in one.items():
            total[replica] = total.get(replica, 0) + num_tokens
    return {replica: num_tokens // len(hits) for replica, num_tokens in total.items()}


def _no_replica() -> Overloaded:
    return Overloaded("no replica serves this model now; try again when one has started")
