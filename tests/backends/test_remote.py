"""The remote backend against a real server, on both event loops, over connections that break anywhere."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import pytest
from anyio.abc import ByteStream, SocketAttribute, SocketStream
from anyio.from_thread import start_blocking_portal
from anyio.streams.tls import TLSListener
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param
from support.language.wire_program import check_program
from support.server.module_servers import module_fixture
from support.session_peer import HANG, HangingGenerator, count_words, gen, opened
from support.tcp_proxy import Budget, proxied
from support.wire_server import ThreadServer, thread_server

import agentflow as af
from agentflow.backends.cursors import Cursors
from agentflow.backends.remote import Remote
from agentflow.cli.server_query import query_server
from agentflow.errors import (
    BadArgument,
    FrameTooLarge,
    Overloaded,
    ProtocolError,
    ServerLost,
    ServerUnreachable,
)
from agentflow.protocol import ops
from agentflow.protocol.events import ErrorInfo, GraphReply, LiveGraph, Watched
from agentflow.runtime.generator import Generator
from agentflow.runtime.task_group import open_task_group
from agentflow.server.config.limits import ServerLimits
from agentflow.server.models.models import one_model
from agentflow.server.serve import Tls, running_server

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]

CERTIFICATE = Path(__file__).parents[1] / "support" / "localhost_for_tests.pem"
Encoding = Literal["msgpack", "json"]


strict_server = module_fixture(
    thread_server, ServerLimits(frame_bytes=4096, max_sessions=1, resume_grace_s=0.05)
)
"""A server with small frames, one session and a grace that is over at once."""


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
async def test_a_program_runs_and_leaving_frees_everything(server: ThreadServer, encoding: Encoding) -> None:
    async with opened(Remote(server.url, encoding=encoding)) as (connection, listener):
        assert connection.models == {"scripted": server.generator.capabilities}
        await check_program(connection, listener)
    await server.wait_until_idle()
    assert listener.lost_with is None


@af.program
async def essay(s: af.State, num_branches: int) -> list[str]:
    s += af.system("You are brief.")
    s += af.user("Write it. #40")
    s += af.assistant(af.gen("text"))
    async with s.fork(num_branches) as branches:
        for index, branch in enumerate(branches):
            branch += af.user(f"Judge it, part {index}. #{index + 3}")
            branch += af.assistant(af.gen("judgment"))
    async with s.user():
        s += "All in all: "
        for branch in branches:
            s += branch["judgment"]
        s += " #5"
    s += af.gen("report")
    return [await s["text"], *[await branch["judgment"] for branch in branches], await s["report"]]


async def test_a_program_gives_the_same_on_a_server_as_in_process(server: ThreadServer) -> None:
    async with af.session(backend=af.Scripted(count_words)) as flow:
        expected = await flow.run(essay, 4)
    async with af.session(server.url) as flow:
        assert await flow.run(essay, 4) == expected
        assert (await flow.stats()).model == "scripted"
        streamed: dict[tuple[tuple[int, ...], str], str] = {}
        async for event in flow.stream(essay, 4):
            if isinstance(event, af.TextDelta):
                variable = (event.path, event.name)
                streamed[variable] = streamed.get(variable, "") + event.text
        assert sorted(streamed.values()) == sorted(expected)
    await server.wait_until_idle()


@pytest.mark.parametrize("scheme", ["ws", "http"])
async def test_the_url_may_be_written_in_several_ways(server: ThreadServer, scheme: str) -> None:
    for path in ("", "/", "/v1/session"):
        async with opened(Remote(f"{scheme}://127.0.0.1:{server.port}{path}")) as (connection, _):
            assert [*connection.models] == ["scripted"]


async def test_many_sessions_at_once(server: ThreadServer) -> None:
    async def client() -> None:
        async with opened(Remote(server.url)) as (connection, listener):
            await check_program(connection, listener)

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(client)
    await server.wait_until_idle()


async def test_thousands_of_ops_at_once(server: ThreadServer) -> None:
    async with proxied(server.port) as proxy, opened(Remote(proxy.url)) as (connection, listener):
        connection.send([ops.Open(1)])
        for _ in range(2500):
            connection.send([ops.Text(1, ("a ",))])
        connection.send([ops.Await(1, 1), ops.Text(1, (" #3",)), gen(1, 2)])
        await listener.text(2)
        assert listener.reached == {1: 1}
        assert listener.texts[2] == count_words("a " * 2500 + " #3")


async def test_an_error_of_the_block_is_raised_unchanged(server: ThreadServer) -> None:
    async def fail() -> None:
        async with opened(Remote(server.url)) as (connection, _):
            connection.send([ops.Open(1)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    await server.wait_until_idle()


async def test_cancelling_the_scope_ends_the_session_on_the_server(server: ThreadServer) -> None:
    with anyio.CancelScope() as scope:
        async with opened(Remote(server.url)) as (connection, listener):
            connection.send([ops.Open(1), ops.Text(1, (HANG,)), gen(1, 2)])
            await listener.wait_for(lambda received: 2 in received.texts)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    await server.wait_until_idle()  # far sooner than the grace of 60 s


async def test_live_graph_of_a_session(server: ThreadServer) -> None:
    async with af.session(server.url) as flow, flow.state() as s:
        s += HANG + af.gen("first") + af.gen("second")
        await anext(aiter(s["first"]))
        graph = await flow.graph()
        assert [(node.name, node.status) for node in graph.nodes] == [
            ("first", "running"),
            ("second", "waiting"),
        ]
        assert graph.nodes[1].needs == (graph.nodes[0].id,)
        assert [(state.id, state.steps) for state in graph.states] == [(s.id, 0)]
        assert "gen second: waiting, latency after first" in str(graph)


async def test_live_graph_is_delivered_once_and_only_if_it_was_requested() -> None:
    cursors = Cursors()
    cursors.unanswered[7] = 1
    cursors.asked_graphs[7] = ops.GetGraph(7)
    lost = ErrorInfo("server_lost", "it is gone")
    assert cursors.failures(lost) == [GraphReply(7, None, lost)]
    assert cursors.receive([GraphReply(7, LiveGraph())] * 2) == [GraphReply(7, LiveGraph())]
    assert not cursors.asked_graphs


async def test_a_watch_fails_with_its_session_and_receives_its_own_events() -> None:
    cursors = Cursors()
    cursors.submit(ops.Watch(7, graphs=True))
    assert cursors.is_waiting
    lost = ErrorInfo("server_lost", "it is gone")
    assert cursors.failures(lost) == [Watched(7, error=lost)]
    assert cursors.receive([Watched(7), Watched(8)]) == [Watched(7)]
    cursors.submit(ops.Unwatch())
    assert not cursors.is_waiting
    assert cursors.receive([Watched(7)]) == []


async def test_live_graphs_of_the_tenant_come_also_after_the_connection_broke() -> None:
    """On a separate server, which keeps the sessions of clients that never got its welcome."""
    with thread_server() as own:
        async with (
            proxied(own.port) as proxy,
            af.session(own.url) as other,
            other.state(program="other") as s,
        ):
            s += HANG + af.gen("first")
            await anext(aiter(s["first"]))
            num_resumed = 0
            for down in range(400, 1600, 40):  # the answer has more bytes than a step
                num_connections, proxy.budgets = proxy.num_connections, [Budget(down=down)]
                try:
                    async with af.session(proxy.url) as flow:
                        graphs = await flow.graphs()
                except af.errors.ServerUnreachable:  # it broke before the session began
                    continue
                num_resumed += proxy.num_connections - num_connections - 1
                assert [[state.label for state in graph.states] for graph in graphs] == [[], ["other"]]
                assert [node.name for node in graphs[1].nodes] == ["first"]
            assert num_resumed


# Connections that break

budgets = st.builds(Budget, st.none() | st.integers(0, 3000), st.none() | st.integers(0, 6000))


@given(encoding=st.sampled_from(["msgpack", "json"]), cuts=st.lists(budgets, min_size=1, max_size=4))
async def test_a_connection_that_breaks_anywhere_loses_and_repeats_nothing(
    server: ThreadServer, encoding: Encoding, cuts: list[Budget]
) -> None:
    async with proxied(server.port) as proxy:
        async with opened(Remote(proxy.url, encoding=encoding)) as (connection, listener):
            proxy.current.up, proxy.current.down = cuts[0].up, cuts[0].down
            proxy.budgets = [Budget(cut.up, cut.down) for cut in cuts[1:]]
            await check_program(connection, listener)
            # The Bye is to get through.
            proxy.current.up, proxy.current.down, proxy.budgets = None, None, []
            connection.send([ops.GetStats(1000)])
            await listener.wait_for(lambda received: 1000 in received.stats)
        await server.wait_until_idle()


async def test_a_connection_that_breaks_repeatedly_makes_progress(server: ThreadServer) -> None:
    async with proxied(server.port) as proxy, opened(Remote(proxy.url)) as (connection, listener):
        proxy.current.down = 500
        proxy.budgets = [Budget(down=2500) for _ in range(10)]
        await check_program(connection, listener, num_words=2000)
        assert proxy.num_connections == 12  # the text alone is more than all eleven budgets


async def test_a_silent_connection_is_resumed() -> None:
    with thread_server() as own:
        async with proxied(own.port) as proxy, opened(Remote(proxy.url, keepalive_s=0.05)) as opening:
            proxy.current.freezes, proxy.current.down = True, 200
            await check_program(*opening)
            assert proxy.num_connections > 1


async def test_a_quiet_connection_is_probed_with_pings() -> None:
    with thread_server() as own:
        async with proxied(own.port) as proxy, opened(Remote(proxy.url, keepalive_s=0.05)) as (_, listener):
            while proxy.last_down != b"\x8a\x00":  # a pong (RFC 6455, section 5.5.3)
                await proxy.carried.wait()
            assert listener.lost_with is None


async def test_ops_submitted_while_disconnected_are_sent_later(server: ThreadServer) -> None:
    async with proxied(server.port) as proxy, opened(Remote(proxy.url)) as (connection, listener):
        proxy.refuses = True
        proxy.current.up = 0
        connection.send([ops.Open(1)])
        while proxy.num_connections < 3:  # it tries in vain
            await anyio.lowlevel.checkpoint()
        connection.send([ops.Text(1, ("later #4",)), gen(1, 2)])
        proxy.refuses = False
        assert await listener.text(2) == count_words("later #4")


async def test_a_session_whose_server_is_gone_is_lost_after_the_grace(strict_server: ThreadServer) -> None:
    async with (
        proxied(strict_server.port) as proxy,
        opened(Remote(proxy.url, reconnect=False)) as (connection, listener),
    ):
        proxy.refuses = True
        proxy.current.up = 0
        connection.send([ops.Open(1)])
        error = await listener.wait_until_lost()
        assert isinstance(error, ServerLost)
        assert f"{proxy.url}/v1/session" in str(error)
        assert "within 0.05 s" in str(error)
        assert listener.is_over
        with pytest.raises(ServerLost):
            connection.send([ops.Open(2)])
    await strict_server.wait_until_idle()


async def test_leaving_while_the_connection_is_broken_does_not_wait() -> None:
    with thread_server(ServerLimits(resume_grace_s=1e6)) as other:
        async with proxied(other.port) as proxy, opened(Remote(proxy.url)) as (connection, listener):
            proxy.refuses = True
            proxy.current.up = 0
            connection.send([ops.Open(1)])
            while proxy.num_connections < 2:
                await anyio.lowlevel.checkpoint()
        assert listener.lost_with is None


async def test_without_grace_a_broken_connection_is_a_lost_session() -> None:
    with thread_server(ServerLimits(resume_grace_s=0)) as other:
        async with proxied(other.port) as proxy, opened(Remote(proxy.url)) as (connection, listener):
            proxy.current.up = 0
            connection.send([ops.Open(1)])
            assert isinstance(await listener.wait_until_lost(), ServerLost)
        await other.wait_until_idle()


async def test_a_session_unknown_to_the_server_is_lost() -> None:
    with thread_server() as first, thread_server() as other:
        async with proxied(first.port) as proxy, opened(Remote(proxy.url)) as (connection, listener):
            proxy.target_port = other.port  # as if it had been restarted
            proxy.current.up = 0
            connection.send([ops.Open(1)])
            error = await listener.wait_until_lost()
            assert isinstance(error, ServerLost)
            assert "there is no such session" in str(error)


# Refusals


async def test_an_op_over_the_limit_is_refused_before_it_is_sent(strict_server: ThreadServer) -> None:
    async with opened(Remote(strict_server.url)) as (connection, listener):
        connection.send([ops.Open(1), ops.Text(1, ("keep #2",))])
        with pytest.raises(FrameTooLarge, match=r"5,0.. bytes.* 4,096"):
            connection.send([ops.Text(1, ("lost",)), ops.Text(1, ("x" * 5000,))])
        connection.send([ops.Text(1, ("x" * 3900,)), ops.Text(1, ("y" * 3900,)), ops.Text(1, (" #2",))])
        connection.send([gen(1, 2)])
        assert await listener.text(2) == count_words("keep #2" + "x" * 3900 + "y" * 3900 + " #2")
    await strict_server.wait_until_idle()  # it has one session only


async def test_a_lone_surrogate_is_rejected_before_it_is_sent(server: ThreadServer) -> None:
    async with opened(Remote(server.url)) as (connection, listener):
        with pytest.raises(BadArgument):
            connection.send([ops.Open(1), ops.Text(1, ("\ud800",))])
        await check_program(connection, listener)


async def test_an_invalid_op_loses_the_session_with_the_reason(server: ThreadServer) -> None:
    async with opened(Remote(server.url)) as (connection, listener):
        connection.send([ops.Text(7, ("a",))])
        error = await listener.wait_until_lost()
        assert isinstance(error, ProtocolError)
        assert "there is no state 7" in str(error)
    await server.wait_until_idle()


async def test_a_full_server_rejects_a_session(strict_server: ThreadServer) -> None:
    async with opened(Remote(strict_server.url)):
        with pytest.raises(Overloaded, match=r"\b1\b"):
            async with opened(Remote(strict_server.url)):
                pytest.fail("a second session")
    await strict_server.wait_until_idle()


async def test_a_refused_connection_names_the_command_that_starts_a_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        port = taken.getsockname()[1]
        with pytest.raises(
            ServerUnreachable, match=rf"no server answers at ws://127\.0\.0\.1:{port}/.*`agentflow serve`"
        ):
            async with opened(Remote(f"ws://127.0.0.1:{port}")):
                pytest.fail("connected")


async def test_another_kind_of_server_is_reported(server: ThreadServer) -> None:
    with pytest.raises(ServerUnreachable, match=r"is not an agentflow server .HTTP 4"):
        async with opened(Remote(f"{server.url}/elsewhere")):
            pytest.fail("connected to something else")


async def test_opening_a_session_has_a_timeout() -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as silent:
        port = silent.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(ServerUnreachable, match=r"did not answer within 0\.05 s"):
            async with opened(Remote(f"ws://127.0.0.1:{port}", open_timeout_s=0.05)):
                pytest.fail("connected")


async def test_plain_text_where_tls_is_expected_is_one_error(server: ThreadServer) -> None:
    context = ssl.create_default_context()
    with pytest.raises(ServerUnreachable, match="wss://127"):
        async with opened(Remote(f"wss://127.0.0.1:{server.port}", ssl_context=context)):
            pytest.fail("TLS without TLS")


async def close_at_once(client: SocketStream, *, resets: bool) -> None:
    if resets:
        raw_socket = client.extra(SocketAttribute.raw_socket)
        raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    else:
        await client.receive()  # with unread bytes, the system resets the connection
    await client.aclose()


@pytest.mark.parametrize("resets", [False, True])
async def test_f37_a_peer_that_closes_during_the_tls_handshake_is_unreachable(resets: bool) -> None:
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        open_task_group() as group,
    ):
        group.start_soon(listener.serve, partial(close_at_once, resets=resets))
        port = listener.extra(SocketAttribute.local_port)
        with anyio.fail_after(30), pytest.raises(ServerUnreachable, match="no server answers at wss://127"):
            async with opened(Remote(f"wss://127.0.0.1:{port}")):
                pytest.fail("connected")
        group.cancel_scope.cancel()


async def test_f37_an_untrusted_certificate_is_the_reason() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATE)
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        open_task_group() as group,
    ):
        group.start_soon(TLSListener(listener, tls).serve, ByteStream.aclose)
        address = f"127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        reason = r"the certificate of {}://127.* is not accepted .*SSL_CERT_FILE"
        with anyio.fail_after(30):
            with pytest.raises(ServerUnreachable, match=reason.format("wss")):
                async with opened(Remote(f"wss://{address}")):
                    pytest.fail("connected")
            with pytest.raises(ServerUnreachable, match=reason.format("https")):
                await anyio.to_thread.run_sync(query_server, f"https://{address}", "/metrics", None)
        group.cancel_scope.cancel()


async def test_f37_a_session_outlives_a_peer_that_closes_during_the_tls_handshake() -> None:
    @asynccontextmanager
    async def open_generator() -> AsyncIterator[Generator[Any]]:
        yield HangingGenerator()

    tls = Tls(CERTIFICATE, CERTIFICATE)
    trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
    with anyio.fail_after(60), start_blocking_portal("asyncio") as portal:
        running = portal.call(lambda: running_server(one_model(open_generator), tls=tls))
        with portal.wrap_async_context_manager(running) as server:
            async with proxied(int(server.url.rpartition(":")[2])) as proxy:
                url = f"wss://127.0.0.1:{proxy.port}"
                async with opened(Remote(url, ssl_context=trusting)) as (connection, listener):
                    connection.send([ops.Open(1), ops.Text(1, ("one #2",)), gen(1, 2)])
                    assert await listener.text(2) == count_words("one #2")
                    proxy.answers = [b"", b""]
                    proxy.sever()
                    connection.send([ops.Text(1, (" two #1",)), gen(1, 3)])
                    assert await listener.text(3)
                    assert proxy.num_connections == 4
                    assert listener.lost_with is None


@pytest.mark.parametrize("url", ["localhost:8410", "ftp://host", "ws://", "ws://host:port", "ws://[::1", ""])
def test_an_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(BadArgument, match=r"ws://127\.0\.0\.1:8410"):
        Remote(url)


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(BadArgument, check=has_param("encoding")):
        Remote("ws://host", encoding="xml")  # type: ignore[arg-type]


def test_neither_key_nor_password_is_shown() -> None:
    remote = Remote("ws://me:secret@host:1", api_key="secret")
    assert "secret" not in repr(remote) + remote.url
