"""The cost of a request on each replica, against the same sums over lists of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentflow.cluster.routing import load
from agentflow.cluster.routing.load import EngineShape, Loads, RoutedRequest
from agentflow.engine.scheduling.step_limits import MAX_STRETCH, MIN_STEP_S, PROMPT_STEP_S
from agentflow.engine.simulator.cost_model import CostModel

COST = CostModel(base_s=5e-3, row_s=2e-5, logits_s=1e-6, read_s=2e-8, pair_s=1e-9)
SHAPES = [
    EngineShape(COST, max_running=3, kv_tokens=9_000),
    EngineShape(COST, max_running=8, kv_tokens=90_000, tpot_s=0.0051),  # steps are above the bound
    EngineShape(COST, max_running=256, kv_tokens=64_000, latency_tokens=2_000),
    EngineShape(COST, max_running=64, kv_tokens=90_000, tpot_s=0.010, keeps_tpot=True),
]
NUM_REPLICAS = 3
LATE_S = 4 * load.KEPT_S


@dataclass
class Reference:
    """One replica."""

    waiting: list[RoutedRequest] = field(default_factory=list)
    running: list[RoutedRequest] = field(default_factory=list)
    since: float = 0.0
    prompts: list[tuple[float, float]] = field(default_factory=list)  # that were placed: when, how long
    changed_s: float = 0.0
    mean_output: float = load.FIRST_OUTPUT  # of all replicas, when this one changed last
    cached: float = 0.0
    until_s: float = 0.0
    others: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)] * 2)

    @property
    def calls(self) -> list[RoutedRequest]:
        return self.waiting + self.running

    @property
    def num_readers(self) -> int:
        return sum(call.objective == "latency" for call in self.calls)

    @property
    def used(self) -> float:
        return sum(call.num_tokens - call.num_hit + call.output_tokens for call in self.calls)

    @property
    def step_s(self) -> float:
        read = sum(call.num_tokens + call.output_tokens / 2 for call in self.running)
        return COST.base_s + (COST.row_s + COST.logits_s) * len(self.running) + COST.read_s * read

    def prompt_part(self, bound_s: float) -> float:
        """The part of a step that prompts may take."""
        longest_s = max(
            min(max(MAX_STRETCH * self.step_s, MIN_STEP_S), bound_s), load.MIN_STRETCH * self.step_s
        )
        return 1 - self.step_s / longest_s

    def weight(self) -> float:
        """The weight of the requests that decode."""
        if not self.calls:
            return 0.0
        part = self.num_readers / len(self.calls)
        return len(self.running) * (part + load.THROUGHPUT * (1 - part))


class Cluster:
    """The replicas of ``Loads``, and the same as lists."""

    def __init__(self, shape: EngineShape) -> None:
        self.shape, self.loads = shape, Loads(shape)
        self.replicas = [Reference() for _ in range(NUM_REPLICAS)]
        self.now_s, self.throughput_at, self.mean_output = 1.0, -math.inf, float(load.FIRST_OUTPUT)
        for number in range(NUM_REPLICAS):
            self.loads.add(number)

    def placed(self, call: RoutedRequest, number: int, held: int) -> None:
        replica = self.replicas[number]
        self.loads.placed(call, number, held, self.now_s)
        replica.since = replica.since if replica.waiting else self.now_s
        replica.waiting.append(call)
        replica.prompts.append((self.now_s, call.prompt_s))
        replica.mean_output = self.mean_output
        replica.changed_s = self.now_s
        if call.objective == "throughput":
            self.throughput_at = self.now_s

    def started(self, number: int) -> None:
        replica = self.replicas[number]
        if replica.waiting:
            replica.running.append(replica.waiting.pop(0))
            replica.since = replica.changed_s = self.now_s
            replica.mean_output = self.mean_output
            self.loads.started(replica.running[-1], self.now_s)

    def ended(self, number: int, num_output: int) -> None:
        replica = self.replicas[number]
        if replica.running:
            call = replica.running.pop(0)
        elif replica.waiting:
            call = replica.waiting.pop(0)
            replica.since = self.now_s
        else:
            return
        replica.changed_s = self.now_s
        self.loads.ended(call, num_output, self.now_s)
        if num_output:
            self.mean_output += load.LEARNED_PART * (num_output - self.mean_output)
        replica.mean_output = self.mean_output

    def cost(
        self, call: RoutedRequest, number: int, hits: Mapping[int, int], popular: int, count: int, common: int
    ) -> tuple[float, float]:
        """The two terms of one replica."""
        one, shape, n, output = self.replicas[number], self.shape, call.num_tokens, call.output_tokens
        running, step_s = len(one.running), one.step_s
        free = PROMPT_STEP_S / (step_s + PROMPT_STEP_S)
        is_free = shape.keeps_tpot and running and not one.num_readers
        most = free if is_free else one.prompt_part(shape.tpot_s)
        share = most if running else 1.0
        ages = [(one.changed_s - placed_s, prompt_s) for placed_s, prompt_s in one.prompts]
        prompts = (
            sum(prompt_s * math.exp(-age_s / load.PROMPTS_S) for age_s, prompt_s in ages) / load.PROMPTS_S
        )
        stretch = 1 / (1 - min(prompts, most))
        # The queue, and the time until there is room.
        queue_s = sum(call.prompt_s for call in one.waiting) / share
        used = one.used / (load.FULL * shape.kv_tokens)
        turns = max(len(one.calls) + 1 - shape.max_running, len(one.calls) * (1 - 1 / used) if used else 0)
        room_s = max(0.0, turns) * one.mean_output * step_s / running if running else 0.0
        head_s = queue_s / max(1, len(one.waiting))
        wait_s = max(one.since + queue_s + room_s - self.now_s, queue_s - head_s + room_s)
        # The prompts. The first request computes ``missing`` tokens, and each other one at most the rest.
        missing = n - hits.get(number, 0)
        lasting = min(missing, n - popular)
        rest = (count - 1) * min(missing, n - common)
        lasting_rest = (count - 1) * min(lasting, n - max(common, popular))
        total, total_lasting = missing + rest, lasting + lasting_rest
        prompts_s = (COST.row_s / share + COST.pair_s * n) * total - total**2 * COST.pair_s / (2 * count)
        tenants = {call.tenant for replica in self.replicas for call in replica.waiting}
        if len(tenants) > 1:
            own_queue_s = sum(its.prompt_s for its in one.waiting if its.tenant == call.tenant)
            in_queue = {its.tenant for its in one.waiting} | {call.tenant}
            wait_s = min(wait_s, len(in_queue) * (own_queue_s + prompts_s))
        rows_s = output * count * (COST.row_s + COST.logits_s + COST.read_s * n)
        own = wait_s + prompts_s + output * step_s + rows_s
        # The time of others.
        weight = one.weight()
        mean = sum(replica.weight() for replica in self.replicas) / NUM_REPLICAS
        fill = min(1.0, max(one.cached, one.used) / shape.kv_tokens)
        delayed = load.THROUGHPUT * running if shape.keeps_tpot else weight
        others = total * COST.row_s * (delayed * stretch + load.REUSE * fill)
        others += total_lasting * COST.row_s * (1 + mean) * load.COMPUTED + rows_s * weight
        if step_s + COST.row_s > shape.tpot_s:
            others += output * (weight + 1) * step_s
        alone = own
        longer = max(0.0, alone - max(0.0, one.until_s - self.now_s))
        for until_s, its_weight in one.others:
            left = max(0.0, until_s - self.now_s)
            others += its_weight * min(longer, left)
            own += min(alone, left)
        if call.objective == "throughput":
            own *= load.THROUGHPUT
        if shape.latency_tokens < math.inf:
            work = [its for its in one.calls if its.objective == "throughput"]
            tokens = sum(its.num_tokens + its.output_tokens for its in work)
            if call.objective == "throughput":
                closed = one.num_readers and one.used > shape.latency_tokens
                own += one.mean_output * step_s if closed else 0.0
            elif not one.num_readers and tokens > shape.latency_tokens:
                others += output * len(work) * (1 - shape.latency_tokens / tokens) * step_s
        is_mixed = call.objective == "latency" and self.now_s - self.throughput_at <= load.KEPT_S
        if shape.keeps_tpot and is_mixed:
            lost = 1 - one.prompt_part(shape.tpot_s) / free
            others += output * load.MIXED * shape.tpot_s * lost / (1 + one.num_readers)
        return own, others


numbers = st.integers(0, NUM_REPLICAS - 1)
tokens = st.integers(1, 12_000)
begun = st.tuples(
    st.just("place"), numbers, tokens, st.floats(0, 0.9), st.booleans(), st.booleans(), st.booleans()
)
"""A request: its replica, length, part that is held, whether it is background work, of the second tenant, and
whether the first one that waits there has its first token then."""
changes = st.one_of(
    begun,
    st.tuples(st.just("end"), numbers, st.integers(0, 300)),
    st.tuples(st.just("cached"), numbers, st.integers(0, 90_000)),
    st.tuples(st.just("wait"), st.sampled_from([0.01, 0.3, LATE_S])),
)

other = st.tuples(st.floats(0, 2), st.integers(1, 3))
"""An engine of another model on a device: for how long it has requests, and how many."""


@pytest.mark.parametrize("shape", SHAPES, ids=["small", "bounded", "parrot", "kept"])
@examples(60)
@given(
    others=st.none() | st.lists(st.tuples(other, other), min_size=NUM_REPLICAS, max_size=NUM_REPLICAS),
    requests=st.lists(begun, min_size=1, max_size=12),
    steps=st.lists(changes, max_size=12),
    n=tokens,
    hits=st.dictionaries(numbers, st.floats(0, 0.99), max_size=NUM_REPLICAS),
    popular=st.floats(0, 0.9),
    count=st.integers(1, 5),
    common=st.floats(0, 1),
    background=st.booleans(),
)
def test_the_terms_are_sums_over_the_requests_of_a_replica(
    shape: EngineShape,
    others: list[tuple[tuple[float, int], tuple[float, int]]] | None,
    requests: list[Any],
    steps: list[Any],
    n: int,
    hits: dict[int, float],
    popular: float,
    count: int,
    common: float,
    background: bool,
) -> None:
    cluster = Cluster(shape)
    loads = cluster.loads
    if others:

        def on_load(number: int, until_s: float, weight: float) -> None:
            cluster.replicas[number].until_s = until_s

        loads.on_load = on_load
    for number, (what, *rest) in enumerate(requests + steps):
        if what == "place":
            replica, length, held, is_background, is_second, starts = rest
            call = request(number, length, is_background=is_background, tenant="ab"[is_second])
            cluster.placed(call, replica, int(held * length))
            if starts:
                cluster.started(replica)
        elif what == "end":
            cluster.ended(*rest)
        elif what == "cached":
            cluster.replicas[rest[0]].cached = rest[1]
            cluster.replicas[rest[0]].mean_output = cluster.mean_output
            loads.cached(*rest)
        elif what == "wait":
            cluster.now_s += rest[0]
    for replica, engines in enumerate(others or ()):
        for number, (left_s, weight) in enumerate(engines):
            loads.set_other(replica, number, cluster.now_s + left_s, weight)
            cluster.replicas[replica].others[number] = cluster.now_s + left_s, weight
    probe = request(99, n, is_background=background)
    held_tokens = {replica: int(part * n) for replica, part in hits.items()}
    shares = {"num_popular": int(popular * n), "count": count, "num_common": int(common * n)}
    terms = loads.terms(probe, held_tokens, cluster.now_s, **shares)
    for replica in range(NUM_REPLICAS):
        expected = cluster.cost(probe, replica, held_tokens, *shares.values())
        found = float(terms.own[replica]), float(terms.others[replica])
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert np.isinf(terms.own[NUM_REPLICAS:]).all()  # no replica has these numbers


def request(number: int, length: int, *, is_background: bool, tenant: str = "a") -> RoutedRequest:
    run = np.full(length, number, dtype=np.int32).tobytes()
    call = RoutedRequest(number, "key", run, output_tokens=50, tenant=tenant)
    call.objective = "throughput" if is_background else "latency"
    return call
