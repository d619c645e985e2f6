"""Frames with expensive ops yield to others, and their total is limited."""

from __future__ import annotations

from itertools import count

import pytest
from support.asgi_peer import bench, check_still_served, connected
from support.session_peer import gen

from agentflow.protocol import ops
from agentflow.runtime import loop_turns
from agentflow.runtime.interpreter.state_tree import MAX_LIMITS

pytestmark = pytest.mark.anyio


async def test_ops_that_take_long_let_others_run_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn is over at once: a frame of few ops is taken in as many turns."""
    monkeypatch.setattr(loop_turns, "TURN_S", -1.0)
    num_ops = 128
    async with bench() as server, connected(server, binary=[True, True]) as [slow, good]:
        await good.greet()
        welcome = await slow.greet()
        session = server.sessions._sessions[welcome.session]
        slow.put_ops(1, ops.Open(1), *(ops.Text(1, ("a",)) for _ in range(num_ops)))
        turns: set[int] = set()
        ids = count(1)
        for number in range(4):
            await check_still_served(good, ids, first_op=1 + 3 * number)
            turns.add(session.num_taken)
        assert min(turns) < num_ops, "all was taken at once"
        for peer in (slow, good):
            peer.bye()
        await server.is_idle()


async def test_limits_do_not_add_up_without_end() -> None:
    num_states = 1000
    fork = ops.Fork(1, tuple(range(2, num_states + 1)))
    num_allowed = (MAX_LIMITS - 1) // num_states
    async with bench() as server, connected(server, binary=[True, True], greets=True) as [bad, good]:
        bad.put_ops(1, ops.Open(1), fork, *(ops.Limit(1, output_tokens=5) for _ in range(num_allowed)))
        bad.put_ops(3 + num_allowed, ops.Close(1), *(ops.Close(child) for child in fork.children))
        bad.put_ops(3 + num_allowed + num_states, ops.Open(1), ops.Await(1, 1))
        await bad.events(lambda events: any(getattr(event, "ticket", 0) == 1 for event in events))
        # What is closed counts no more.
        first = 5 + num_allowed + num_states
        bad.put_ops(first, ops.Text(1, ("say #1",)), fork, ops.Limit(0, output_tokens=5), gen(1, 1))
        await bad.events(lambda events: any(getattr(event, "usage", None) for event in events))
        bad.put_ops(first + 4, *(ops.Limit(0, output_tokens=5) for _ in range(num_allowed)))
        refused, code = await bad.refusal()
        assert (refused.error.code, code) == ("overloaded", 1013)
        await check_still_served(good, count(1))
        good.bye()
        await server.is_idle()
