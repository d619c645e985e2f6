"""Limits of tenants per minute, against a twin that keeps every event and replays them all, exactly."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.clocks import ClockNs
from support.examples import times

from agentflow.engine.tenant import AdmittedRequest, Tenant
from agentflow.errors import Overloaded, RateLimited
from agentflow.server.tenants import rate_limit
from agentflow.server.tenants.rate_limit import MINUTE_NS, BucketState, TenantGate


@dataclass
class PlainLimits:
    """The reference for one tenant: the times of its requests and of their ends."""

    tenant: Tenant
    events: list[tuple[int, int, int]] = field(default_factory=list)  # (when, requests, tokens)
    num_unfinished: int = 0

    def takes(self, now_ns: int) -> bool:
        if self.num_unfinished >= (self.tenant.max_unfinished or 10**9):
            return False
        limits = ((self.tenant.requests_per_minute, 1), (self.tenant.tokens_per_minute, 2))
        return all(limit is None or self._left(limit, column, now_ns) >= 1 for limit, column in limits)

    def shows(self, state: BucketState | None, limit: int | None, column: int, now_ns: int) -> None:
        """Compares the state of one limit, and its estimate of the time until the limit is full again."""
        if limit is None:
            assert state is None
            return
        assert state is not None
        assert state.limit == limit
        assert state.remaining == max(0, math.floor(self._left(limit, column, now_ns)))
        assert self._left(limit, column, now_ns + state.reset_ns) == limit
        if state.reset_ns:
            assert self._left(limit, column, now_ns + state.reset_ns - 1) < limit

    def _left(self, limit: int, column: int, now_ns: int) -> Fraction:
        left, before_ns = Fraction(limit), now_ns
        for event in [*self.events, (now_ns, 0, 0)]:
            left += limit * Fraction(max(0, event[0] - before_ns), MINUTE_NS)
            left = min(Fraction(limit), left) - event[column]
            left = min(Fraction(limit), left)
            before_ns = event[0]
        return left


limits = st.none() | st.integers(1, 5) | st.sampled_from([60, 1000, 10**9])
tenants = st.builds(
    Tenant,
    st.sampled_from("abc"),
    requests_per_minute=limits,
    tokens_per_minute=limits,
    max_unfinished=st.none() | st.integers(1, 3),
)


class TenantGateMachine(RuleBasedStateMachine):
    """Requests of three tenants arrive, end and fail over time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ClockNs()
        self.gate = TenantGate(self.clock)
        self.twins: dict[str, PlainLimits] = {}
        self.open: list[tuple[AbstractContextManager[AdmittedRequest], AdmittedRequest, PlainLimits]] = []

    @initialize(given=st.lists(tenants, min_size=3, max_size=3, unique_by=lambda tenant: tenant.name))
    def begin(self, given: list[Tenant]) -> None:
        self.twins = {tenant.name: PlainLimits(tenant) for tenant in given}

    @rule(name=st.sampled_from("aab"), prompt_tokens=st.sampled_from([0, 1, 3, 50, 5000]))
    def come(self, name: str, prompt_tokens: int) -> None:
        twin = self.twins[name]
        request = self.gate.request(twin.tenant, prompt_tokens)
        if not twin.takes(self.clock.now_ns):
            self.be_refused(request, twin, prompt_tokens)
            return
        admitted = request.__enter__()
        twin.events.append((self.clock.now_ns, 1, prompt_tokens))
        twin.num_unfinished += 1
        self.open.append((request, admitted, twin))

    def be_refused(
        self, request: AbstractContextManager[AdmittedRequest], twin: PlainLimits, prompt_tokens: int
    ) -> None:
        with pytest.raises(RateLimited) as caught, request:
            raise AssertionError("let in")
        retry_after_s = caught.value.retry_after_s
        if retry_after_s is None:
            assert twin.num_unfinished == twin.tenant.max_unfinished
            return
        then_ns = self.clock.now_ns + round(retry_after_s * 1e9)
        assert twin.takes(then_ns)
        assert not twin.takes(then_ns - 1)

    @rule(which=st.integers(0, 9), output=st.integers(0, 40), cached=st.integers(0, 60), fails=st.booleans())
    def end(self, which: int, output: int, cached: int, fails: bool) -> None:
        if not self.open:
            return
        request, admitted, twin = self.open.pop(which % len(self.open))
        admitted.output_tokens, admitted.cached_tokens = output, cached
        fault = ZeroDivisionError() if fails else None
        assert not request.__exit__(type(fault) if fault else None, fault, None)  # raised again
        twin.num_unfinished -= 1
        charged = output - min(cached, admitted.prompt_tokens)
        twin.events.append((self.clock.now_ns, 0, charged))

    @rule(passed_ns=st.sampled_from([0, 1, 10**6, 10**9, 20 * 10**9, MINUTE_NS, 10 * MINUTE_NS]))
    def wait(self, passed_ns: int) -> None:
        self.clock.now_ns += passed_ns

    @invariant()
    def unfinished_requests_are_counted(self) -> None:
        for twin in self.twins.values():
            assert self.gate.num_unfinished(twin.tenant) == twin.num_unfinished

    @invariant()
    def what_is_left_is_what_is_admitted(self) -> None:
        now_ns = self.clock.now_ns
        for twin in self.twins.values():
            state, tenant = self.gate.state(twin.tenant), twin.tenant
            twin.shows(state.requests, tenant.requests_per_minute, 1, now_ns)
            twin.shows(state.tokens, tenant.tokens_per_minute, 2, now_ns)
            if tenant.max_unfinished is None:
                shown = [one for one in (state.requests, state.tokens) if one is not None]
                assert twin.takes(now_ns) == all(one.remaining for one in shown)


TestTenantGate = TenantGateMachine.TestCase
TestTenantGate.settings = settings(max_examples=times(75), stateful_step_count=40)


def use(
    gate: TenantGate,
    tenant: Tenant,
    prompt: int = 0,
    output: int = 0,
    *,
    cached: int = 0,
    fault: Exception | None = None,
) -> None:
    """One request from its beginning to its end."""
    with gate.request(tenant, prompt) as admitted:
        admitted.output_tokens, admitted.cached_tokens = output, cached
        if fault is not None:
            raise fault


def refusal(gate: TenantGate, tenant: Tenant, prompt: int = 0) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        use(gate, tenant, prompt)
    return caught.value


@given(
    per_minute=st.integers(1, 12),
    gaps_ns=st.lists(st.integers(0, 10 * 10**9), min_size=30, max_size=60),
)
def test_in_any_span_no_more_requests_are_let_in_than_promised(per_minute: int, gaps_ns: list[int]) -> None:
    clock = ClockNs()
    gate = TenantGate(clock)
    tenant = Tenant("ann", requests_per_minute=per_minute)
    taken_ns = []
    for gap_ns in gaps_ns:
        clock.now_ns += gap_ns
        try:
            use(gate, tenant)
        except RateLimited:
            continue
        taken_ns.append(clock.now_ns)
    for first, begin_ns in enumerate(taken_ns):
        for count, end_ns in enumerate(taken_ns[first:], 1):
            assert count <= per_minute * (1 + Fraction(end_ns - begin_ns, MINUTE_NS))


def test_a_refusal_says_which_limit_and_when_there_is_room() -> None:
    clock = ClockNs()
    gate = TenantGate(clock)
    ann = Tenant("ann", requests_per_minute=2, tokens_per_minute=1000)
    use(gate, ann, 10)
    use(gate, ann, 10)
    error = refusal(gate, ann)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 30.0
    clock.now_ns += 30 * 10**9
    use(gate, ann, 2000)  # a longer prompt than a minute's tokens is taken, and paid for afterwards
    error = refusal(gate, ann)
    assert error.retry_after_s == pytest.approx(60 * 1001 / 1000)
    use(gate, Tenant("bob", requests_per_minute=2))


def test_a_prompt_that_was_estimated_is_charged_as_it_was() -> None:
    gate = TenantGate(ClockNs())
    ann = Tenant("ann", tokens_per_minute=60)
    with gate.request(ann, 0) as admitted:
        admitted.prompt_tokens, admitted.cached_tokens, admitted.output_tokens = 100, 30, 5
    assert refusal(gate, ann).retry_after_s == 16.0


def test_limits_may_change_while_a_tenant_uses_the_server() -> None:
    clock = ClockNs()
    gate = TenantGate(clock)
    with gate.request(Tenant("ann"), 5):
        use(gate, Tenant("ann", requests_per_minute=1))
        assert refusal(gate, Tenant("ann", requests_per_minute=1)).retry_after_s == 60.0
        assert refusal(gate, Tenant("ann", requests_per_minute=60)).retry_after_s == 1.0
    clock.now_ns += 10**9
    use(gate, Tenant("ann", requests_per_minute=60))
    use(gate, Tenant("ann"))


def test_a_tenant_with_old_and_new_limits_gains_nothing() -> None:
    """A session began before the keys file was read again."""
    gate = TenantGate(ClockNs())
    old, new = Tenant("ann"), Tenant("ann", requests_per_minute=1, tokens_per_minute=10)
    with gate.request(old, 5) as unlimited:
        use(gate, new, 5)
        unlimited.output_tokens = 10**6  # not charged: it was accepted without that limit
    for _ in range(5):
        use(gate, old, 5)
        assert refusal(gate, new).retry_after_s == 60.0


def test_a_clock_that_stands_still_or_goes_back_gives_nothing_away() -> None:
    clock = ClockNs()
    gate = TenantGate(clock)
    ann = Tenant("ann", requests_per_minute=1)
    use(gate, ann)
    clock.now_ns -= 10 * MINUTE_NS
    assert refusal(gate, ann).retry_after_s == 60.0
    clock.now_ns += 10 * MINUTE_NS
    assert refusal(gate, ann).retry_after_s == 60.0


def test_tenants_that_used_nothing_lately_are_forgotten() -> None:
    clock = ClockNs()
    gate = TenantGate(clock)
    with gate.request(Tenant("long", max_unfinished=1), 5):
        for number in range(2_000):
            use(gate, Tenant(f"t{number}", requests_per_minute=60), 5)
            clock.now_ns += 10**9  # each bucket is full again a second later
        assert len(gate) <= rate_limit.MIN_SWEPT
        assert refusal(gate, Tenant("long", max_unfinished=1)).retry_after_s is None


def test_a_cost_is_given_back_as_far_as_it_was_not_spent() -> None:
    clock = ClockNs()
    gate, tenant = TenantGate(clock), Tenant("ann", max_cost_per_day=1.0)
    settle = gate.reserve_cost(tenant, 0.75)
    with pytest.raises(RateLimited) as refused:
        gate.reserve_cost(tenant, 0.5)
    assert (refused.value.param, refused.value.retry_after_s) == ("max_cost_per_day", 0.25 * 86_400)
    settle(0.25)
    gate.reserve_cost(tenant, 0.75)(None)  # it is unknown, and counts as a whole
    state = gate.state(tenant).cost
    assert state is not None
    assert (state.limit, state.remaining, state.reset_ns) == (10**9, 0, 86_400 * 10**9)
    clock.now_ns += 21_600 * 10**9
    gate.reserve_cost(tenant, 0.25)(0.0)


def test_more_than_a_days_cost_never_passes() -> None:
    with pytest.raises(RateLimited) as refused:
        TenantGate(ClockNs()).reserve_cost(Tenant("ann", max_cost_per_day=1.0), 1.5)
    assert refused.value.retry_after_s is None
