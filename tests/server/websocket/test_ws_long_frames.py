"""Frames with expensive ops yield to others, and their total is limited."""

from __future__ import annotations

from itertools import count

import pytest
from support.asgi_peer import bench, check_still_served, connected

from agentflow.protocol import ops
from agentflow.protocol.events import Reached, StateFailed
from agentflow.runtime import loop_turns
from agentflow.runtime.interpreter import state_tree

pytestmark = pytest.mark.anyio


async def test_ops_that_take_long_let_others_run_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn ends immediately: a frame of few ops takes one turn per op."""
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


def limited_chain(first: int, length: int) -> list[ops.Op]:
    """Each state has the limits of all states above it, and its own."""
    chain: list[ops.Op] = [ops.Open(first)]
    for number in range(first, first + length - 1):
        chain += [ops.Limit(number, output_tokens=5), ops.Fork(number, (number + 1,))]
    return [*chain, ops.Limit(first + length - 1, output_tokens=5)]


async def test_limits_do_not_add_up_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    length = 30
    monkeypatch.setattr(state_tree, "MAX_LIMITS", sum(range(length + 1)))
    async with bench() as server, connected(server, binary=[True, True], greets=True) as [bad, good]:
        first = 1
        for start in (1, 101):  # closed states do not count
            last = start + length - 1
            closes = [ops.Close(number) for number in range(start, last + 1)]
            sent = [*limited_chain(start, length), *closes[:-1], ops.Await(last, 1), closes[-1]]
            bad.put_ops(first, *sent)
            events = await bad.events(lambda events: any(isinstance(event, Reached) for event in events))
            assert not [event for event in events if isinstance(event, StateFailed)]
            first += len(sent)
        bad.put_ops(first, *limited_chain(201, length), ops.Limit(0, output_tokens=5))
        refused, code = await bad.refusal()
        assert (refused.error.code, code) == ("overloaded", 1013)
        await check_still_served(good, count(1))
        good.bye()
        await server.is_idle()
