"""The limit of costs of several fronts, with a store that loses answers and calls that interleave: the calls
of all fronts together never cost more than the limit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import anyio
import pytest
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st
from support.clocks import ClockNs
from support.examples import examples
from support.server.http_clients import only_asyncio

from agentflow.engine.tenant import Tenant
from agentflow.errors import Overloaded, RateLimited
from agentflow.server.tenants import shared_limit
from agentflow.server.tenants.rate_limit import DAY_NS
from agentflow.server.tenants.shared_limit import SharedGate

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
anyio_backend = pytest.fixture(only_asyncio)

ANN = Tenant("ann", max_cost_per_day=1.0)
PARTS = 8
"""Costs are in eighths of the limit, which are exact."""


@dataclass(eq=False)
class _Asked:
    """A call of the store, which waits until the test answers it."""

    script: str
    keys: list[str]
    arguments: list[Any]
    is_answered: anyio.Event = field(default_factory=anyio.Event)
    reply: Any = None  # None: the answer is lost


class UncertainStore:
    """A store whose calls take effect, and are answered or not, when the test says so."""

    def __init__(self, clock: ClockNs) -> None:
        self.waiting: list[_Asked] = []
        self.under_way: list[_Asked] = []  # calls that failed, and may take effect later
        self._is_closed = False
        self._clock = clock
        self._values: dict[str, bytes] = {}

    def key(self, *parts: str) -> str:
        return ":".join(parts)

    def check_answers(self) -> None:
        pass

    async def run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        asked = _Asked(script, keys, arguments)
        if not self._is_closed:
            self.waiting.append(asked)
            await asked.is_answered.wait()
        if asked.reply is None:
            raise Overloaded("the answer is lost")
        return asked.reply

    def answer(self, number: int, outcome: str) -> None:
        """``outcome``: "answered", "lost" after it took effect, "failed" before that, or "late", when it may
        still take effect."""
        asked = self.waiting.pop(number % len(self.waiting))
        if outcome in ("answered", "lost"):
            reply = self.apply(asked)
            asked.reply = reply if outcome == "answered" else None
        elif outcome == "late":
            self.under_way.append(asked)
        asked.is_answered.set()

    def close(self) -> None:
        """Fails all calls, so that their tasks end."""
        self._is_closed = True
        while self.waiting:
            self.answer(0, "failed")

    def apply(self, asked: _Asked) -> Any:
        """The reply of the script."""
        key, front_key = asked.keys
        value = self._values.get(key, b"")
        if asked.script == shared_limit._READ or value != asked.arguments[0]:
            seconds, ns = divmod(self._clock.now_ns, 10**9)
            return [value, [b"%d" % seconds, b"%d" % (ns // 1_000)], self._values.get(front_key)]
        self._values[key], self._values[front_key] = asked.arguments[1], asked.arguments[3]
        return 1


class _View:
    """The store of one front."""

    def __init__(self, store: UncertainStore, number: int) -> None:
        self.front = f"front-{number}"
        self.key, self.check_answers, self.run = store.key, store.check_answers, store.run


class Fronts:
    """Several gates of one store, and the calls that they have admitted."""

    def __init__(self, num: int = 2) -> None:
        self.clock = ClockNs()
        self.store = UncertainStore(self.clock)
        views: list[Any] = [_View(self.store, number) for number in range(num)]
        self.gates = [SharedGate(view, self.clock) for view in views]
        self.open: list[tuple[int, Callable[[float | None], None]]] = []
        self.num_spent = self.num_refused = 0
        """In eighths of the limit; calls."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[TaskGroup]:
        """The scope of the tasks that use the gates."""
        async with anyio.create_task_group() as group:
            try:
                yield group
            finally:
                self.store.close()

    async def pay(self, gate: SharedGate, highest: int) -> None:
        """Begins a call, unless it is refused or the store does not answer."""
        try:
            if (leasing := gate.ready_to_pay(ANN, highest / PARTS)) is not None:
                await leasing
            self.open.append((highest, gate.reserve_cost(ANN, highest / PARTS)))
        except RateLimited:
            self.num_refused += 1
        except Overloaded:
            pass

    def end(self, number: int, cost: int | None) -> None:
        """Ends an open call. ``cost``: None if it is unknown."""
        highest, settle_cost = self.open.pop(number % len(self.open))
        self.num_spent += highest if cost is None else cost
        settle_cost(None if cost is None else cost / PARTS)

    async def settle(self, gate: SharedGate, *, is_last: bool = False) -> None:
        for name, account in gate._shared_accounts():
            await gate._settle(name, account, is_last=is_last)

    async def answer_all(self) -> None:
        """Answers until no call of the store waits."""
        await _proceed()
        while self.store.waiting:
            self.store.answer(0, "answered")
            await _proceed()

    async def spend_all(self, group: TaskGroup) -> None:
        """Spends the rest of the limit."""
        for highest in range(PARTS, 0, -1):
            for gate in self.gates:
                group.start_soon(self.pay, gate, highest)
                await self.answer_all()
                while self.open:
                    self.end(0, highest)


async def _proceed() -> None:
    """Lets all tasks run until they wait for the store, or for each other."""
    for _ in range(8):
        await checkpoint()


async def test_f37_credit_whose_return_is_not_answered_is_returned_once() -> None:
    fronts = Fronts()
    gate, store = fronts.gates[0], fronts.store
    async with fronts.running() as group:
        group.start_soon(fronts.pay, gate, 7)
        await fronts.answer_all()
        fronts.end(0, 4)
        for outcomes in (("failed",), ("answered", "lost"), ("answered", "lost")):
            group.start_soon(fronts.settle, gate)
            for outcome in outcomes:
                await _proceed()
                if store.waiting:
                    store.answer(0, outcome)
            await fronts.answer_all()
        await fronts.spend_all(group)
    assert fronts.num_spent == PARTS


@pytest.mark.parametrize(("highest", "cost"), [(7, 4), (2, 4)])
async def test_f37_a_front_that_ends_settles_each_call_once(
    monkeypatch: pytest.MonkeyPatch, highest: int, cost: int
) -> None:
    """The last exchange waits for one whose answer is still under way: a credit that is given back, or a debt
    that is paid."""
    monkeypatch.setattr(shared_limit, "SETTLE_S", 0)
    fronts, is_over = Fronts(), anyio.Event()
    gate, store = fronts.gates[0], fronts.store

    async def run() -> None:
        async with gate.running():
            await fronts.pay(gate, highest)
            fronts.end(0, cost)
            await is_over.wait()

    async with fronts.running() as group:
        group.start_soon(run)
        for _ in range(3):  # the lease is read and taken, and the value is read to settle the call
            await _proceed()
            store.answer(0, "answered")
        await _proceed()
        change = store.waiting.pop()
        change.reply = store.apply(change)
        assert change.reply == 1
        is_over.set()
        await fronts.answer_all()
        change.is_answered.set()
        await fronts.answer_all()
        fronts.gates.remove(gate)
        await fronts.spend_all(group)
    assert fronts.num_spent == PARTS


async def test_f37_credit_is_returned_if_another_front_changes_the_limit_first() -> None:
    fronts = Fronts()
    here, there = fronts.gates
    async with fronts.running() as group:
        for gate in (here, there):
            group.start_soon(fronts.pay, gate, 4)
            await fronts.answer_all()
        while fronts.open:
            fronts.end(0, 1)
        for gate in (here, there):
            group.start_soon(fronts.settle, gate)
        await fronts.answer_all()
        await fronts.spend_all(group)
    assert fronts.num_spent == PARTS


async def test_f37_a_call_is_admitted_by_the_credit_that_it_holds() -> None:
    """A second call takes the credit that the first one counted with, during its exchange."""
    fronts = Fronts()
    gate, store = fronts.gates[0], fronts.store
    async with fronts.running() as group:
        group.start_soon(fronts.pay, gate, 3)
        await fronts.answer_all()
        fronts.end(0, 0)
        group.start_soon(fronts.pay, gate, 4)
        await _proceed()
        store.answer(0, "answered")
        await _proceed()
        group.start_soon(fronts.pay, gate, 3)
        await _proceed()
        assert [highest for highest, _ in fronts.open] == [3]
        await fronts.answer_all()
        assert sorted(highest for highest, _ in fronts.open) == [3, 4]
        other = fronts.gates[1]
        for highest in (4, 1):
            group.start_soon(fronts.pay, other, highest)
            await fronts.answer_all()
    assert (sorted(highest for highest, _ in fronts.open), fronts.num_refused) == ([1, 3, 4], 1)


async def test_f37_credit_of_a_call_that_ends_during_an_exchange_counts_once() -> None:
    """The limit lacks some of a call's highest cost, and another call of this front gives back enough."""
    fronts = Fronts()
    here, there = fronts.gates
    async with fronts.running() as group:
        group.start_soon(fronts.pay, here, 6)
        await fronts.answer_all()
        group.start_soon(fronts.pay, here, 4)
        await _proceed()
        fronts.store.answer(0, "answered")
        await _proceed()
        fronts.end(0, 3)
        await fronts.answer_all()
        assert [highest for highest, _ in fronts.open] == [4]
        group.start_soon(fronts.pay, there, 2)
        await fronts.answer_all()
    assert (len(fronts.open), fronts.num_refused) == (1, 1)
    with pytest.raises(RateLimited):  # nothing is leased, although the whole limit was there at the last look
        SharedGate(here._store, fronts.clock).reserve_cost(ANN, 1 / PARTS)


Step: TypeAlias = tuple[str, int, Any]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("pay"), st.integers(0, 1), st.integers(1, PARTS)),
        st.tuples(st.just("end"), st.integers(0, 9), st.none() | st.integers(0, PARTS)),
        st.tuples(st.sampled_from(["settle", "leave"]), st.integers(0, 1), st.none()),
        st.tuples(
            st.just("answer"),
            st.integers(0, 9),
            st.sampled_from(["answered", "answered", "answered", "lost", "failed", "late"]),
        ),
        st.tuples(st.just("apply"), st.integers(0, 9), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0, 1_000, DAY_NS // PARTS]), st.none()),
    ),
    min_size=15,
    max_size=40,
)


@examples(300)
@given(steps=steps, is_certain=st.booleans())
def test_f37_costs_are_never_exceeded(steps: list[Step], is_certain: bool) -> None:
    """Calls begin and end, fronts settle and leave, and answers are lost, in any order. If no answer is lost,
    the whole limit can be spent, too."""

    async def run() -> None:
        fronts = Fronts()
        store = fronts.store
        began_ns = fronts.clock.now_ns

        def check() -> None:
            paid = fronts.num_spent + sum(highest for highest, _ in fronts.open)
            assert paid * DAY_NS <= PARTS * (DAY_NS + fronts.clock.now_ns - began_ns)

        async with fronts.running() as group:
            for step, number, value in steps:
                if step == "pay":
                    group.start_soon(fronts.pay, fronts.gates[number], value)
                elif step == "end" and fronts.open:
                    number %= len(fronts.open)
                    fronts.end(number, None if value is None else min(value, fronts.open[number][0]))
                elif step in ("settle", "leave"):
                    settle = partial(fronts.settle, fronts.gates[number], is_last=step == "leave")
                    group.start_soon(settle)
                elif step == "answer" and store.waiting:
                    store.answer(number, "answered" if is_certain else value)
                elif step == "apply" and store.under_way:
                    store.apply(store.under_way.pop(number % len(store.under_way)))
                elif step == "wait" and not is_certain:
                    fronts.clock.now_ns += number
                await _proceed()
                check()
            await fronts.answer_all()
            while fronts.open:
                fronts.end(0, 0)
            for gate in fronts.gates:
                group.start_soon(partial(fronts.settle, gate, is_last=True))
                await fronts.answer_all()
            await fronts.spend_all(group)
        check()
        if is_certain:
            assert fronts.num_spent == PARTS

    anyio.run(run)
