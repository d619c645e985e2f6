"""Tenants that use two engines of one model, which report their charges."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.requests import request_of

from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling.policies.charges import AWAY_S, Absent, Charged
from agentflow.engine.scheduling.policies.fair_policy import FairLongestPrefix
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.protocol.sampling import SamplingParams

BUDGET, SIZE, OUTPUT = 16, 40, 4


class Engine:
    """A scheduler that never runs out of requests of its tenants."""

    def __init__(self, number: int, **weights: float) -> None:
        self.now_s = 0.0
        config = SchedulerConfig(max_running=8, token_budget=BUDGET)
        self.scheduler = Scheduler(num_slots=2000, max_context=256, config=config, clock=lambda: self.now_s)
        self.scheduler.waiting.charged = Charged()
        self.runner = FakeRunner(num_slots=2000, max_context=256)
        self.weights = weights
        self.number = number * 1_000_000
        self.done: Counter[str] = Counter()  # tokens of finished requests, by tenant

    def step(self) -> tuple[list[tuple[str, float]], list[tuple[str, int, int]]]:
        """Runs a step, and returns its charges."""
        waiting = Counter(request.tenant for request in self.scheduler.waiting)
        for tenant, weight in self.weights.items():
            while waiting[tenant] < 4:
                waiting[tenant] += 1
                self.add(tenant, weight)
        batch = self.scheduler.schedule()
        assert batch is not None
        for row in self.scheduler.complete(run_batch(self.runner, batch)):
            if row.request.num_generated == OUTPUT:
                self.scheduler.release(row.request)
                self.done[row.request.tenant] += SIZE + OUTPUT
        assert self.scheduler.waiting.charged is not None
        return self.scheduler.waiting.charged.take()

    def add(self, tenant: str, weight: float = 1.0) -> None:
        self.number += 1
        tokens = np.arange(self.number * SIZE, (self.number + 1) * SIZE, dtype=np.int32) % 20_000
        tokens[0] = self.number % 19_000
        self.scheduler.add(
            request_of(self.number, tokens, OUTPUT, SamplingParams(), tenant=tenant, weight=weight)
        )


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_tenant_with_two_engines_has_its_weight_once(weight: float) -> None:
    """One tenant has requests on both engines, the other one on the second only. Together they get tokens by
    their weights, as far as the second engine can balance the first."""
    first, second = Engine(0, one=weight), Engine(1, one=weight, two=1.0)
    for _ in range(900):
        charges = first.step(), second.step()
        for engine, (tenants, _) in zip((second, first), charges, strict=True):
            for tenant, used in tenants:
                engine.scheduler.waiting.charge_elsewhere(tenant, used)
    total = first.done + second.done
    assert total["one"] / total["two"] == pytest.approx(weight, rel=0.1)
    assert second.done["two"] > 2 * second.done["one"] or weight > 1


def test_a_tenant_that_is_absent_owes_what_others_computed_until_it_is_idle_everywhere() -> None:
    engine = Engine(0, other=1.0)
    for _ in range(10):
        engine.step()
    engine.scheduler.waiting.charge_elsewhere("busy", 400.0)
    engine.now_s += AWAY_S / 2
    engine.scheduler.waiting.charge_elsewhere("busy", 600.0)
    engine.now_s += AWAY_S
    engine.weights["busy"] = 1.0
    engine.done.clear()
    while engine.done["other"] < 900:
        engine.step()
        assert not engine.done["busy"]
    idle = Engine(0, other=1.0)
    for _ in range(10):
        idle.step()
    idle.scheduler.waiting.charge_elsewhere("idle", 1000.0)
    idle.now_s += 1.1 * AWAY_S
    idle.weights["idle"] = 1.0
    while not idle.done["idle"]:
        idle.step()
        assert idle.done["other"] < 900


def test_a_new_tenant_begins_at_the_charge_of_those_that_others_serve() -> None:
    """Otherwise it would go before a busy tenant for as long as that has been busy."""
    engine = Engine(0)
    engine.scheduler.waiting.charge_elsewhere("busy", 5000.0)
    engine.weights["new"] = 1.0
    engine.step()
    engine.weights["busy"] = 1.0
    for _ in range(100):
        engine.step()
    assert engine.done["busy"] == pytest.approx(engine.done["new"], rel=0.3)


def test_service_of_a_program_on_other_engines_counts() -> None:
    engine = Engine(0)
    tokens = np.arange(SIZE, dtype=np.int32)
    request = request_of(1, tokens, OUTPUT, SamplingParams(), tenant="one", program=7)
    engine.scheduler.add(request)
    engine.scheduler.waiting.program_elsewhere("one", 7, 1000)
    engine.scheduler.waiting.program_elsewhere("one", 8, 1000)  # has no requests here
    _, programs = engine.step()
    assert programs == [("one", 7, BUDGET)]
    policy = engine.scheduler.waiting
    assert policy._programs["one", 7].num_tokens == 1000 + BUDGET
    assert ("one", 8) not in policy._programs


@given(data=st.data())
def test_charges_of_absent_tenants_follow_a_plain_list(data: st.DataObject) -> None:
    now_s = 0.0
    absent = Absent(lambda: now_s)
    expected: dict[str, tuple[float, float]] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        now_s += data.draw(st.sampled_from([0.0, 0.0, 0.5, AWAY_S]))
        name = data.draw(st.sampled_from("abcde"))
        current = {tenant: used for tenant, (used, at_s) in expected.items() if at_s >= now_s - AWAY_S}
        match data.draw(st.sampled_from(["set", "set", "pop", "least"])):
            case "set":
                used = float(data.draw(st.integers(0, 5)))
                absent.set(name, used)
                expected[name] = used, now_s
            case "pop":
                assert absent.pop(name) == current.get(name, 0.0)
                expected.pop(name, None)
            case "least":
                assert absent.least() == min(current.values(), default=math.inf)
        assert len(absent._by_charge) <= 2 * 5 + 8


def test_a_tenant_that_ends_its_requests_keeps_its_charge_while_others_may_serve_it() -> None:
    now_s = 0.0
    policy = FairLongestPrefix(lambda identity, run: 0, BUDGET, clock=lambda: now_s)
    policy.charged = Charged()
    requests = [request_of(number, np.arange(SIZE), 1, tenant="busy") for number in range(3)]
    policy.add(request_of(9, np.arange(SIZE), 1, tenant="other"))
    policy.add(requests[0])
    policy.admit(requests[0])
    policy.charge(requests[0], 400)
    policy.finish(requests[0])
    for made, away_s, used in ((requests[1], AWAY_S, 400), (requests[2], 1.1 * AWAY_S, 0)):
        now_s += away_s
        policy.add(made)
        assert policy._tenants["busy"].used == used
        policy.remove(made)
