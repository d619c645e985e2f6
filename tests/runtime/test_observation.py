"""What a client observes beside its results: outputs of a live graph, and answers of a backend that cannot be
watched."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from agentflow.backends.scripted import ScriptedContext, ScriptedGenerator
from agentflow.protocol import ops
from agentflow.protocol.events import Delta, Event, Reached, Value
from agentflow.protocol.sampling import SamplingParams
from agentflow.runtime.interpreter import Interpreter

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def scripted(answer: str = "one two three") -> AsyncIterator[Interpreter[ScriptedContext]]:
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            yield Interpreter(ScriptedGenerator(lambda prompt: answer), group)
            group.cancel_scope.cancel()


async def events_until(interpreter: Interpreter[ScriptedContext], last: type[Event]) -> list[Event]:
    events: list[Event] = []
    while not any(isinstance(event, last) for event in events):
        await interpreter.events.wait()
        events += interpreter.events.drain()
    return events


@pytest.mark.parametrize("live", [False, True])
async def test_outputs_of_a_live_graph_are_reported_while_they_are_generated(live: bool) -> None:
    gens = [ops.Gen(1, var, "x", SamplingParams()) for var in (2, 3)]
    async with scripted() as interpreter:
        interpreter.submit(ops.Submit(5, (ops.Open(1), *gens), outputs=(3,), live=live))
        events = await events_until(interpreter, Reached)
    assert {event.var for event in events if isinstance(event, Delta | Value)} == {7}
    deltas = [event for event in events if isinstance(event, Delta)]
    (value,) = [event for event in events if isinstance(event, Value)]
    assert bool(deltas) == live
    assert "".join([event.text for event in [*deltas, value]]) == "one two three"
