"""What the server of a session refuses: no hello, too many, bad frames; and that it harms nobody else."""

from __future__ import annotations

from itertools import count

import pytest
from asgi_peer import bench, check_still_served, connected
from hypothesis import given
from hypothesis import strategies as st
from wire_peer import gen

from agentflow import ops
from agentflow.errors import ProtocolError
from agentflow.protocol import (
    VERSION,
    Bye,
    Hello,
    Ops,
    Resume,
    client_frames,
    encode,
)
from agentflow.server import ws_session
from agentflow.server.limits import ServerLimits

pytestmark = pytest.mark.anyio


# Before the welcome


@pytest.mark.parametrize("frame", [Ops(1, ()), Bye()])
async def test_a_first_frame_other_than_hello_is_refused(frame: Ops | Bye) -> None:
    async with bench() as server, connected(server) as [peer]:
        peer.put(frame)
        refused, code = await peer.refusal()
        assert (refused.error.code, code) == ("protocol_error", 1002)
        assert "expected a hello frame" in refused.error.message
        assert f"{type(frame).__name__.lower()} frame came" in refused.error.message


async def test_a_silent_client_is_refused() -> None:
    limits = ServerLimits(hello_timeout_s=0.01)
    async with bench(limits) as server, connected(server) as [peer]:
        refused, code = await peer.refusal()
        assert code == 1002
        assert refused.error.message == "expected a hello frame within 0.01 s, and nothing came"


async def test_another_version_is_refused_with_both_named() -> None:
    async with bench() as server, connected(server) as [peer]:
        peer.put(Hello(VERSION + 1))
        refused, code = await peer.refusal()
        assert (refused.error.code, code) == ("protocol_error", 1002)
        assert f"version {VERSION + 1} " in refused.error.message
        assert f"version {VERSION}:" in refused.error.message


async def test_too_many_sessions_are_refused_and_one_that_ends_makes_room() -> None:
    limits = ServerLimits(max_sessions=1)
    async with bench(limits) as server, connected(server, binary=[True, True, True]) as peers:
        await peers[0].greet()
        peers[1].put(Hello(VERSION))
        refused, code = await peers[1].refusal()
        assert (refused.error.code, code) == ("overloaded", 1013)
        peers[0].bye()
        await server.is_idle()
        await peers[2].greet()


async def test_too_many_connections_are_refused() -> None:
    limits = ServerLimits(max_connections=1, resume_grace_s=1e6)
    async with bench(limits) as server, connected(server) as [first]:
        await first.greet()
        async with connected(server, binary=[False]) as [second]:
            second.put(Hello(VERSION))
            refused, code = await second.refusal()
            assert (refused.error.code, code) == ("overloaded", 1013)
        first.hang_up()
        await first.has_returned.wait()
        async with connected(server) as [third]:
            await third.greet()


async def test_silent_connections_of_one_tenant_leave_others_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ws_session, "LAST_WORDS_S", 0.01)  # for those that find no place and say nothing
    async with bench(ServerLimits(max_connections=4)) as server:
        async with connected(server, binary=[True] * 2, tenant="ann") as peers:
            for peer in peers:
                await peer.message()  # accepted
            async with connected(server, binary=[True] * 3, tenant="ann") as more:
                for peer in more:
                    refused, code = await peer.refusal()
                    assert (refused.error.code, code) == ("overloaded", 1013)
                    assert "this tenant has 2 connections open" in refused.error.message
            async with connected(server, binary=[True] * 2, tenant="bob") as others:
                for other in others:
                    await other.greet()
            await peers[0].greet()
        assert server.sessions.num_connections == 0


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
    async with bench() as server, connected(server, binary=[False, True]) as [bad, good]:
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
    async with bench() as server, connected(server, binary=binary) as [good, *bad]:
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
    async with bench() as server, connected(server) as [peer]:
        await peer.greet()
        peer.put_data('{"frame":"bye"}')
        refused, _ = await peer.refusal()
        assert "expected binary frames (msgpack) as in the hello frame" in refused.error.message
        assert "text frames (JSON) came" in refused.error.message


@pytest.mark.parametrize("binary", [True, False])
async def test_a_frame_over_the_limit_is_refused(binary: bool) -> None:
    limits = ServerLimits(frame_bytes=4096)
    async with bench(limits) as server, connected(server, binary=[binary]) as [peer]:
        await peer.greet()
        peer.put_ops(1, ops.Open(1), ops.Text(1, ("é" * 2048,)))
        refused, code = await peer.refusal()
        assert (refused.error.code, code) == ("frame_too_large", 1009)
        assert "4,096" in refused.error.message
        await server.is_idle()


async def test_a_client_that_breaks_the_websocket_rules_ends_its_session() -> None:
    async with bench() as server, connected(server) as [peer]:
        await peer.greet()
        peer.hang_up(code=1009)
        await server.is_idle()
