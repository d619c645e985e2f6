"""Errors and hints that can be decoded, but not encoded again or sent to an engine process."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from support.asgi_peer import bench, connected
from support.fake_engine import TEMPLATE
from support.process_engine import process_engine
from support.session_peer import gen

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.errors import MAX_CAUSES, RunFailed
from agentflow.protocol import ops
from agentflow.protocol.events import ErrorInfo, Event, Reached, VarFailed
from agentflow.runtime.interpreter.checking import CheckingInterpreter

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("depth", [MAX_CAUSES, 200, 850])
async def test_an_error_with_any_number_of_causes_can_be_provided(depth: int) -> None:
    error: dict[str, Any] = {"code": "run_failed", "message": f"{depth}"}
    for level in range(depth - 1, 0, -1):
        error = {"code": "run_failed", "message": f"{level}", "cause": error}
    provided = {"op": "provide", "var": 2, "error": error}
    async with bench() as server, connected(server, binary=[False], greets=True) as [peer]:
        peer.put_ops(1, ops.Open(1), ops.Expect(1, 2, "e"))
        peer.put_data(json.dumps({"frame": "ops", "first": 3, "ops": [provided]}))
        [event] = await peer.events(bool)
        assert isinstance(event, VarFailed)
        info: ErrorInfo | None = event.error
        for level in range(1, MAX_CAUSES + 1):
            assert info is not None
            assert (info.code, info.message) == (RunFailed.code, f"{level}")
            info = info.cause
        assert info is None
        peer.bye()
        await server.is_idle()


HINTS: tuple[tuple[str, float], ...] = (
    ("output_tokens", 2**70),
    ("output_tokens", 2**31),
    ("output_tokens", -1),
    ("forks", 0),
    ("deadline_s", float("nan")),
)


async def test_a_hint_that_an_engine_process_cannot_be_sent_fails_its_state_alone() -> None:
    """Otherwise the engine would never end the request."""
    events: list[Event] = []
    async with process_engine() as client:
        async with anyio.create_task_group() as group:
            interpreter = CheckingInterpreter(EngineGenerator(client, TEMPLATE), group)
            for state, (field, value) in enumerate(HINTS, 1):
                hint = ops.Hint(state, **{field: value})
                before = [ops.Open(state), ops.Text(state, ("abc",)), hint]
                interpreter.submit_all([*before, gen(state, state, 4)])
            last = len(HINTS) + 1
            interpreter.submit_all([ops.Open(last), ops.Text(last, ("abc",)), gen(last, last, 4)])
            interpreter.submit(ops.Await(last, 1))
            while not any(isinstance(event, Reached) for event in events):
                events += await interpreter.events.next()
            group.cancel_scope.cancel()
        interpreter.close()
        failed = {event.var: event.error.origin for event in events if isinstance(event, VarFailed)}
        assert set(failed) == {*range(1, last)}
        assert [failed[state].param for state in range(1, last)] == [field for field, _ in HINTS]
        assert client.num_calls == len(client.engine._journal) == 0
