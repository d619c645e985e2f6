"""The accounted memory of a session, against Python's allocations for it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import anyio
import pytest
from support.fake_engine import TEMPLATE
from support.plain_model import plain_model_engine

from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.engine.client import EngineClient
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.errors import Overloaded
from agentflow.protocol import ops
from agentflow.protocol.chat import CalledTool, Conversation, Message
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import ErrorInfo
from agentflow.protocol.sampling import GenParams
from agentflow.protocol.text.transform import Transform
from agentflow.runtime.interpreter.interpreter import Interpreter
from agentflow.runtime.limits import MemoryBudget, MemoryReservation, TenantMemory

GREEDY = GenParams(max_tokens=4)
Ops = Iterator[ops.Op]


def answer(prompt: str) -> str:
    return "an answer"


def after_all(variables: Iterable[int]) -> Ops:
    """A state that gets to its end when all these have their values."""
    yield ops.Open(1000)
    yield ops.Set(1000, 1000, "all", tuple(map(ops.Ref, variables)))
    yield ops.Await(1000, 1)


def many_states() -> Ops:
    for state in range(1, 200):
        yield ops.Open(state)
        yield ops.Begin(state, "user")
    yield ops.Await(199, 1)


def long_texts() -> Ops:
    for state in range(1, 20):
        yield ops.Open(state)
        yield ops.Text(state, (f"{state} " + "some more text " * 60,))
        yield ops.Gen(state, state, "answer", GREEDY)
    yield from after_all(range(1, 20))


def forks() -> Ops:
    yield ops.Open(1)
    yield ops.Text(1, ("some more text " * 400,))
    yield ops.Fork(1, tuple(range(2, 300)))
    yield ops.Await(1, 1)


def values() -> Ops:
    yield ops.Open(1)
    yield ops.Set(1, 1, "text", ("é" * 10_000,))
    for var in range(2, 200):
        yield ops.Set(1, var, "text", (ops.Ref(1), "."))
    yield ops.Await(1, 1)


def waiting_ops() -> Ops:
    yield ops.Open(1)
    yield ops.Expect(1, 1, "later")
    yield ops.Text(1, (ops.Ref(1),))
    for var in range(2, 250):
        yield ops.Text(1, ("and so on " * 20 + str(var), ops.Ref(1)))
        yield ops.Gen(1, var, f"answer {var}", GenParams(logit_bias=tuple((i, 1.0) for i in range(9))))
    yield ops.Open(2)
    yield ops.Await(2, 1)


# Programs that try to use more memory than is counted.

LONG = "some more text " * 4_000
MANY = range(100, 150)


def waiting_for_ever() -> Ops:
    """State 1 has a long value, ``Ref(1)``; state 2 waits for one that never comes, ``Ref(2)``."""
    yield ops.Open(1)
    yield ops.Set(1, 1, "long", (LONG,))
    yield ops.Open(2)
    yield ops.Expect(2, 2, "never")


def values_that_waiting_ops_keep() -> Ops:
    yield from waiting_for_ever()
    yield ops.Text(2, (ops.Ref(2),))
    for state in MANY:
        yield ops.Open(state)
        yield ops.Set(state, state, "longer", ("and ", ops.Ref(1)))
        yield ops.Text(2, (ops.Ref(state),))
        yield ops.Close(state)
    yield ops.Await(1, 1)


def values_that_nobody_hears() -> Ops:
    yield from waiting_for_ever()
    for state in MANY:
        yield ops.Open(state)
        yield ops.Set(state, state, "longer", ("and ", ops.Ref(1)))
        yield ops.Close(state)
    yield ops.Await(1, 1)


def halves_of_values() -> Ops:
    yield from waiting_for_ever()
    strip = (Transform("strip"),)
    for state in MANY:
        yield ops.Open(state)
        yield ops.Set(state, state, "longer", (ops.Ref(1, strip), ops.Ref(2)))
    yield ops.Await(1, 1)


def failed_texts() -> Ops:
    yield from waiting_for_ever()
    yield ops.Provide(2, error=ErrorInfo("run_failed", "no"))
    for state in MANY:
        yield ops.Open(state)
        yield ops.Text(state, (LONG + str(state), ops.Ref(2)))
    yield ops.Await(1, 1)


def long_names() -> Ops:
    yield ops.Open(1)
    yield ops.Expect(1, 1, LONG)
    for state in MANY:
        yield ops.Open(state)
        yield ops.Text(state, (ops.Ref(1),))
    yield ops.Provide(1, error=ErrorInfo("run_failed", LONG))
    yield ops.Await(1, 1)


def told_errors() -> Ops:
    yield ops.Open(1)
    for var in MANY:
        yield ops.Expect(1, var, "x")
        yield ops.Provide(var, error=ErrorInfo("run_failed", LONG + str(var)))
    yield ops.Await(1, 1)


def told_texts_and_causes_of_errors() -> Ops:
    yield ops.Open(1)
    for var in MANY:
        error = ErrorInfo("invalid_value", "no", param=f"{LONG}{var}", text=f"{var}{LONG}")
        for number in range(8):
            error = ErrorInfo("run_failed", LONG[:3_000] + str(number), error)
        yield ops.Expect(1, var, "x")
        yield ops.Provide(var, error=error)
    yield ops.Await(1, 1)


def long_parameters() -> Ops:
    yield from waiting_for_ever()
    yield ops.Text(2, (ops.Ref(2),))
    for var in MANY:
        text, tags = LONG + str(var), Constraint("tags", "[]", between=f"{LONG}{var}.")
        yield ops.Gen(2, var, "a", GenParams(stop_regex=text), tags)
        yield ops.Set(2, var + 1000, "b", (ops.Ref(2, (Transform("json", text + "!"),)),))
    yield ops.Await(1, 1)


def empty_turns() -> Ops:
    yield ops.Open(1)
    for _ in range(300):
        yield ops.Begin(1, "user")
        yield ops.End(1)
    yield ops.Fork(1, tuple(range(2, 100)))
    yield ops.Await(1, 1)


def long_call_ids() -> Ops:
    """Kept in the contexts: ids and names of the calls that tool turns answer, and of messages."""
    yield ops.Open(1)
    for number in MANY:
        yield ops.Begin(1, "tool", LONG + str(number), f"{number}{LONG}")
        yield ops.End(1)
    calls = tuple([CalledTool(f"{number}.{LONG}", "f", "{}") for number in MANY])
    answers = [Message("tool", "", tool_call_id=call.id, name=call.id[1:]) for call in calls]
    yield ops.Open(2)
    yield ops.Converse(
        2, Conversation((Message("user", ""), Message("assistant", "", tool_calls=calls), *answers))
    )
    yield ops.Await(1, 1)


def long_numbers() -> Ops:
    """Ops without text."""
    yield from waiting_for_ever()
    yield ops.Text(2, (ops.Ref(2),))
    for var in MANY:
        yield ops.Read(2, var, LONG + str(var), "text")
        yield ops.TaskGroup(2, ())
    yield ops.Await(1, 1)


HONEST = [many_states, long_texts, forks, values, waiting_ops]
HOSTILE = [
    values_that_waiting_ops_keep,
    values_that_nobody_hears,
    halves_of_values,
    failed_texts,
    long_names,
    told_errors,
    told_texts_and_causes_of_errors,
    long_parameters,
    empty_turns,
    long_call_ids,
    long_numbers,
]


async def until_reached(interpreter: Interpreter[Any]) -> None:
    """Waits until a program has reached its last state. Its events are not read."""
    with anyio.fail_after(30):
        while not any(state.reached for state in interpreter._states):
            await anyio.wait_all_tasks_blocked()


async def run(program: Callable[[], Ops], client: EngineClient) -> tuple[int, int]:
    """The bytes that Python has allocated, if they are traced, and the accounted bytes."""
    memory = MemoryBudget(10**12)  # of an unlimited one, nothing is measured
    async with anyio.create_task_group() as group:
        interpreter = Interpreter(EngineGenerator(client, TEMPLATE), group, memory)
        for op in program():
            interpreter.submit(op)
            del op
        await until_reached(interpreter)
        allocated, accounted = tracemalloc.get_traced_memory()[0], memory.num_bytes
        group.cancel_scope.cancel()
    interpreter.close()
    assert memory.num_bytes == 0
    return allocated, accounted


@pytest.mark.parametrize("program", [*HONEST, *HOSTILE], ids=lambda program: program.__name__)
@pytest.mark.anyio
@pytest.mark.trio_in_full
async def test_the_accounted_memory_is_near_the_allocated_memory(program):
    async with plain_model_engine(max_context=8192, num_slots=20_000) as client:
        await run(program, client)  # allocations made once, for all sessions, do not count
        gc.collect()
        tracemalloc.start()
        try:
            allocated, accounted = await run(program, client)
        finally:
            tracemalloc.stop()
    assert 0.5 * allocated <= accounted
    assert accounted <= 3 * allocated or program in HOSTILE


@pytest.mark.anyio
@pytest.mark.trio_in_full
async def test_a_reused_number_gets_its_own_fork():
    """State 9 is to be forked from 1, is closed before, and is then a root, or forked from 2."""
    memory = MemoryBudget(10**12)
    generator = ScriptedGenerator(answer)
    async with anyio.create_task_group() as group:
        interpreter = Interpreter(generator, group, memory)
        interpreter.submit(ops.Open(1))
        interpreter.submit(ops.Expect(1, 1, "later"))
        interpreter.submit(ops.Text(1, ("of 1", ops.Ref(1))))
        interpreter.submit(ops.Fork(1, (9,)))
        for op in (ops.Cancel(9), ops.Close(9)):
            interpreter.submit(op)
        await anyio.wait_all_tasks_blocked()
        interpreter.submit(ops.Open(9))
        interpreter.submit(ops.Text(9, ("mine",)))
        interpreter.submit(ops.Provide(1, "."))
        interpreter.submit(ops.Read(9, 2, "all", "text"))
        await anyio.wait_all_tasks_blocked()
        assert interpreter._variables[2].text == "mine"
        for state in (1, 9):
            interpreter.submit(ops.Close(state))
        await anyio.wait_all_tasks_blocked()
        interpreter.events.drain()
        gc.collect()
        assert memory.num_bytes == 0
        assert generator.num_open == 0


def test_free_bytes_do_not_count_in_the_total():
    everyone = MemoryBudget(100, "all may hold", "wait")
    sessions = [MemoryBudget(80, within=everyone, free_bytes=10) for _ in range(4)]
    sessions[0].reserve(60)
    sessions[1].reserve(60)
    assert everyone.num_bytes == 100
    with pytest.raises(Overloaded, match=r"^all may hold 100 "):
        sessions[2].reserve(11)
    sessions[2].reserve(10)
    assert (sessions[2].num_bytes, everyone.num_bytes) == (10, 100)
    reservation = MemoryReservation(sessions[3], 5)
    reservation.count(10)
    assert everyone.num_bytes == 105
    del reservation
    sessions[0].close()
    sessions[0].count(-7)
    assert everyone.num_bytes == 50


def test_a_tenant_may_use_half_and_all_tenants_the_total():
    memory = TenantMemory(100, "sessions may hold", "wait")
    ann, ben = memory.of("ann"), memory.of("ben")
    of_ann = [MemoryBudget(40, within=ann) for _ in range(2)]
    of_ann[0].reserve(40)
    with pytest.raises(Overloaded, match=r"\b40\b.*\b41\b"):
        of_ann[0].reserve(1)
    with pytest.raises(Overloaded, match=r"\b50\b.*\b51\b.*wait$"):
        of_ann[1].reserve(11)
    assert of_ann[1].num_bytes == 0
    of_ann[1].reserve(10)
    ben.reserve(45)
    assert memory.num_bytes == 95
    with pytest.raises(Overloaded, match=r"^sessions may hold 100 .*\b101\b.*wait$"):
        memory.of("eve").reserve(6)
    of_ann[0].close()
    memory.of("eve").reserve(6)
    assert memory.of("ann") is ann
    del ann, of_ann
    gc.collect()
    assert memory.num_bytes == 61
