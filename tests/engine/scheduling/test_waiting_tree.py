"""The waiting requests' tree against a reference that compares every request with every cached run."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from support.engine.requests import request_of

from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.cache.token_run import token_run
from agentflow.engine.request import Request
from agentflow.engine.scheduling.policies.waiting_tree import WaitingTree
from agentflow.protocol.sampling import SamplingParams

sequences = st.lists(st.integers(0, 1), min_size=1, max_size=10)
salts = st.sampled_from(["", "salt"])
ranks = st.sampled_from([(0,), (0,), (1,)])


def prefix_len(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class WaitingTreeMachine(RuleBasedStateMachine):
    """Arrivals, departures, and a real cache that gets more tokens and loses some."""

    waiting = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.tree = WaitingTree()
        self.cache = RadixCache()
        self.requests: dict[int, Request] = {}
        self.ranks: dict[int, tuple[int]] = {}
        self.slots = iter(range(100_000))
        self.in_progress: list[tuple[str, list[int]]] = []

    def match(self, request: Request) -> int:
        return self.cache.peek(request.cache_key, request.reusable_run())

    def place(self, request: Request) -> tuple[tuple[int], int]:
        return self.ranks[request.id], -self.match(request)

    @initialize(
        target=waiting,
        computed=st.lists(st.tuples(salts, sequences), min_size=1, max_size=4),
        arriving=st.lists(st.tuples(salts, sequences, ranks), min_size=3, max_size=8),
    )
    def fill(self, computed, arriving):
        for of_one in computed:
            self.compute(*of_one)
        return multiple(*[self.arrive(*of_one) for of_one in arriving])

    @rule(target=waiting, salt=salts, sequence=sequences, rank=ranks)
    def arrive(self, salt, sequence, rank):
        tokens = np.array([*sequence, 9], dtype=np.int32)  # the last token is never reusable
        request = request_of(len(self.requests), tokens, 1, SamplingParams(), salt=salt)
        while request.id in self.requests:
            request.id += 1
        self.requests[request.id] = request
        self.ranks[request.id] = rank
        self.tree.add(request, request.reusable_run(), self.match(request), rank)
        self.start_step()
        return request

    @rule(request=consumes(waiting))
    def leave(self, request):
        del self.requests[request.id]
        self.tree.remove(request)

    @rule(salt=salts, sequence=sequences)
    def compute(self, salt, sequence):
        identity = request_of(0, np.zeros(1, np.int32), 1, SamplingParams(), salt=salt).cache_key
        run = token_run(np.array(sequence, dtype=np.int32))
        slots = np.array([next(self.slots) for _ in sequence], dtype=np.int32)
        self.cache.extend(self.cache.match(identity, b""), identity, run, slots)
        self.tree.tokens_cached(identity, run)
        self.start_step()

    @rule(count=st.sampled_from([1, 2, 3, 12]))
    def evict(self, count):
        self.cache.evict(count, self.tree.tokens_evicted)
        self.start_step()

    @invariant()
    def every_match_is_known(self):
        assert len(self.tree.nodes) == len(self.requests)
        for request in self.requests.values():
            assert self.tree.count_match(request) == self.match(request)

    @invariant()
    def the_first_that_is_not_blocked_is_found(self):
        free = [request for request in self.requests.values() if not self.is_blocked(request, None)]
        found = self.tree.first(self.is_blocked)
        assert (found is None) == (not free)
        if found is not None:
            assert found[0] in free
            assert found[1] == self.match(found[0])
            assert self.place(found[0]) == min(map(self.place, free))

    def is_blocked(self, request: Request, match: int | None) -> bool:
        known = self.match(request)
        assert match in (None, known)
        wanted = np.frombuffer(request.reusable_run(), np.int32).tolist()
        return request.is_held_back or any(
            request.cache_key.salt == salt and prefix_len(wanted, sequence) > known
            for salt, sequence in self.in_progress
        )

    @rule(salt=salts, sequence=sequences)
    def admit(self, salt, sequence):
        """A running request computes ``sequence``: those that need what it has not computed yet wait."""
        self.in_progress.append((salt, sequence))

    @rule(request=waiting)
    def hold_back(self, request):
        request.is_held_back = True

    @rule()
    def start_step(self):
        for request in self.requests.values():
            request.is_held_back = False
        self.in_progress.clear()
        self.tree.start_step()


TestWaitingTree = WaitingTreeMachine.TestCase
