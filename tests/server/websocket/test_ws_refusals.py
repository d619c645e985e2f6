"""Errors of sessions: no hello, too many, bad frames. No other session is affected."""

from __future__ import annotations

import logging
from itertools import count
from typing import NoReturn

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api_server import api_server
from support.asgi_peer import bench, check_still_served, connected
from support.session_peer import Listener, count_words, gen

import agentflow as af
from agentflow.errors import ProtocolError
from agentflow.protocol import ops
from agentflow.protocol.events import StateFailed, VarFailed
from agentflow.protocol.wire import VERSION, Bye, Events, Hello, Ops, Resume, client_frames, encode
from agentflow.server.config.limits import ServerLimits
from agentflow.server.websocket import connection as ws_session

pytestmark = pytest.mark.anyio


# Before the welcome


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
    async with bench(limits) as server, connected(server, greets=True) as [first]:
        async with connected(server, binary=[False]) as [second]:
            second.put(Hello(VERSION))
            refused, code = await second.refusal()
            assert (refused.error.code, code) == ("overloaded", 1013)
        first.hang_up()
        await first.has_returned.wait()
        async with connected(server, greets=True):
            pass


async def test_silent_connections_of_one_tenant_leave_others_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A short wait for refused connections that stay silent, in which a busy process can still answer.
    monkeypatch.setattr(ws_session, "LAST_WORDS_S", 0.3)
    async with bench(ServerLimits(max_connections=4)) as server:
        async with connected(server, binary=[True] * 2, tenant="ann") as peers:
            for peer in peers:
                await peer.message()  # accepted
            async with connected(server, binary=[True] * 3, tenant="ann") as more:
                for peer in more:
                    refused, code = await peer.refusal()
                    assert (refused.error.code, code) == ("overloaded", 1013)
            async with connected(server, binary=[True] * 2, tenant="bob") as others:
                for other in others:
                    await other.greet()
            await peers[0].greet()
        assert server.sessions.num_connections == 0


# Frames that make no sense

BAD_FRAMES: dict[str, bytes | str] = {
    "nothing": b"",
    "no frame": b"[]",
    "no kind": b"{}",
    "unknown kind": b'{"frame":"events"}',
    "half a frame": b'{"frame":"ops","first":1',
    "an op without a state": b'{"frame":"ops","first":1,"ops":[{"op":"text","parts":["a"]}]}',
    "an op that is none": b'{"frame":"ops","first":1,"ops":[7]}',
    "wrong type": b'{"frame":"ops","first":1,"ops":[{"op":"open","state":"1"}]}',
    "huge number": b'{"frame":"ops","first":1e400,"ops":[]}',
    "very deep": b"[" * 20_000,
    "half a character": b'{"frame":"ops","first":1,"ops":[{"op":"text","state":1,"parts":["\\ud800"]}]}',
    "the second half": b'{"frame":"hello","version":1,"model":"\\udc00"}',
    "an unescaped half": '{"frame":"hello","version":1,"model":"\ud800"}',
    "second hello": encode(Hello(VERSION), binary=False),
    "gap": encode(Ops(3, (ops.Open(1),)), binary=False),
    "number zero": encode(Ops(0, (ops.Open(1),)), binary=False),
    "unknown state": encode(Ops(1, (ops.Text(7, ("a",)),)), binary=False),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
async def test_a_bad_frame_ends_its_session_alone(case: str, caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as server, connected(server, binary=[False, True], greets=True) as [bad, good]:
        ids = count(1)
        await check_still_served(good, ids)
        bad.put_data(BAD_FRAMES[case])
        refused, code = await bad.refusal()
        assert (refused.error.code, code) == ("protocol_error", 1002)
        await check_still_served(good, ids, first_op=4)
        good.bye()
        await server.is_idle()  # the bad connection has ended immediately, with no grace
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Ops that make no sense, in a frame that is one. State 1 is open, variable 2 is its own.

BAD_OPS = {
    "unknown op": ({"op": "sing", "state": 1}, "bad_argument"),
    "unknown op with a variable": ({"op": "sing", "state": 1, "var": 9}, "bad_argument"),
    "missing field": ({"op": "text", "state": 1}, "bad_argument"),
    "wrong type": ({"op": "text", "state": 1, "parts": "a"}, "bad_argument"),
    "unknown sampling": (
        {"op": "gen", "state": 1, "var": 9, "name": "a", "params": {"heat": 1}},
        "bad_argument",
    ),
    "bad role": ({"op": "begin", "state": 1, "role": "judge"}, "bad_argument"),
    "bad objective": ({"op": "hint", "state": 1, "objective": "speed"}, "bad_argument"),
    "bad message": (
        {"op": "converse", "state": 1, "conversation": {"messages": [{"role": "user", "content": 5}]}},
        "bad_argument",
    ),
    "unknown variable": ({"op": "text", "state": 1, "parts": [{"op": "ref", "var": 9}]}, "protocol_error"),
    "state twice": ({"op": "open", "state": 1}, "protocol_error"),
    "variable twice": ({"op": "set", "state": 1, "var": 2, "name": "a", "parts": []}, "protocol_error"),
    "long label": ({"op": "open", "state": 1, "label": "x" * 257}, "bad_argument"),
    "long salt": ({"op": "open", "state": 1, "cache_salt": "x" * 257}, "bad_argument"),
}


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("case", BAD_OPS)
async def test_a_bad_op_fails_its_state_and_the_session_goes_on(case: str, binary: bool) -> None:
    bad, code = BAD_OPS[case]
    write = msgspec.msgpack.encode if binary else msgspec.json.encode
    async with bench() as server, connected(server, binary=[binary], greets=True) as [peer]:
        first = [ops.Open(1), ops.Text(1, ("say #2",)), gen(1, 2)]
        if case == "long salt":
            first = [ops.Open(5), ops.Text(5, ("say #2",)), gen(5, 2)]
        peer.put_ops(1, *first)
        peer.put_data(write({"frame": "ops", "first": 4, "ops": [bad]}))
        peer.put_ops(5, gen(1, 3))
        listener = Listener()
        while not listener.failed or 2 not in listener.ends or 3 not in listener.ends:
            frame = await peer.frame()
            assert isinstance(frame, Events)
            listener.deliver(frame.events)
        assert {state: failed.error.code for state, failed in listener.failed.items()} == {1: code}
        assert listener.texts[2] == count_words("say #2")  # earlier ops have run
        if "var" in bad and bad["var"] != 2:
            end = listener.ends[9]
            assert isinstance(end, VarFailed)
            assert end.error.code == code
        await check_still_served(peer, count(100), first_op=6)


async def test_text_that_is_no_unicode_fails_its_state() -> None:
    async with bench() as server, connected(server, greets=True) as [peer]:
        data = encode(Ops(1, (ops.Open(1), ops.Text(1, ("@@",)))), binary=True)
        peer.put_data(data.replace(b"@@", b"\xff\xfe"))
        await peer.events(lambda events: any(isinstance(event, StateFailed) for event in events))
        await check_still_served(peer, count(100), first_op=3)


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


@pytest.mark.parametrize("binary", [True, False])
async def test_a_frame_over_the_limit_is_refused(binary: bool) -> None:
    limits = ServerLimits(frame_bytes=4096)
    async with bench(limits) as server, connected(server, binary=[binary], greets=True) as [peer]:
        peer.put_ops(1, ops.Open(1), ops.Text(1, ("é" * 2048,)))
        refused, code = await peer.refusal()
        assert (refused.error.code, code) == ("frame_too_large", 1009)
        await server.is_idle()


async def test_a_client_that_breaks_the_websocket_rules_ends_its_session() -> None:
    async with bench() as server, connected(server, greets=True) as [peer]:
        peer.hang_up(code=1009)
        await server.is_idle()


async def test_an_os_error_of_the_server_is_logged_and_no_client_that_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench() as server:

        def find(model: str | None) -> NoReturn:
            raise OSError(28, "a secret")

        monkeypatch.setattr(server, "find", find)
        async with connected(server) as [peer]:
            peer.put(Hello(VERSION))
            refused, code = await peer.refusal()
    assert (refused.error.code, code) == ("engine_failed", 1011)
    assert "secret" not in refused.error.message
    assert "a secret" in caplog.text


async def test_the_error_of_a_rejected_op_names_its_argument() -> None:
    with api_server(constraints=False) as server:
        async with af.session(server.url) as flow, flow.state() as s:
            s += "a" + af.gen("x", logit_bias={999_999: 1.0})
            with pytest.raises(af.errors.BadArgument) as failure:
                await s["x"]
    assert failure.value.param == "logit_bias"
