"""A connection that breaks, or a session that ends, while the server takes an op in steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from support.asgi_peer import bench, connected

from agentflow.protocol import ops
from agentflow.protocol.events import Reached, Value
from agentflow.protocol.op_table import GRAPH_TICKET
from agentflow.protocol.wire import Resume
from agentflow.runtime import loop_turns
from agentflow.runtime.interpreter.interpreter import Interpreter

pytestmark = pytest.mark.anyio

GRAPH = ops.SubmitGraph(
    1,
    (
        ops.Open(1),
        ops.Fork(1, (2, 3)),
        *(ops.Text(2, ("a",)) for _ in range(40)),
        ops.Set(2, 1, "v", ("done",)),
    ),
    outputs=(1,),
)
FORKED = tuple(range(101, 301))
SENT = (
    ops.Open(100),
    GRAPH,
    ops.Fork(100, FORKED),
    ops.Set(FORKED[-1], 100, "w", ("next",)),
    ops.Await(FORKED[-1], 1),
)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn is over immediately, so that each step of an op is one turn."""
    monkeypatch.setattr(loop_turns, "TURN_S", -1)


def event_at_step(monkeypatch: pytest.MonkeyPatch, number: int, step: int) -> anyio.Event:
    """An event that is set in this step of the op with this number."""
    event = anyio.Event()
    submitting = Interpreter.submitting

    def steps(interpreter: Interpreter[Any], op: ops.Op | ops.Rejected) -> Iterator[None]:
        for at, _ in enumerate(submitting(interpreter, op), 1):
            if op == SENT[number - 1] and at == step:
                event.set()
            yield

    monkeypatch.setattr(Interpreter, "submitting", steps)
    return event


STEPS = pytest.mark.parametrize(
    ("number", "step"), [(2, 1), (2, 2), (2, 20), (2, 40), (3, 1), (3, 2), (3, 3)]
)  # of the graph and of the fork, each of which has more


@STEPS
async def test_an_op_that_was_being_taken_runs_once_and_the_next_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, number: int, step: int
) -> None:
    event = event_at_step(monkeypatch, number, step)
    async with bench() as server, connected(server, binary=[True, True]) as [first, second]:
        welcome = await first.greet()
        [session] = server.sessions._sessions.values()
        first.put_ops(1, *SENT)
        await event.wait()
        assert session.num_taken == number - 1
        first.hang_up()
        numbers = dict.fromkeys((1, 100, FORKED[-1]), 0)
        again = await second.greet(Resume(welcome.session, welcome.secret, numbers, numbers))
        assert number <= again.ack <= len(SENT)
        if again.ack < len(SENT):
            second.put_ops(again.ack + 1, *SENT[again.ack :])
        ends = {Reached(1, GRAPH_TICKET), Reached(FORKED[-1], 1)}
        events = await second.events(lambda received: ends <= {e for e in received if isinstance(e, Reached)})
        values = [(event.var, event.text) for event in events if isinstance(event, Value)]
        assert sorted(values) == [(1, "done"), (100, "next")]
        second.bye()
        await server.is_idle()
        assert server.sessions.num_bytes == 0


@STEPS
async def test_a_session_that_ends_while_it_takes_an_op_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, number: int, step: int
) -> None:
    event = event_at_step(monkeypatch, number, step)
    async with bench() as server, connected(server, greets=True) as [peer]:
        [session] = server.sessions._sessions.values()
        peer.put_ops(1, *SENT)
        await event.wait()
        session.end()
        await server.is_idle()
        with anyio.fail_after(10):
            await peer.has_returned.wait()
        assert session.num_taken == number - 1
        assert server.generator.num_open == server.sessions.num_bytes == 0
