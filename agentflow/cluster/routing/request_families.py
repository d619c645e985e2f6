"""The work that requests will bring which continue others: the later turns of a conversation or an agent, the
branches of a tree.

A request *continues a family* if its prompt begins with the whole prompt with which the family began. It
*begins a family* if no prefix ties it to few replicas: less than half of its prompt is held anywhere, or more
than half of the replicas hold about as much of it. The requests that continue it will go where it is. So the
choice of its replica decides where all of them run, and the load that the replica has at this moment says
little about the load that they will meet: a replica with the fewest requests may have the most families,
which have just begun.

``RequestFamilies`` learns how many requests continue a family of a kind (those that begin with the same
tokens), for how long, and how much work each of them is. A replica *expects* the remaining work of its
families. To begin a family there costs::

    requests that will continue it * their mean time * (work that the replica expects / lifetime of a family)

in seconds: the last factor is the part of the time that the others will take from the family. Where requests
continue nothing, or all replicas expect as much, this changes nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from agentflow.cluster.routing.prefix_tree import Match, PromptKind, ReplicaNumber, RequestFamily

SecondsArray = NDArray[np.float64]

WEIGHT = 1.0
REMEMBERED = 1024
"""Means follow about this many of the latest requests."""
KNOWN_FAMILIES = 8
"""A kind with fewer families is expected to be like all others."""
MAX_KINDS = 4096
LIFETIMES = 2.0
"""After this many lifetimes, the remaining work of a family is expected less and less."""


class RequestFamilies:
    """The families on all replicas."""

    def __init__(self) -> None:
        self._expected: SecondsArray = np.zeros(8)  # requests, by replica
        self._expected_at = 0.0  # they have been reduced up to this time
        self._all = PromptKind()
        self._kinds: OrderedDict[Hashable, PromptKind] = OrderedDict()
        self._age_s = _Mean()  # of a family when a request continues it
        self._request_s = _Mean()  # from the placement of a request to its end
        self._work_s = _Mean()  # the engine's time for a request

    def num_followers(self, kind: Hashable) -> float:
        """How many requests continue a family of the kind."""
        known = self._kinds.get(kind)
        if known is None or known.num_begun < KNOWN_FAMILIES:
            known = self._all
        return known.num_continued / known.num_begun if known.num_begun else 0.0

    @property
    def _lifetime_s(self) -> float:
        return 2 * self._age_s.value

    def add(self, replica: ReplicaNumber) -> None:
        """A replica joins, without families."""
        if replica >= len(self._expected):
            size = max(replica + 1, 2 * len(self._expected))
            self._expected = np.pad(self._expected, (0, size - len(self._expected)))
        self._expected[replica] = 0.0

    def delay_s(self, kind: Hashable, size: int, now_s: float) -> SecondsArray | None:
        """The cost of a new family of the kind on each of ``size`` replicas; None: nothing."""
        lifetime_s, followers = self._lifetime_s, self.num_followers(kind)
        if not followers or not lifetime_s:
            return None
        self._reduce(now_s)
        taken_s = self._work_s.value / lifetime_s
        factor: float = WEIGHT * followers * self._request_s.value * taken_s
        return factor * self._expected[:size]

    def began(self, kind: Hashable, replica: ReplicaNumber, now_s: float) -> RequestFamily:
        """A request that begins a family of the kind was sent to the replica."""
        known = self._kinds.pop(kind, None) or PromptKind()
        self._kinds[kind] = known
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        for one in (self._all, known):
            _count(one, begins=True)
        self._reduce(now_s)
        followers = self.num_followers(kind)
        self._expected[replica] += followers
        return RequestFamily(replica, now_s, followers, known)

    def continued(self, family: RequestFamily, now_s: float) -> None:
        """A request was placed that continues a family."""
        for one in (self._all, family.kind):
            _count(one, begins=False)
        self._age_s.add(now_s - family.began_s)
        if family.num_expected > 0:
            self._reduce(now_s)
            number = min(1.0, family.num_expected)
            family.num_expected -= number
            left = self._expected[family.replica] - number
            self._expected[family.replica] = max(0.0, left)

    def ended(self, request_s: float, work_s: float) -> None:
        """A request has ended, after this time and with this much work for the engine."""
        self._request_s.add(request_s)
        self._work_s.add(work_s)

    def _reduce(self, now_s: float) -> None:
        """Expects less of families that have had no request for long."""
        passed_s = now_s - self._expected_at
        if passed_s > 0:
            self._expected_at = now_s
            if self._lifetime_s:
                self._expected *= math.exp(-passed_s / (LIFETIMES * self._lifetime_s))


def begins_family(match: Match, num_tokens: int, num_replicas: int) -> bool:
    """Whether a request of ``num_tokens`` tokens begins a family."""
    if match.family is not None:
        return False
    most = max(match.hits.values(), default=0)
    if 2 * most < num_tokens:
        return True
    if 2 * len(match.hits) <= num_replicas:
        return False
    return 2 * sum([2 * hit >= most for hit in match.hits.values()]) > num_replicas


def _count(kind: PromptKind, *, begins: bool) -> None:
    keep = 1 - 1 / REMEMBERED
    kind.num_begun = keep * kind.num_begun + begins
    kind.num_continued = keep * kind.num_continued + (not begins)


class _Mean:
    """The mean of the latest values."""

    def __init__(self) -> None:
        self.value, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._count = min(REMEMBERED, self._count + 1)
        self.value += (value - self.value) / self._count
