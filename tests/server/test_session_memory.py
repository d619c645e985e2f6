"""What a session is said to hold in memory, against what Python allocates for it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import anyio
import pytest
from fake_engine import TEMPLATE
from plain_engine import plain_engine

from agentflow import ops
from agentflow.errors import Overloaded
from agentflow.events import Reached
from agentflow.held_memory import HeldMemory
from agentflow.interpreter import Interpreter
from agentflow.sampling import SamplingParams
from agentflow.server.engine_generator import EngineGenerator
from agentflow.server.tenant_memory import TenantMemory

GREEDY = SamplingParams(max_tokens=4)
Ops = Iterator[ops.Op]


def after_all(variables: Iterable[int]) -> Ops:
    """A state that gets to its end when all these have their values."""
    yield ops.Open(1000)
    yield ops.Set(1000, 1000, "all", tuple(map(ops.Ref, variables)))
    yield ops.Await(1000, 1)


def many_states() -> Ops:
    for state in range(1, 400):
        yield ops.Open(state)
        yield ops.Begin(state, "user")
    yield ops.Await(399, 1)


def long_texts() -> Ops:
    for state in range(1, 20):
        yield ops.Open(state)
        yield ops.Text(state, (f"{state} " + "as it was said " * 60,))
        yield ops.Gen(state, state, "answer", GREEDY)
    yield from after_all(range(1, 20))


def forks() -> Ops:
    yield ops.Open(1)
    yield ops.Text(1, ("as it was said " * 400,))
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
    for var in range(2, 1000):
        yield ops.Text(1, ("and so on " * 20 + str(var), ops.Ref(1)))
        yield ops.Gen(1, var, f"answer {var}", SamplingParams(logit_bias=tuple((i, 1.0) for i in range(9))))
    yield ops.Open(2)
    yield ops.Await(2, 1)


async def until_reached(interpreter: Interpreter[Any]) -> None:
    """Until the state that all programs end with has been."""
    with anyio.fail_after(30):
        while not any(isinstance(event, Reached) for event in interpreter.outbox.drain()):
            await interpreter.outbox.wait()


@pytest.mark.parametrize("program", [many_states, long_texts, forks, values, waiting_ops])
@pytest.mark.anyio
async def test_what_is_held_is_near_what_is_allocated(program):
    memory = HeldMemory()
    async with plain_engine(max_context=8192, num_slots=20_000) as client:
        async with anyio.create_task_group() as group:
            interpreter = Interpreter(EngineGenerator(client, TEMPLATE), group, memory)
            gc.collect()
            tracemalloc.start()
            try:
                for op in program():
                    interpreter.submit(op)
                await until_reached(interpreter)
                gc.collect()
                allocated, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            group.cancel_scope.cancel()
        assert 0.5 * allocated <= memory.num_bytes <= 3 * allocated
        interpreter.close()
        assert memory.num_bytes == 0


def test_one_tenant_may_take_its_part_and_all_no_more_than_there_is():
    memory = TenantMemory(100, "sessions may hold", "wait")
    ann, ben = memory.of("ann"), memory.of("ben")
    of_ann = [HeldMemory(40, within=ann) for _ in range(2)]
    of_ann[0].hold(40)
    with pytest.raises(Overloaded, match="this session may hold 40 bytes, and this would be 41: close"):
        of_ann[0].hold(1)
    with pytest.raises(
        Overloaded, match="of one tenant, sessions may hold 50 bytes, and this would be 51: wait"
    ):
        of_ann[1].hold(11)
    assert of_ann[1].num_bytes == 0
    of_ann[1].hold(10)
    ben.hold(45)
    assert memory.num_bytes == 95
    with pytest.raises(Overloaded, match=r"^sessions may hold 100 bytes, and this would be 101: wait"):
        memory.of("eve").hold(6)
    of_ann[0].release_all()
    memory.of("eve").hold(6)
    assert memory.of("ann") is ann
    del ann, of_ann
    gc.collect()
    assert memory.num_bytes == 61
