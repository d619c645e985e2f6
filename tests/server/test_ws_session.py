"""One session over one websocket: greeting, ops, events, acks, resuming, refusals and ends.

The websocket is in memory, so that a test decides when the server's writing is let through.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import anyio
import msgspec
import pytest
from asgi_peer import AsgiPeer, connected
from hypothesis import given
from hypothesis import strategies as st
from wire_peer import HANG, Listener, WireGenerator, count_words, gen

from agentflow import ops
from agentflow.errors import ProtocolError
from agentflow.events import Delta, Reached, StateFailed, StatsReply, Value, VarFailed
from agentflow.protocol import (
    VERSION,
    Bye,
    Events,
    Hello,
    Ops,
    Resume,
    Welcome,
    client_frames,
    encode,
)
from agentflow.server.limits import ServerLimits
from agentflow.server.sessions import Sessions, open_sessions
from agentflow.server.ws_session import ACK_BYTES, ACK_OPS
from agentflow.task_group import open_task_group

pytestmark = pytest.mark.anyio

FOREVER = ServerLimits(resume_grace_s=1e6, hello_timeout_s=1e6)
NO_GRACE = ServerLimits(resume_grace_s=0, hello_timeout_s=1e6)


@dataclass
class Bench:
    """A server's inside."""

    generator: WireGenerator
    sessions: Sessions[Any]

    async def is_idle(self) -> None:
        """Waits until no session is left, and checks that nothing of them is."""
        await self.sessions.wait_until_empty()
        assert (self.generator.num_open, self.generator.num_running) == (0, 0)


@asynccontextmanager
async def bench(limits: ServerLimits = FOREVER) -> AsyncIterator[Bench]:
    generator = WireGenerator()
    async with open_sessions(generator, limits) as sessions:
        yield Bench(generator, sessions)


async def check_still_served(peer: AsgiPeer, ids: count[int], first_op: int = 1) -> None:
    """A session answers as if nothing had happened."""
    state, var = next(ids), next(ids)
    peer.put_ops(first_op, ops.Open(state), ops.Text(state, ("say #3",)), gen(state, var))
    listener = Listener()
    while var not in listener.ends:
        frame = await peer.frame()
        assert isinstance(frame, Events)
        listener.deliver(frame.events)
    assert listener.texts[var] == count_words("say #3")


@pytest.mark.parametrize("binary", [True, False])
async def test_a_program_runs_in_either_encoding(binary: bool) -> None:
    async with bench() as server, connected(server.sessions, binary=[binary]) as [peer]:
        welcome = await peer.greet()
        assert welcome.version == VERSION
        assert welcome.capabilities == server.generator.capabilities
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
    async with bench() as server, connected(server.sessions) as [peer]:
        await peer.greet()
        peer.put_ops(1, ops.Open(1), ops.End(1), gen(1, 10))
        events = await peer.events(lambda events: len(events) == 2)
        failed = next(event for event in events if isinstance(event, StateFailed))
        assert (failed.error.code, failed.error.message) == ("bad_argument", "a turn ends that never began")
        var_failed = next(event for event in events if isinstance(event, VarFailed))
        assert var_failed.error.cause == failed.error


# Before the welcome


@pytest.mark.parametrize(("frame", "name"), [(Ops(1, ()), "an? ops frame"), (Bye(), "a bye frame")])
async def test_a_first_frame_other_than_hello_is_refused(frame: Ops | Bye, name: str) -> None:
    async with bench() as server, connected(server.sessions) as [peer]:
        peer.put(frame)
        refused, code = await peer.refusal()
        assert (refused.error.code, code) == ("protocol_error", 1002)
        assert "expected a hello frame" in refused.error.message
        assert f"{type(frame).__name__.lower()} frame came" in refused.error.message


async def test_a_silent_client_is_refused() -> None:
    limits = ServerLimits(hello_timeout_s=0.01)
    async with bench(limits) as server, connected(server.sessions) as [peer]:
        refused, code = await peer.refusal()
        assert code == 1002
        assert refused.error.message == "expected a hello frame within 0.01 s, and nothing came"


async def test_another_version_is_refused_with_both_named() -> None:
    async with bench() as server, connected(server.sessions) as [peer]:
        peer.put(Hello(VERSION + 1))
        refused, code = await peer.refusal()
        assert (refused.error.code, code) == ("protocol_error", 1002)
        assert f"version {VERSION + 1} " in refused.error.message
        assert f"version {VERSION}:" in refused.error.message


async def test_too_many_sessions_are_refused_and_one_that_ends_makes_room() -> None:
    limits = ServerLimits(max_sessions=1)
    async with bench(limits) as server, connected(server.sessions, binary=[True, True, True]) as peers:
        await peers[0].greet()
        peers[1].put(Hello(VERSION))
        refused, code = await peers[1].refusal()
        assert (refused.error.code, code) == ("overloaded", 1013)
        peers[0].bye()
        await server.is_idle()
        await peers[2].greet()


async def test_too_many_connections_are_refused() -> None:
    limits = ServerLimits(max_connections=1, resume_grace_s=1e6)
    async with bench(limits) as server, connected(server.sessions) as [first]:
        await first.greet()
        async with connected(server.sessions, binary=[False]) as [second]:
            second.put(Hello(VERSION))
            refused, code = await second.refusal()
            assert (refused.error.code, code) == ("overloaded", 1013)
        first.hang_up()
        await first.has_returned.wait()
        async with connected(server.sessions) as [third]:
            await third.greet()


# Frames that make no sense

BAD_FRAMES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "cannot be read"),
    "no frame": (b"[]", "Expected `object`"),
    "no kind": (b"{}", "missing required field `frame`"),
    "unknown kind": (b'{"frame":"events"}', "'events' - at `$.frame`"),
    "unknown op": (b'{"frame":"ops","first":1,"ops":[{"op":"sing"}]}', "'sing' - at `$.ops[0].op`"),
    "half a frame": (b'{"frame":"ops","first":1', "truncated"),
    "missing field": (b'{"frame":"ops","first":1,"ops":[{"op":"text","state":1}]}', "`parts`"),
    "wrong type": (b'{"frame":"ops","first":1,"ops":[{"op":"open","state":"1"}]}', "`$.ops[0].state`"),
    "huge number": (b'{"frame":"ops","first":1e400,"ops":[]}', "cannot be read"),
    "very deep": (b"[" * 100_000, "cannot be read"),
    "unknown sampling": (
        b'{"frame":"ops","first":1,"ops":[{"op":"gen","state":1,"var":1,"name":"a","params":{"heat":1}}]}',
        "`heat`",
    ),
    "half a character": (
        b'{"frame":"ops","first":1,"ops":[{"op":"text","state":1,"parts":["\\ud800"]}]}',
        "cannot be read",
    ),
    "second hello": (encode(Hello(VERSION), binary=False), "expected ops or a bye, and a hello frame came"),
    "gap": (encode(Ops(3, (ops.Open(1),)), binary=False), "expected ops from number 1 on"),
    "number zero": (encode(Ops(0, (ops.Open(1),)), binary=False), "expected ops from number 1 on"),
    "unknown state": (encode(Ops(1, (ops.Text(7, ("a",)),)), binary=False), "there is no state 7"),
    "unknown variable": (
        encode(Ops(1, (ops.Open(1), ops.Text(1, (ops.Ref(9),)))), binary=False),
        "there is no variable 9",
    ),
    "state twice": (encode(Ops(1, (ops.Open(1), ops.Open(1))), binary=False), "state 1 exists already"),
    "variable twice": (
        encode(Ops(1, (ops.Open(1), gen(1, 2), gen(1, 2))), binary=False),
        "variable 2 exists already",
    ),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
async def test_a_bad_frame_is_refused_with_what_is_wrong_and_harms_nobody_else(case: str) -> None:
    data, wrong = BAD_FRAMES[case]
    async with bench() as server, connected(server.sessions, binary=[False, True]) as [bad, good]:
        await bad.greet()
        await good.greet()
        ids = count(1)
        await check_still_served(good, ids)
        bad.put_data(data)
        refused, code = await bad.refusal()
        assert (refused.error.code, code) == ("protocol_error", 1002)
        assert wrong in refused.error.message
        await check_still_served(good, ids, first_op=4)
        good.bye()
        await server.is_idle()  # the bad one has ended at once, with no grace


def _is_frame(data: bytes) -> bool:
    try:
        client_frames().decode(data)
    except ProtocolError:
        return False
    return True


@st.composite
def mutated_frames(draw: st.DrawFn) -> bytes:
    """Bytes that are no frame, though many were nearly one."""
    frame = draw(
        st.sampled_from(
            [
                encode(Hello(VERSION, Resume("a", "b", {1: 2}, {3: 4})), binary=True),
                encode(Ops(1, (ops.Open(1), ops.Text(1, ("hello", ops.Ref(3))), gen(1, 2))), binary=True),
                encode(Bye(), binary=True),
                b"",
            ]
        )
    )
    start = draw(st.integers(0, len(frame)))
    end = draw(st.integers(start, len(frame)))
    return frame[:start] + draw(st.binary(max_size=20)) + frame[end:]


@given(st.lists(mutated_frames().filter(lambda data: not _is_frame(data)), min_size=1, max_size=4))
async def test_any_bytes_that_are_no_frame_are_refused(messages: list[bytes]) -> None:
    binary = [True] * (len(messages) + 1)
    async with bench() as server, connected(server.sessions, binary=binary) as [good, *bad]:
        await good.greet()
        for place, (peer, message) in enumerate(zip(bad, messages, strict=True)):
            if place % 2:  # before the hello, and after
                await peer.greet()
            peer.put_data(message)
            refused, code = await peer.refusal()
            assert (refused.error.code, code) == ("protocol_error", 1002)
        await check_still_served(good, count(1))
        assert len(server.sessions) == 1


async def test_both_encodings_in_one_session_are_refused() -> None:
    async with bench() as server, connected(server.sessions) as [peer]:
        await peer.greet()
        peer.put_data('{"frame":"bye"}')
        refused, _ = await peer.refusal()
        assert "expected binary frames (msgpack) as in the hello frame" in refused.error.message
        assert "text frames (JSON) came" in refused.error.message


@pytest.mark.parametrize("binary", [True, False])
async def test_a_frame_over_the_limit_is_refused(binary: bool) -> None:
    limits = ServerLimits(frame_bytes=4096)
    async with bench(limits) as server, connected(server.sessions, binary=[binary]) as [peer]:
        await peer.greet()
        peer.put_ops(1, ops.Open(1), ops.Text(1, ("é" * 2048,)))
        refused, code = await peer.refusal()
        assert (refused.error.code, code) == ("frame_too_large", 1009)
        assert "4,096" in refused.error.message
        await server.is_idle()


async def test_a_client_that_breaks_the_websocket_rules_ends_its_session() -> None:
    async with bench() as server, connected(server.sessions) as [peer]:
        await peer.greet()
        peer.hang_up(code=1009)
        await server.is_idle()


# Ends


async def test_bye_frees_everything_at_once() -> None:
    async with bench() as server, connected(server.sessions) as [peer]:
        await peer.greet()
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
    async with bench(limits) as server, connected(server.sessions) as [peer]:
        await peer.greet()
        peer.put_ops(1, ops.Open(1), ops.Text(1, (HANG,)), gen(1, 4))
        await server.generator.has_hung.wait()
        assert len(server.sessions) == 1
        peer.hang_up()
        await server.is_idle()


async def test_without_grace_a_session_lives_as_long_as_its_connection() -> None:
    async with bench(NO_GRACE) as server, connected(server.sessions) as [peer]:
        await peer.greet()
        await check_still_served(peer, count(1))
        peer.hang_up()
        await server.is_idle()


async def test_shutting_down_says_so_and_frees_everything() -> None:
    generator = WireGenerator()
    codes: list[int] = []
    is_ready = anyio.Event()

    async def client(sessions: Sessions[Any]) -> None:
        async with connected(sessions) as [peer]:
            await peer.greet()
            peer.put_ops(1, ops.Open(1), ops.Text(1, (HANG,)), gen(1, 2))
            await peer.events(bool)
            is_ready.set()
            codes.append(await peer.close_code())

    async with open_task_group() as group, open_sessions(generator, FOREVER) as sessions:
        group.start_soon(client, sessions)
        await is_ready.wait()
    assert codes == [1012]
    assert (generator.num_open, generator.num_running) == (0, 0)


async def test_a_fault_of_the_server_costs_one_session_only() -> None:
    async with bench() as server, connected(server.sessions, binary=[True, True]) as [peer, good]:
        await peer.greet()
        await good.greet()
        server.generator.stats_fault = ZeroDivisionError("a fault")
        peer.put_ops(1, ops.Open(1), ops.GetStats(1))
        refused, code = await peer.refusal()
        assert (refused.error.code, code) == ("engine_failed", 1011)
        assert "a fault" in refused.error.message
        await check_still_served(good, count(1))
        good.bye()
        await server.is_idle()


# Acks and slow readers


async def test_ops_without_events_are_confirmed_after_a_number_of_them() -> None:
    async with bench() as server, connected(server.sessions) as [peer]:
        await peer.greet()
        peer.put_ops(1, ops.Open(1), *(ops.Text(1, ("a",)) for _ in range(ACK_OPS)))
        assert await peer.frame() == Events(ACK_OPS + 1)


async def test_ops_without_events_are_confirmed_after_a_number_of_bytes() -> None:
    async with bench() as server, connected(server.sessions) as [peer]:
        await peer.greet()
        peer.put_ops(1, ops.Open(1), ops.Text(1, ("a" * ACK_BYTES,)))
        assert await peer.frame() == Events(2)


async def test_ops_sent_again_are_taken_once() -> None:
    async with bench() as server, connected(server.sessions) as [peer]:
        await peer.greet()
        program = (ops.Open(1), ops.Text(1, ("once #2",)), ops.Text(1, (" more",)), gen(1, 2))
        peer.put_ops(1, *program[:3])
        peer.put_ops(1, *program)
        peer.put_ops(2, *program[1:])
        events = await peer.events(lambda events: any(isinstance(event, Value) for event in events))
        assert "".join(event.text for event in events if isinstance(event, Delta | Value)) == "more"
        assert server.generator.num_open == 1


async def test_a_slow_reader_gets_it_at_once_and_slows_nobody_else() -> None:
    async with bench() as server, connected(server.sessions, binary=[True, True]) as [slow, quick]:
        await slow.greet()
        await quick.greet()
        slow.put_ops(1, ops.Open(1), ops.Text(1, ("much #3000",)), gen(1, 2), ops.GetStats(3))
        listener = Listener()
        # The slow one's server is stuck in its first events while the quick one is served, twice over.
        ids = count(1)
        await check_still_served(quick, ids)
        while server.generator.num_running:
            await anyio.lowlevel.checkpoint()
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
    async with bench(limits) as server, connected(server.sessions, binary=[False]) as [peer]:
        await peer.greet()
        peer.put_ops(1, ops.Open(1), ops.Text(1, ("much #3000",)), gen(1, 2))
        while server.generator.num_running == 0:
            await anyio.lowlevel.checkpoint()
        while server.generator.num_running:
            await anyio.lowlevel.checkpoint()
        listener = Listener()
        while 2 not in listener.ends:
            message = await peer.message()
            assert len(message["text"].encode()) <= 4096
            frame = msgspec.json.decode(message["text"], type=Events)
            listener.deliver(frame.events)
        assert listener.texts[2] == count_words("much #3000")


# Resuming


async def test_a_client_comes_back_and_hears_exactly_the_rest() -> None:
    async with bench() as server, connected(server.sessions, binary=[True, False]) as [first, second]:
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


async def test_a_client_that_heard_an_end_but_lost_it_hears_it_again() -> None:
    async with bench() as server, connected(server.sessions, binary=[True, True]) as [first, second]:
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
    async with bench() as server, connected(server.sessions, binary=[True] * 3) as peers:
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
    async with bench() as server, connected(server.sessions, binary=[True, True]) as [stuck, new]:
        welcome = await stuck.greet()
        stuck.put_ops(1, ops.Open(1), ops.Text(1, ("much #300",)), gen(1, 2))
        while server.generator.num_running == 0:
            await anyio.lowlevel.checkpoint()
        # Nobody reads from the first connection any more: its writer is stuck.
        again = await new.greet(Resume(welcome.session, welcome.secret, {2: 0}, {1: 0}))
        assert again.ack == 3
        listener = Listener()
        while 2 not in listener.ends:
            frame = await new.frame()
            assert isinstance(frame, Events)
            listener.deliver(frame.events)
        assert listener.texts[2] == count_words("much #300")


async def test_a_session_that_is_gone_or_not_ones_own_is_refused_in_the_same_words() -> None:
    async with bench() as server, connected(server.sessions, binary=[True] * 4) as peers:
        own = await peers[0].greet()
        peers[0].bye()
        await server.is_idle()
        other = await peers[1].greet()
        messages = set()
        for peer, resume in (
            (peers[2], Resume(own.session, own.secret)),
            (peers[3], Resume(other.session, own.secret)),
        ):
            peer.put(Hello(VERSION, resume))
            refused, code = await peer.refusal()
            assert (refused.error.code, code) == ("server_lost", 1008)
            messages.add(refused.error.message)
        assert len(messages) == 1
        await check_still_served(peers[1], count(1))


async def test_an_answer_to_stats_waits_for_a_client_that_is_away() -> None:
    async with bench() as server, connected(server.sessions, binary=[True, True]) as [first, second]:
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


async def test_a_hundred_sessions_at_once_get_each_its_own() -> None:
    async with bench() as server, connected(server.sessions, binary=[True, False] * 50) as peers:
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
