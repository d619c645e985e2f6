"""A client that resumes its session receives the missing events, and no other client can resume it."""

from __future__ import annotations

from itertools import count

import pytest
from support.asgi_peer import AsgiPeer, bench, check_still_served, connected
from support.holds import until
from support.session_peer import HANG, Listener, count_words, gen

from agentflow.protocol import ops
from agentflow.protocol.events import Reached, StateFailed, StatsReply, Value
from agentflow.protocol.wire import VERSION, Events, Hello, Resume
from agentflow.runtime.task_group import open_task_group

pytestmark = pytest.mark.anyio


async def test_a_resumed_client_receives_exactly_the_missing_events() -> None:
    async with bench() as server, connected(server, binary=[True, False]) as [first, second]:
        welcome = await first.greet()
        program = (ops.Open(1), ops.Text(1, ("some #50",)), gen(1, 2), ops.Await(1, 1), ops.Fork(1, (5,)))
        first.put_ops(1, *program)
        listener = Listener()
        while len(listener.texts.get(2, "")) < 20:
            frame = await first.frame()
            assert isinstance(frame, Events)
            listener.deliver(frame.events)
        first.hang_up()
        await first.has_returned.wait()
        assert len(server.sessions) == 1
        resume = Resume(welcome.session, welcome.secret, {2: len(listener.texts[2])}, {1: 0, 5: 0})
        again = await second.greet(resume)
        assert (again.session, again.ack) == (welcome.session, len(program))
        second.put_ops(len(program) + 1, ops.Await(5, 1))
        while not (listener.ends and len(listener.reached) == 2):
            frame = await second.frame()
            assert isinstance(frame, Events)
            listener.deliver(frame.events)
        second.put_ops(len(program) + 2, ops.Cancel(5))
        [failed] = await second.events(bool)
        assert isinstance(failed, StateFailed)
        assert listener.texts[2] == count_words("some #50")


async def test_an_end_that_was_not_acknowledged_is_sent_again() -> None:
    async with bench() as server, connected(server, binary=[True, True]) as [first, second]:
        welcome = await first.greet()
        first.put_ops(1, ops.Open(1), ops.Text(1, ("word",)), gen(1, 2), ops.Await(1, 3))
        await first.events(lambda events: any(isinstance(event, Reached) for event in events))
        first.hang_up()
        await second.greet(Resume(welcome.session, welcome.secret, {2: 1}, {1: 0}))
        events = await second.events(lambda events: len(events) >= 2)
        assert {type(event) for event in events} == {Value, Reached}
        [value] = [event for event in events if isinstance(event, Value)]
        assert (value.at, value.text) == (1, "ord")


async def test_coming_back_before_the_server_noticed_takes_the_session_over() -> None:
    async with bench() as server, connected(server, binary=[True] * 3) as peers:
        welcome = await peers[0].greet()
        resume = Resume(welcome.session, welcome.secret)
        for old, new in (peers[:2], peers[1:]):
            closed: list[int] = []

            async def close_code(peer: AsgiPeer, closed: list[int]) -> None:
                closed.append(await peer.close_code())

            async with open_task_group() as group:
                group.start_soon(close_code, old, closed)
                await new.greet(resume)
            assert closed == [4001]
        await check_still_served(peers[2], count(1))
        assert len(server.sessions) == 1


async def test_a_stuck_connection_cannot_keep_its_session() -> None:
    async with bench() as server, connected(server, binary=[True, True]) as [stuck, new]:
        welcome = await stuck.greet()
        stuck.put_ops(1, ops.Open(1), ops.Text(1, ("much #300",)), gen(1, 2))
        await until(lambda: server.generator.num_begun > 0)
        # The first connection is not read any more: its writer is blocked.
        again = await new.greet(Resume(welcome.session, welcome.secret, {2: 0}, {1: 0}))
        assert again.ack == 3
        listener = Listener()
        while 2 not in listener.ends:
            frame = await new.frame()
            assert isinstance(frame, Events)
            listener.deliver(frame.events)
        assert listener.texts[2] == count_words("much #300")


async def test_a_session_that_is_gone_and_one_of_another_client_are_refused_alike() -> None:
    async with bench() as server, connected(server, binary=[True] * 4) as peers:
        own = await peers[0].greet()
        peers[0].bye()
        await server.is_idle()
        other = await peers[1].greet()
        messages = set()
        for peer, session in ((peers[2], own.session), (peers[3], other.session)):
            peer.put(Hello(VERSION, Resume(session, own.secret)))
            refused, code = await peer.refusal()
            assert (refused.error.code, code) == ("server_lost", 1008)
            messages.add(refused.error.message)
        assert len(messages) == 1
        await check_still_served(peers[1], count(1))


async def test_an_answer_to_stats_waits_for_a_client_that_is_away() -> None:
    async with bench() as server, connected(server, binary=[True, True]) as [first, second]:
        welcome = await first.greet()
        first.put_ops(1, ops.Open(1), ops.Text(1, (HANG,)), gen(1, 2))
        await server.generator.has_hung.wait()
        await first.events(bool)
        first.hang_up()
        await first.has_returned.wait()
        await second.greet(Resume(welcome.session, welcome.secret, {2: 5}, {1: 0}))
        second.put_ops(4, ops.GetStats(8))
        [reply] = await second.events(bool)
        assert isinstance(reply, StatsReply)
        assert reply.ticket == 8
