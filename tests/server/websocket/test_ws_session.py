"""One session over one websocket: a program's ops and events, acks, slow readers, and its end.

The websocket is in memory, so that a test decides when the server's writing is let through.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import anyio
import msgspec
import pytest
from support.asgi_peer import FOREVER, NO_GRACE, AsgiPeer, Bench, bench, check_still_served, connected
from support.holds import until
from support.session_peer import HANG, HangingGenerator, Listener, count_words, gen

from agentflow.errors import EngineFailed
from agentflow.protocol import ops
from agentflow.protocol.events import Delta, ErrorInfo, GraphReply, StateFailed, StatsReply, Value, VarFailed
from agentflow.protocol.wire import VERSION, Events, Welcome
from agentflow.runtime.task_group import open_task_group
from agentflow.server.config.limits import ServerLimits
from agentflow.server.websocket.connection import ACK_BYTES, ACK_OPS
from agentflow.server.websocket.sessions import Sessions, open_sessions

pytestmark = pytest.mark.anyio


async def graphs_of(peer: AsgiPeer, first_op: int, ticket: int, *, of_tenant: bool) -> GraphReply:
    peer.put_ops(first_op, ops.GetGraph(ticket, of_tenant))
    while True:
        frame = await peer.frame()
        assert isinstance(frame, Events)
        for event in frame.events:
            if isinstance(event, GraphReply):
                assert event.ticket == ticket
                return event


async def test_a_client_sees_the_graphs_of_its_tenant() -> None:
    async with (
        bench() as server,
        connected(server, binary=[True] * 2, tenant="ann", greets=True) as [first, second],
        connected(server, tenant="bob", greets=True) as [other],
    ):
        for number, peer in enumerate((first, second, other)):
            peer.put_ops(1, ops.Open(1, label=f"p{number}"), ops.Text(1, (HANG,)), gen(1, 2))
            reply = await graphs_of(peer, 4, 1, of_tenant=False)
            assert [state.label for state in reply.graph.states] == [f"p{number}"]
            assert reply.others == ()
        for number, peer in enumerate((first, second)):
            reply = await graphs_of(peer, 5, 2, of_tenant=True)
            assert [state.label for state in reply.graph.states] == [f"p{number}"]
            assert [[state.label for state in graph.states] for graph in reply.others] == [[f"p{1 - number}"]]
        assert (await graphs_of(other, 5, 2, of_tenant=True)).others == ()
        second.bye()
        await second.close_code()
        for number in count(6):
            if (await graphs_of(first, number, number, of_tenant=True)).others == ():
                break  # the session that has ended is gone


@pytest.mark.parametrize("binary", [True, False])
async def test_a_program_runs_in_either_encoding(binary: bool) -> None:
    async with bench() as server, connected(server, binary=[binary]) as [peer]:
        welcome = await peer.greet()
        assert welcome.version == VERSION
        assert welcome.models == {welcome.model: server.generator.capabilities}
        assert (welcome.limits.frame_bytes, welcome.limits.resume_grace_s) == (8 * 1024 * 1024, 1e6)
        assert (welcome.ack, len(welcome.secret) >= 32) == (0, True)
        peer.put_ops(1, ops.Open(1), ops.Text(1, ("give me #20",)), gen(1, 10))
        peer.put_ops(
            4,
            ops.Fork(1, (2, 3)),
            ops.Text(2, ("é ", ops.Ref(10), " yes")),
            ops.Select(2, 11, "choice", ("yes", "no")),
            ops.Await(1, 1),
            ops.GetStats(7),
        )
        listener = Listener()
        ack = 0
        while not (len(listener.ends) == 2 and listener.stats and listener.reached):
            frame = await peer.frame()
            assert isinstance(frame, Events)
            listener.deliver(frame.events)
            ack = frame.ack
        assert listener.texts == {10: count_words("give me #20"), 11: "yes"}
        assert isinstance(listener.ends[11], Value)
        assert listener.ends[11].choices == {"yes": 0.0, "no": -10.0}
        assert (listener.reached, listener.stats[7].model) == ({1: 1}, "scripted")
        assert ack == 8
        peer.bye()
        assert await peer.close_code() == 1000
        await server.is_idle()


async def test_failures_travel_with_their_causes() -> None:
    async with bench() as server, connected(server, greets=True) as [peer]:
        peer.put_ops(1, ops.Open(1), ops.End(1), gen(1, 10))
        events = await peer.events(lambda events: len(events) == 2)
        failed = next(event for event in events if isinstance(event, StateFailed))
        assert failed.error.code == "bad_argument"
        var_failed = next(event for event in events if isinstance(event, VarFailed))
        assert var_failed.error.cause == failed.error


async def test_a_hundred_sessions_at_once_get_each_its_own() -> None:
    async with bench() as server, connected(server, binary=[True, False] * 50) as peers:
        texts: dict[int, str] = {}

        async def client(number: int, peer: AsgiPeer) -> None:
            assert isinstance(await peer.greet(), Welcome)
            peer.put_ops(1, ops.Open(1), ops.Text(1, (f"{'x' * number} #7",)), gen(1, 2))
            listener = Listener()
            while 2 not in listener.ends:
                frame = await peer.frame()
                assert isinstance(frame, Events)
                listener.deliver(frame.events)
            texts[number] = listener.texts[2]
            peer.bye()
            assert await peer.close_code() == 1000

        async with open_task_group() as group:
            for number, peer in enumerate(peers):
                group.start_soon(client, number, peer)
        assert texts == {number: count_words(f"{'x' * number} #7") for number in range(100)}
        await server.is_idle()


# Ends


async def test_bye_frees_everything_at_once() -> None:
    async with bench() as server, connected(server, greets=True) as [peer]:
        peer.put_ops(
            1, ops.Open(1), ops.Text(1, (HANG,)), ops.Fork(1, (2, 3)), gen(1, 4), gen(2, 5), gen(3, 6)
        )
        await peer.events(lambda events: len(events) == 3)
        assert (server.generator.num_open, server.generator.num_running) == (3, 3)
        peer.bye()
        assert await peer.close_code() == 1000
        await server.is_idle()


async def test_a_vanished_client_frees_everything_after_the_grace() -> None:
    limits = ServerLimits(resume_grace_s=0.01)
    async with bench(limits) as server, connected(server, greets=True) as [peer]:
        peer.put_ops(1, ops.Open(1), ops.Text(1, (HANG,)), gen(1, 4))
        await server.generator.has_hung.wait()
        assert len(server.sessions) == 1
        peer.hang_up()
        await server.is_idle()


async def test_without_grace_a_session_lives_as_long_as_its_connection() -> None:
    async with bench(NO_GRACE) as server, connected(server, greets=True) as [peer]:
        await check_still_served(peer, count(1))
        peer.hang_up()
        await server.is_idle()


async def test_shutting_down_says_so_and_frees_everything() -> None:
    generator = HangingGenerator()
    codes: list[int] = []
    is_ready = anyio.Event()

    async def client(sessions: Sessions[Any]) -> None:
        async with connected(Bench(generator, sessions)) as [peer]:
            await peer.greet()
            peer.put_ops(1, ops.Open(1), ops.Text(1, (HANG,)), gen(1, 2))
            await peer.events(bool)
            is_ready.set()
            codes.append(await peer.close_code())

    async with open_task_group() as group, open_sessions(FOREVER) as sessions:
        group.start_soon(client, sessions)
        await is_ready.wait()
    assert codes == [1012]
    assert (generator.num_open, generator.num_running) == (0, 0)


async def test_a_fault_of_the_server_costs_one_session_only_and_is_explained_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as server, connected(server, binary=[True, True], greets=True) as [peer, good]:
        server.generator.stats_fault = ZeroDivisionError("a fault")
        peer.put_ops(1, ops.Open(1), ops.GetStats(1))
        refused, code = await peer.refusal()
        assert (refused.error.code, code) == ("engine_failed", 1011)
        assert "a fault" not in str(refused)
        number = refused.error.message.split()[-1]
        [line] = [record for record in caplog.records if number in record.getMessage()]
        assert "a fault" in line.exc_text
        await check_still_served(good, count(1))
        good.bye()
        await server.is_idle()


async def test_statistics_that_there_are_none_of_now_cost_no_session() -> None:
    async with bench() as server, connected(server, greets=True) as [peer]:
        server.generator.stats_fault = EngineFailed("it restarts")
        peer.put_ops(1, ops.GetStats(1))
        [reply] = await peer.events(bool)
        assert reply == StatsReply(1, error=ErrorInfo("engine_failed", "it restarts"))
        server.generator.stats_fault = None
        peer.put_ops(2, ops.GetStats(2))
        [reply] = await peer.events(bool)
        assert isinstance(reply, StatsReply)
        assert (reply.ticket, reply.error) == (2, None)
        assert reply.stats is not None
        peer.bye()
        await server.is_idle()


# Acks and slow readers


async def test_ops_without_events_are_confirmed_after_a_number_of_them() -> None:
    async with bench() as server, connected(server, greets=True) as [peer]:
        peer.put_ops(1, ops.Open(1), *(ops.Text(1, ("a",)) for _ in range(ACK_OPS)))
        assert await peer.frame() == Events(ACK_OPS + 1)


async def test_ops_without_events_are_confirmed_after_a_number_of_bytes() -> None:
    async with bench() as server, connected(server, greets=True) as [peer]:
        peer.put_ops(1, ops.Open(1), ops.Text(1, ("a" * ACK_BYTES,)))
        assert await peer.frame() == Events(2)


async def test_ops_sent_again_are_taken_once() -> None:
    async with bench() as server, connected(server, greets=True) as [peer]:
        program = (ops.Open(1), ops.Text(1, ("once #2",)), ops.Text(1, (" more",)), gen(1, 2))
        peer.put_ops(1, *program[:3])
        peer.put_ops(1, *program)
        peer.put_ops(2, *program[1:])
        events = await peer.events(lambda events: any(isinstance(event, Value) for event in events))
        assert "".join(event.text for event in events if isinstance(event, Delta | Value)) == "more"
        assert server.generator.num_open == 1


async def test_a_slow_reader_receives_the_rest_and_slows_no_other_session() -> None:
    async with bench() as server, connected(server, binary=[True, True], greets=True) as [slow, quick]:
        slow.put_ops(1, ops.Open(1), ops.Text(1, ("much #3000",)), gen(1, 2), ops.GetStats(3))
        listener = Listener()
        # The slow one's server is stuck in its first events while the quick one is served, twice over.
        ids = count(1)
        await check_still_served(quick, ids)
        await until(lambda: server.generator.num_running == 0)
        await check_still_served(quick, ids, first_op=4)
        num_sent = slow.num_sent
        while 2 not in listener.ends:
            frame = await slow.frame()
            assert isinstance(frame, Events)
            listener.deliver(frame.events)
        assert listener.texts[2] == count_words("much #3000")
        assert slow.num_sent - num_sent <= 3


async def test_events_are_cut_to_the_frame_limit() -> None:
    limits = ServerLimits(frame_bytes=4096)
    async with bench(limits) as server, connected(server, binary=[False], greets=True) as [peer]:
        peer.put_ops(1, ops.Open(1), ops.Text(1, ("much #3000",)), gen(1, 2))
        await until(lambda: server.generator.num_begun > 0)
        await until(lambda: server.generator.num_running == 0)
        listener = Listener()
        while 2 not in listener.ends:
            message = await peer.message()
            assert len(message["text"].encode()) <= 4096
            frame = msgspec.json.decode(message["text"], type=Events)
            listener.deliver(frame.events)
        assert listener.texts[2] == count_words("much #3000")
