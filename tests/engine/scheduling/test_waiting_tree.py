"""The waiting requests' tree against a reference that compares every request with every cached run."""

import gc
import random
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
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
from support.counted_lines import counted_lines
from support.engine.requests import request_of

from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.cache.token_run import TOKEN_BYTES, token_run
from agentflow.engine.request import Request
from agentflow.engine.scheduling.policies import waiting_tree
from agentflow.engine.scheduling.policies.waiting_tree import WaitingNode, WaitingTree
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
    def there_are_at_most_a_few_nodes_for_each_request(self):
        most = waiting_tree.SPARE_NODES + waiting_tree.NODES_PER_REQUEST * len(self.requests)
        assert num_nodes(self.tree) == self.tree._num_nodes <= most

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
        """A running request computes ``sequence``: requests that need tokens it has not computed yet wait."""
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


class SkippingMachine(WaitingTreeMachine):
    """The same in a tree whose walks skip edges from the second on."""

    constants: ClassVar = {"SKIPPED": 2, "MIN_SKIPPED": 1}

    def __init__(self) -> None:
        super().__init__()
        self.before = {name: getattr(waiting_tree, name) for name in self.constants}
        vars(waiting_tree).update(self.constants)

    def teardown(self):
        vars(waiting_tree).update(self.before)


TestSkips = SkippingMachine.TestCase


class JoiningMachine(SkippingMachine):
    """The same in a tree that joins edges whenever a request leaves."""

    constants: ClassVar = {**SkippingMachine.constants, "SPARE_NODES": 0, "NODES_PER_REQUEST": 0}

    @invariant()
    def there_are_at_most_a_few_nodes_for_each_request(self):
        """The nodes equal the nodes of a new tree with the same requests."""
        new = WaitingTree()
        for request in self.requests.values():
            new.add(request, request.reusable_run(), 0, self.ranks[request.id])
        assert num_nodes(self.tree) == self.tree._num_nodes == num_nodes(new)


TestJoins = JoiningMachine.TestCase


def num_nodes(tree: WaitingTree) -> int:
    """The number of nodes, without roots."""
    pending = [root for by_rank in tree.roots.values() for root in by_rank.values()]
    num = -len(pending)
    while pending:
        pending += pending.pop().children.values()
        num += 1
    return num


def nested(num_requests: int, order: str) -> list[Request]:
    """Requests each of which has the prompt of another one and one more token, in this order."""
    requests = [request_of(count, [*range(1, count + 2)], 1) for count in range(1, num_requests + 1)]
    if order == "longest first":
        requests.reverse()
    elif order == "shuffled":
        random.Random(1).shuffle(requests)
    return requests


@pytest.mark.parametrize("order", ["shortest first", "longest first", "shuffled"])
def test_nested_prompts_take_lines_almost_in_proportion_to_their_number(order):
    num_lines = {}
    for num_requests in (200, 800):
        requests, tree = nested(num_requests, order), WaitingTree()
        key, whole = requests[0].cache_key, max([request.reusable_run() for request in requests], key=len)
        with counted_lines() as lines:
            for request in requests:
                tree.add(request, request.reusable_run(), 0)
            for request in requests:
                assert tree.count_match(request) == 0
            for end in range(0, len(whole), 256):  # 64 tokens at a time, as a running prompt does
                tree.tokens_cached(key, whole[:end])
            tree.tokens_cached(key, whole)
            for request in requests:
                assert tree.count_match(request) == request.num_reusable
            for end in range(len(whole), 0, -256):
                tree.tokens_evicted(key, partial(bytes, whole[:end]), max(0, end - 256) // 4)
            for request in requests:
                tree.remove(request)
        num_lines[num_requests] = lines.num
    assert num_lines[800] < 8 * num_lines[200]  # 16 if each walk took each edge


def test_prompts_whose_paths_are_short_do_not_pay_for_skips():
    """115 lines each before walks could skip edges, 139 when one walk served short and long paths."""
    prompts = [[number % 20 + 1] * 30 + [1000 + number] * 10 for number in range(400)]  # 20 shared prefixes
    requests = [request_of(number, prompt, 1) for number, prompt in enumerate(prompts)]
    runs = [request.reusable_run() for request in requests]
    tree, key = WaitingTree(), requests[0].cache_key
    with counted_lines() as lines:
        for request, run in zip(requests, runs, strict=True):
            tree.add(request, run, 0)
        for run in runs[:20]:
            tree.tokens_cached(key, run[: 30 * TOKEN_BYTES])
        for request in requests:
            tree.count_match(request)
        for request, run in zip(requests, runs, strict=True):
            tree.remove(request)
            tree.tokens_cached(key, run)
    assert lines.num < 125 * len(requests)


@pytest.mark.parametrize("order", ["shortest first", "longest first", "shuffled"])
def test_a_waiting_prompt_keeps_few_nodes_of_the_prefixes_that_left(order):
    requests, tree = nested(1000, order), WaitingTree()
    for request in requests:
        tree.add(request, request.reusable_run(), 0)
    last = max(requests, key=lambda request: request.num_reusable)
    for request in requests:
        tree.count_match(request)  # makes skips to nodes that will go
    for request in requests:
        if request is not last:
            tree.remove(request)
    assert num_nodes(tree) <= waiting_tree.SPARE_NODES + waiting_tree.NODES_PER_REQUEST
    assert tree.count_match(last) == 0
    tree.tokens_cached(last.cache_key, last.run(700))
    assert tree.count_match(last) == 700
    assert tree.first(lambda request, match: False) == (last, 700)
    tree.remove(last)
    assert not tree.roots
    assert not tree._num_nodes


def test_requests_keep_their_order_when_edges_are_joined(monkeypatch):
    """Among equal matches, the request whose tokens were cached first goes first."""
    orders = []
    for spare_nodes in (64, 0):
        monkeypatch.setattr(waiting_tree, "SPARE_NODES", spare_nodes)
        monkeypatch.setattr(waiting_tree, "NODES_PER_REQUEST", min(4, spare_nodes))
        prompts = [[first, 2, 3, last, 5] for first in range(10) for last in range(2)]
        requests, tree = (
            [request_of(number, prompt, 1) for number, prompt in enumerate(prompts)],
            WaitingTree(),
        )
        for request in requests:
            tree.add(request, request.reusable_run(), 0)
        shuffled = random.Random(1).sample(requests, len(requests))
        for request in shuffled:
            tree.tokens_cached(request.cache_key, request.run(2))
        for request in shuffled[:8]:
            tree.remove(request)
        order = []
        while (found := tree.first(lambda request, match: False)) is not None:
            order.append(found[0].id)
            tree.remove(found[0])
        orders.append(order)
    assert orders[0] == orders[1]


def test_requests_that_left_leave_no_nodes_behind():
    """Even if others wait whose prompts are prefixes of theirs, and walks made skips."""

    def num_objects() -> int:
        gc.collect()
        return sum([type(one) is WaitingNode for one in gc.get_objects()])

    tree, before = WaitingTree(), num_objects()
    requests = nested(1000, "shortest first")
    for request in requests:
        tree.add(request, request.reusable_run(), 0)
    for request in requests:
        tree.count_match(request)
    for request in requests[:9:-1]:
        tree.remove(request)
    assert len(tree.nodes) == 10
    assert num_objects() - before < 20
