"""The store of programs against a model by brute force, and its limits."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clocks import ClockS

from agentflow.errors import Overloaded, RateLimited
from agentflow.runtime.programs.store import ProgramLimits, ProgramStore

LIMITS = ProgramLimits(max_programs=2, program_bytes=1_000, total_bytes=4_000, idle_s=10.0)
TENANTS = ("ann", "ben")
IDS = ("p", "q", "r")


@dataclass(eq=False)
class Program:
    """A program that does nothing."""

    id: str
    tenant: str


@dataclass
class Entry:
    """A program in the model: each use, and the time of the last one."""

    program: Program
    used_s: float
    uses: list[ExitStack] = field(default_factory=list)

    def has_expired(self, now_s: float) -> bool:
        return not self.uses and now_s - self.used_s >= LIMITS.idle_s


KEYS = st.tuples(st.sampled_from(TENANTS), st.sampled_from(IDS))
STEPS = st.lists(
    st.one_of(
        *[st.tuples(st.just(step), KEYS) for step in ("add", "add", "use", "use", "leave")],
        st.tuples(st.just("remove"), KEYS),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 4.0, 9.0, 10.0])),
        st.tuples(st.just("expire"), st.none()),
    ),
    min_size=20,
    max_size=60,
)


@given(steps=STEPS)
def test_a_store_has_the_programs_of_the_model(steps: list[Any]) -> None:
    clock = ClockS()
    store: ProgramStore[Program] = ProgramStore(LIMITS, clock)
    model: dict[tuple[str, str], Entry] = {}
    for step, argument in steps:
        entry = model.get(argument) if isinstance(argument, tuple) else None
        match step:
            case "add" if entry is None:
                tenant, program_id = argument
                program = Program(program_id, tenant)
                if sum(other == tenant for other, _ in model) < LIMITS.max_programs:
                    store.add(program)
                    model[argument] = Entry(program, clock.now_s)
                else:
                    with pytest.raises(RateLimited):
                        store.add(program)
            case "use":
                stack = ExitStack()
                found = stack.enter_context(store.using(*argument))
                if entry is None or entry.has_expired(clock.now_s):
                    assert found is None
                else:
                    assert found is entry.program
                    entry.uses.append(stack)
            case "leave" if entry is not None and entry.uses:
                entry.uses.pop().close()
                entry.used_s = clock.now_s
            case "remove" if entry is not None:
                assert store.remove(entry.program)
                assert not store.remove(entry.program)
                for stack in model.pop(argument).uses:
                    stack.close()
            case "wait":
                clock.now_s += argument
            case "expire":
                expired = [key for key, one in model.items() if one.has_expired(clock.now_s)]
                assert set(store.take_expired()) == {model.pop(key).program for key in expired}
            case _:
                pass
        assert len(store) == len(model)
        assert set(store) == {one.program for one in model.values()}
        left_s = [one.used_s + LIMITS.idle_s - clock.now_s for one in model.values() if not one.uses]
        assert store.next_expiry_s() == max(0.0, min(left_s, default=LIMITS.idle_s))


def test_a_removed_program_ends_its_uses_and_not_those_of_its_successor() -> None:
    clock = ClockS()
    store: ProgramStore[Program] = ProgramStore(LIMITS, clock)
    first, second = Program("p", "ann"), Program("p", "ann")
    store.add(first)
    with store.using("ann", "p"):
        store.remove(first)
        store.add(second)
        use = store.using("ann", "p")
        assert use.__enter__() is second
    clock.now_s += LIMITS.idle_s
    assert store.take_expired() == []
    use.__exit__(None, None, None)
    clock.now_s += LIMITS.idle_s
    assert store.take_expired() == [second]


def test_memory_is_limited_for_a_program_a_tenant_and_all() -> None:
    store: ProgramStore[Program] = ProgramStore(LIMITS, ClockS())
    programs = [store.tenant_memory("ann") for _ in range(3)]
    with pytest.raises(Overloaded):
        programs[0].reserve(1_001)
    for memory in programs[:2]:
        memory.reserve(1_000)
    with pytest.raises(Overloaded):  # half of all
        programs[2].reserve(1)
    others = [store.tenant_memory(name) for name in ("ben", "ben", "carl")]
    for memory in others[:2]:
        memory.reserve(1_000)
    with pytest.raises(Overloaded):
        others[2].reserve(1)
    assert store.num_bytes == LIMITS.total_bytes
    programs[0].close()
    others[2].reserve(1_000)
    assert store.num_bytes == LIMITS.total_bytes
