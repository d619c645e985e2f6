"""A submitted graph whose root is closed while other states of it still run: these end, and leave nothing."""

from __future__ import annotations

import anyio
import pytest
from support.observed_backends import settle
from support.session_peer import HANG, HangingGenerator, Listener, gen

from agentflow.backends.local import interpreted
from agentflow.protocol import ops
from agentflow.protocol.events import VarFailed
from agentflow.protocol.ops import Op

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]

# In all of these, the graph's state 2 waits in an op with variable 3, and its variable 4 comes later.
WAITS: dict[str, tuple[Op, ...]] = {
    "gen": (ops.Text(2, (HANG,)), gen(2, 3)),
    "set": (ops.Expect(2, 5, "e"), ops.Set(2, 3, "v3", (ops.Ref(5),))),
    "text": (ops.Expect(2, 3, "e"), ops.Text(2, (ops.Ref(3),))),
}


@pytest.mark.parametrize("waiting", WAITS)
async def test_closing_a_graph_cancels_its_running_states(
    waiting: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The consumers of its variables fail."""
    generator, listener = HangingGenerator(), Listener()
    graph = (ops.Open(1), ops.Fork(1, (2,)), *WAITS[waiting], gen(2, 4))
    with anyio.fail_after(10):
        async with interpreted(generator, listener.deliver) as connection:
            connection.send([ops.SubmitGraph(11, graph, outputs=(3, 4))])
            await settle()
            connection.send([ops.Open(1), ops.Text(1, (ops.Ref(13),)), gen(1, 2), ops.Close(11)])
            await listener.wait_for(lambda received: {2, 13, 14} <= received.ends.keys())
            for var in (2, 13, 14):
                assert isinstance(listener.ends[var], VarFailed)
            connection.send([ops.Open(12), ops.Text(12, ("again",)), gen(12, 13), ops.Close(1)])
            await listener.wait_for(lambda received: generator.num_open == 1)
    assert (generator.num_open, generator.num_running) == (0, 0)
    assert not caplog.records


async def test_a_reused_number_is_not_the_closed_state() -> None:
    """A close that waits in a state of the graph finds, when its turn comes, another state of that number."""
    generator, listener = HangingGenerator(), Listener()
    graph = (ops.Open(1), ops.Fork(1, (2,)), *WAITS["gen"])
    with anyio.fail_after(10):
        async with interpreted(generator, listener.deliver) as connection:
            connection.send([ops.SubmitGraph(11, graph, outputs=(3,)), ops.Close(12), ops.Close(11)])
            await listener.wait_for(lambda received: 13 in received.ends)
            connection.send([ops.Open(12), ops.Text(12, ("say again",)), ops.Await(12, 1)])
            await listener.wait_for(lambda received: received.reached.get(12) == 1)
            assert generator.num_open == 1
    assert generator.num_open == 0
