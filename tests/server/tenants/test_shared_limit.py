"""Rate limits of several fronts: in a real Redis, and against the limits of one process on a shared clock."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clocks import ClockNs
from support.examples import examples
from support.redis_server import RedisServer, lost_answer, redis_server, shared_store
from support.server.http_clients import only_asyncio

from agentflow.engine.tenant import AdmittedRequest, Tenant
from agentflow.errors import Overloaded, RateLimited
from agentflow.server.tenants import shared_limit
from agentflow.server.tenants.rate_limit import MIN_SWEPT, TenantGate
from agentflow.server.tenants.shared_limit import PARTS, Lease, SharedAccount, SharedGate

pytestmark = pytest.mark.anyio
FRONTS = 3


anyio_backend = pytest.fixture(only_asyncio)


@asynccontextmanager
async def gates_of(redis: RedisServer, num: int = FRONTS) -> AsyncIterator[list[SharedGate]]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(shared_store(redis))
        stores = [first]
        stores += [await stack.enter_async_context(shared_store(redis, first.prefix)) for _ in range(num - 1)]
        yield [SharedGate(store) for store in stores]


async def is_admitted(
    gate: SharedGate, tenant: Tenant, prompt_tokens: int = 0, output_tokens: int = 0
) -> bool:
    if (leasing := gate.ready(tenant)) is not None:
        await leasing
    try:
        with gate.request(tenant, prompt_tokens) as admitted:
            admitted.output_tokens = output_tokens
    except RateLimited:
        return False
    return True


async def settle(gate: SharedGate, tenant: Tenant) -> None:
    await gate._exchange(tenant.name, gate._find_account(tenant), {})


@pytest.mark.parametrize("limit", [1, 5, 320])
async def test_all_fronts_together_start_what_one_may(redis: RedisServer, limit: int) -> None:
    tenant = Tenant("ann", requests_per_minute=limit)
    num_admitted, began_s = 0, time.monotonic()

    async def ask(gate: SharedGate) -> None:
        nonlocal num_admitted
        for _ in range(limit // 4 + 2):
            was_admitted = await is_admitted(gate, tenant)
            num_admitted += was_admitted

    async with gates_of(redis) as gates:
        async with anyio.create_task_group() as group:
            for gate in gates * 3:
                group.start_soon(ask, gate)
        most = limit * (1 + FRONTS / PARTS) + limit * (time.monotonic() - began_s) / 60
        assert limit - FRONTS * (limit // PARTS) <= num_admitted <= most
        # Tokens that another front holds and does not use are given back.
        for gate in gates:
            account = gate._find_account(tenant)
            assert account.requests is not None
            await gate._exchange("ann", account, {}, is_last=True)
            assert account.requests.credit == 0  # type: ignore[attr-defined]
        while await is_admitted(gates[0], tenant):
            num_admitted += 1
        assert limit <= num_admitted <= most + limit * (time.monotonic() - began_s) / 60 + 1


async def test_tokens_that_one_front_used_are_used_at_all(redis: RedisServer) -> None:
    tenant = Tenant("ann", tokens_per_minute=1_000)
    async with gates_of(redis, 2) as gates:
        assert await is_admitted(gates[1], tenant)
        assert await is_admitted(gates[0], tenant, 4_000, 2_000)
        for gate in gates:
            await settle(gate, tenant)
            with pytest.raises(RateLimited) as caught:
                gate.check(tenant)
            assert 250 < (caught.value.retry_after_s or 0) < 303
            assert not await is_admitted(gate, tenant)
            state = gate.state(tenant).tokens
            assert state is not None
            assert (state.limit, state.remaining) == (1_000, 0)


async def test_f37_an_exchange_of_a_forgotten_account_is_not_taken_for_a_later_one() -> None:
    """Redis keeps the last exchange of a front for longer than the front keeps an idle account."""
    forgotten = SharedAccount().begin([])
    account, lease = SharedAccount(), Lease(10, 0, 60)
    account.begin([(lease, 5)])
    account.apply_last(forgotten.id)
    assert lease.credit == 0


@pytest.mark.parametrize("is_followed", [False, True])
async def test_f37_an_exchange_whose_answer_is_lost_takes_effect_once(
    redis: RedisServer, is_followed: bool
) -> None:
    tenant = Tenant("ann", tokens_per_minute=64_000, requests_per_minute=6_400)
    async with gates_of(redis, 2) as (here, there):

        async def ask_elsewhere() -> None:
            if is_followed:
                assert await is_admitted(there, tenant, 2_000)
                await settle(there, tenant)

        with lost_answer(here._store, shared_limit._REPLACE, ask_elsewhere), pytest.raises(Overloaded):
            await is_admitted(here, tenant)  # takes a lease
        assert await is_admitted(here, tenant, 20_000)
        with lost_answer(here._store, shared_limit._REPLACE, ask_elsewhere), pytest.raises(Overloaded):
            await settle(here, tenant)  # pays the debt
        for gate in (here, there, here):
            await gate._exchange("ann", gate._find_account(tenant), {}, is_last=True)
        state = here.state(tenant)
        assert state.tokens is not None
        assert state.requests is not None
        used, num_requests = (24_000, 3) if is_followed else (20_000, 1)
        assert 64_000 - used <= state.tokens.remaining <= 64_000 - used + 2_000  # it refills
        assert 6_400 - num_requests <= state.requests.remaining


async def test_costs_are_never_exceeded(redis: RedisServer) -> None:
    tenant, spent = Tenant("ann", max_cost_per_day=1.0), 0.0

    async def pay(gate: SharedGate) -> None:
        nonlocal spent
        for _ in range(4):
            if (leasing := gate.ready_to_pay(tenant, 0.3)) is not None:
                await leasing
            try:
                settle_cost = gate.reserve_cost(tenant, 0.3)
            except RateLimited:
                continue
            await anyio.lowlevel.checkpoint()
            settle_cost(0.1)
            spent += 0.1
            await settle(gate, tenant)

    async with gates_of(redis) as gates:
        async with anyio.create_task_group() as group:
            for gate in gates:
                group.start_soon(pay, gate)
        assert 0.5 < spent < 1.0
        for gate in gates:
            await settle(gate, tenant)
        state = gates[0].state(tenant).cost
        assert state is not None
        assert state.remaining / 1e9 == pytest.approx(1.0 - spent, abs=0.02)


async def test_leases_are_settled_while_the_gate_runs(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_limit, "SETTLE_S", 0.001)
    monkeypatch.setattr(shared_limit, "IDLE_NS", 0)
    tenant = Tenant("ann", requests_per_minute=6_400)
    async with gates_of(redis, 2) as (here, there):
        async with here.running():
            assert await is_admitted(here, tenant)
            lease = here._find_account(tenant).requests
            with anyio.fail_after(5):
                while lease.credit:  # type: ignore[union-attr]
                    await anyio.lowlevel.checkpoint()
            assert await is_admitted(here, tenant)
        await settle(there, tenant)
        state = there.state(tenant).requests
        assert state is not None
        assert state.remaining >= 6_398


async def test_f37_a_tenant_whose_key_has_another_type_stops_no_other_ones_leases(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_limit, "SETTLE_S", 0.001)
    monkeypatch.setattr(shared_limit, "IDLE_NS", 0)
    tenants = [Tenant(name, requests_per_minute=6_400) for name in ("ann", "bob", "cy")]
    async with gates_of(redis, 1) as [gate], gate.running():
        for tenant in tenants:
            assert await is_admitted(gate, tenant)
        key = gate._store.key("limits", "ann")
        await gate._store.call(lambda client: client.delete(key))
        await gate._store.call(lambda client: client.lpush(key, "x"))
        for tenant in tenants[1:]:
            assert await is_admitted(gate, tenant)
            lease = gate._find_account(tenant).requests
            with anyio.fail_after(5):
                while lease.credit:  # type: ignore[union-attr]
                    await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    "value", ["", "x", "requests 5 5", "requests 0 1 1", "requests 5 -1 99999999999999999999", "other 5 5 5"]
)
async def test_a_foreign_value_is_a_full_bucket(redis: RedisServer, value: str) -> None:
    tenant = Tenant("ann", requests_per_minute=1)
    async with gates_of(redis, 1) as [gate]:
        key = gate._store.key("limits", "ann")
        await gate._store.call(lambda client: client.set(key, value))
        assert await is_admitted(gate, tenant)
        assert not await is_admitted(gate, tenant)


async def test_requests_that_wait_for_a_lost_store_fail_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant, num_failed, num_asked = Tenant("ann", requests_per_minute=5), 0, 0

    async def ask(gate: SharedGate) -> None:
        nonlocal num_failed
        with pytest.raises(Overloaded):
            await is_admitted(gate, tenant)
        num_failed += 1

    with redis_server(tmp_path) as redis:
        async with gates_of(redis, 1) as [gate]:
            exchange = gate._exchange

            async def counted(*arguments: Any) -> None:
                nonlocal num_asked
                num_asked += 1
                await exchange(*arguments)

            monkeypatch.setattr(gate, "_exchange", counted)
            redis.stop()
            async with anyio.create_task_group() as group:
                for _ in range(10):
                    group.start_soon(ask, gate)
            assert (num_failed, num_asked) == (10, 1)
            redis.start()
            assert await is_admitted(gate, tenant)


async def test_only_limited_tenants_need_the_store(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        async with gates_of(redis, 1) as [gate]:
            redis.stop()
            assert gate.ready(Tenant("free", max_unfinished=3)) is None
            leasing = gate.ready(Tenant("ann", requests_per_minute=1))
            assert leasing is not None
            with pytest.raises(Overloaded):
                await leasing


class OneClockStore:
    """A store with the test's clock. ``loses``: the fate of the next exchange. Its answer is lost, or
    it is on its way for some time and takes effect only after the front has read again."""

    front = "here"

    def __init__(self, clock: ClockNs) -> None:
        self._clock = clock
        self._values: dict[str, bytes] = {}
        self.loses: Literal["", "answer", "time"] = ""
        self._late: tuple[str, list[str], list[Any]] | None = None

    def key(self, *parts: str) -> str:
        return ":".join(parts)

    async def run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        loses, late = self.loses, self._late
        if script == shared_limit._REPLACE:
            self.loses, self._late = "", None
            if late is not None:
                self._answer(*late)
            if loses == "time":
                self._late = (script, keys, arguments)
        reply = None if loses == "time" and self._late else self._answer(script, keys, arguments)
        if loses and script == shared_limit._REPLACE:
            raise Overloaded("the answer is lost")
        return reply

    def _answer(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        value = self._values.get(keys[0], b"")
        if script == shared_limit._READ or value != arguments[0]:
            seconds, ns = divmod(self._clock.now_ns, 10**9)
            return [value, [b"%d" % seconds, b"%d" % (ns // 1_000)], self._values.get(keys[1])]
        self._values[keys[0]], self._values[keys[1]] = arguments[1], arguments[3]
        return 1


class SlowStore(OneClockStore):
    """A store whose changes take effect, and are answered when the test says so."""

    def __init__(self, clock: ClockNs) -> None:
        super().__init__(clock)
        self.changed = anyio.Event()
        self.answers = anyio.Event()

    async def run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        reply = await super().run(script, keys, arguments)
        if script != shared_limit._READ:
            self.changed.set()
            await self.answers.wait()
        return reply


@pytest.mark.parametrize("end", ["request", "front"])
async def test_a_cancelled_exchange_loses_no_part_of_a_limit(end: str) -> None:
    """Redis has changed the bucket, and the asking request leaves before the answer: a client that
    hangs up, or a front that ends."""
    clock = ClockNs()
    store: Any = SlowStore(clock)
    gate, tenant = SharedGate(store, clock), Tenant("ann", requests_per_minute=5)
    async with anyio.create_task_group() as group:
        if end == "request":
            leasing = gate.ready(tenant)
            assert leasing is not None
            group.start_soon(lambda: leasing)
        else:
            with gate.request(tenant, 0):
                pass
            group.start_soon(gate._settle_all)
        await store.changed.wait()
        group.cancel_scope.cancel()
        store.answers.set()
    await gate._exchange("ann", gate._find_account(tenant), {}, is_last=True)
    other, used = SharedGate(store, clock), 0 if end == "request" else 1
    assert [await is_admitted(other, tenant) for _ in range(6)] == [True] * (5 - used) + [False] * (1 + used)


async def test_an_account_is_not_forgotten_while_it_takes_a_lease() -> None:
    clock = ClockNs()
    store: Any = SlowStore(clock)
    gate, tenant = SharedGate(store, clock), Tenant("ann", max_cost_per_day=1.0)
    async with anyio.create_task_group() as group:
        leasing = gate.ready_to_pay(tenant, 0.75)
        assert leasing is not None
        group.start_soon(lambda: leasing)
        await store.changed.wait()
        for number in range(2 * MIN_SWEPT):
            gate.check(Tenant(f"tenant {number}", requests_per_minute=1))
        store.answers.set()
    assert dict(gate._find_account(tenant).leases())["cost"].credit


limits = st.none() | st.integers(1, 5) | st.just(60)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 1), st.sampled_from([0, 1, 3, 50])),
        st.tuples(st.just("end"), st.integers(0, 1), st.sampled_from([0, 2, 9])),
        st.tuples(st.just("wait"), st.just(0), st.sampled_from([1, 10_000, 1_000_000, 30_000_000])),
        st.tuples(st.sampled_from(["lose answer", "lose time"]), st.integers(0, 1), st.just(0)),
    ),
    max_size=25,
)


@examples(60)
@given(requests=limits, tokens=limits, steps=steps)
def test_fronts_that_are_settled_admit_exactly_what_one_does(
    requests: int | None, tokens: int | None, steps: list[tuple[str, int, int]]
) -> None:
    tenant = Tenant("ann", requests_per_minute=requests, tokens_per_minute=tokens)

    async def run() -> None:
        clock = ClockNs()
        values: dict[str, bytes] = {}
        stores: list[Any] = [OneClockStore(clock) for _ in range(2)]
        for number, store in enumerate(stores):
            store.front, store._values = f"front {number}", values
        one, fronts = TenantGate(clock), [SharedGate(store, clock) for store in stores]
        began: list[tuple[ExitStack, list[AdmittedRequest]]] = []
        with ExitStack() as left:
            for step, number, amount in steps:
                if step == "wait":
                    clock.now_ns += amount * 1_000
                elif step.startswith("lose"):
                    stores[number].loses = step.removeprefix("lose ")
                elif step == "end" and began:
                    stack, admitted = began.pop()
                    for each in admitted:
                        each.output_tokens, each.cached_tokens = amount, 1
                    stack.close()
                elif step == "begin":
                    gate = fronts[number]
                    while (leasing := gate.ready(tenant)) is not None:
                        with suppress(Overloaded):
                            await leasing
                            break
                    stack = left.enter_context(ExitStack())
                    errors: list[float | None] = []
                    admitted = []
                    for each_gate in (one, gate):
                        try:
                            admitted.append(stack.enter_context(each_gate.request(tenant, amount)))
                        except RateLimited as error:
                            errors.append(error.retry_after_s)
                    assert errors in ([], [errors[0], errors[0]] if errors else [])
                    if admitted:
                        began.append((stack, admitted))
                for gate in fronts:  # debts first, so that no returned tokens are lost to a full bucket
                    account, is_settled = gate._find_account(tenant), False
                    while not is_settled:
                        with suppress(Overloaded):
                            await gate._exchange("ann", account, {}, is_last=True)
                            is_settled = not account._unsure

    anyio.run(run)
