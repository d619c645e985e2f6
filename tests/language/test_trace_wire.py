"""Graphs over the wire: one op, one answer, in both encodings and across a broken connection."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
from support.language.random_programs import Step, answer, whole
from support.tcp_proxy import Budget, proxied
from support.wire_server import thread_server

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.protocol import ops
from agentflow.protocol.events import Event, Reached, StateFailed, VarFailed
from agentflow.protocol.sampling import GenParams

pytestmark = pytest.mark.anyio

PROGRAM = [
    Step("text", "a"),
    Step("argument"),
    Step("gen", number=1),
    Step("group", inner=[[Step("wire"), Step("gen", number=2)], [Step("gen", number=2), Step("strip")]]),
    Step("turn", "x", 3),
]


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
async def test_a_graph_over_the_wire(encoding):
    graph = whole.trace(todo=PROGRAM)
    with thread_server() as server:
        async with af.session(backend=af.Remote(server.url, encoding=encoding), seed=3) as flow:
            wanted = await flow.run(whole, "über", PROGRAM)
            assert await flow.submit(graph, {"argument": "über"}) == wanted
        await server.wait_until_idle()


@pytest.mark.parametrize("side", ["up", "down"])
async def test_a_graph_survives_broken_connections(side):
    graph = whole.trace(todo=PROGRAM)
    with thread_server() as server:
        async with proxied(server.port) as proxy:
            proxy.budgets += [Budget(**{side: num_bytes}) for num_bytes in (900, 1000, 1200, 1500)]
            async with af.session(proxy.url, seed=3) as flow:
                found = [await flow.submit(graph, {"argument": "x"}) for _ in range(3)]
                assert proxy.num_connections > 1
                assert found == [await flow.run(whole, "x", PROGRAM)] * 3
        await server.wait_until_idle()


OPEN = ops.Open(1)


@pytest.mark.parametrize(
    "bad",
    [
        (),
        (ops.Open(2),),
        (OPEN, ops.Open(2)),
        (OPEN, ops.Await(1, 1)),
        (OPEN, ops.Cancel(1)),
        (OPEN, ops.SubmitGraph(2, (OPEN,))),
        (OPEN, ops.Text(2, ("x",))),
        (OPEN, ops.Text(1, (ops.Ref(9),))),
        (OPEN, ops.Gen(1, 2, "x", GenParams()), ops.Gen(1, 2, "x", GenParams())),
    ],
)
async def test_an_invalid_graph_fails_its_root(bad):
    generator = ScriptedGenerator(answer)
    events: list[Event] = []
    async with interpreted(generator, events.extend) as connection:
        connection.send([ops.SubmitGraph(5, bad, outputs=(2,)), ops.Open(50), ops.Await(50, 1)])
        while Reached(50, 1) not in events:
            await anyio.lowlevel.checkpoint()
        failed = [(event.state, event.error.code) for event in events if isinstance(event, StateFailed)]
        assert failed == [(5, "protocol_error")]
        assert [event.var for event in events if isinstance(event, VarFailed)] == [6]
        connection.send([ops.Close(5)])
        await anyio.wait_all_tasks_blocked()
        connection.send([ops.Open(5), ops.Await(5, 1)])  # its number is free again
        while Reached(5, 1) not in events:
            await anyio.lowlevel.checkpoint()
    assert generator.num_open == 0
