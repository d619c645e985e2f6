"""A network that splits: data of one side or of both does not arrive, and no connection closes.

Sessions go on when it is whole again, and no token comes twice. ``cluster/ray`` splits the network before the
nodes of Ray.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import httpx2
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import FakeEngine
from support.holds import until
from support.redis_server import RedisServer
from support.server.gateways import routed
from support.server.http_clients import only_asyncio
from support.tcp_proxy import Proxy, Side, proxied

import agentflow as af
from agentflow.backends.remote import Remote
from agentflow.server.gateway import target, websocket_proxy
from agentflow.server.gateway.defaults import GatewayLimits
from agentflow.server.stores import shared
from agentflow.server.stores.shared import SharedStore

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
anyio_backend = pytest.fixture(only_asyncio)
SIDES: list[tuple[Side, ...]] = [("up",), ("down",), ("up", "down")]
T = TypeVar("T")
LENGTH = 40


@asynccontextmanager
async def in_thread(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Opens and closes resources in a thread, so that the event loop can carry the proxy."""
    value = await anyio.to_thread.run_sync(manager.__enter__)
    try:
        yield value
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(manager.__exit__, None, None, None)


class Answer:
    """A generation in a session, and the text that was read from it."""

    def __init__(self) -> None:
        self.text = ""
        self.value = ""

    async def run(self, flow: af.Session) -> None:
        state = flow.state()
        state += "hello" + af.gen("x", max_tokens=LENGTH, ignore_eos=True)
        async for piece in state["x"]:
            self.text += piece
        self.value = await state["x"]


async def answer_across_split(
    backend: Remote, server: ApiServer, proxy: Proxy, sides: tuple[Side, ...], until_noticed: Any
) -> Answer:
    """A session of which some tokens have been read when the network splits, in the middle of its answer."""
    answer = Answer()
    async with af.session(backend=backend) as flow, anyio.create_task_group() as group:
        await anyio.to_thread.run_sync(server.call, server.engine.gate.allow, 5)
        group.start_soon(answer.run, flow)
        await until(lambda: bool(answer.text))
        proxy.split(*sides)
        await anyio.to_thread.run_sync(server.call, server.engine.gate.open)
        await until_noticed()
        proxy.heal()
    return answer


async def whole_text(url: str) -> str:
    answer = Answer()
    async with af.session(url) as flow:
        await answer.run(flow)
    return answer.value


@pytest.mark.parametrize("sides", SIDES)
async def test_a_session_goes_on_after_a_split_before_its_server(sides: tuple[Side, ...]) -> None:
    async with in_thread(api_server(FakeEngine())) as server:
        url = server.url.replace("http", "ws")
        expected = await whole_text(url)
        async with proxied(int(url.rpartition(":")[2])) as proxy:

            async def noticed() -> None:
                before = proxy.num_connections
                await until(lambda: proxy.num_dropped > 0 and proxy.num_connections > before)

            backend = Remote(proxy.url, keepalive_s=0.2)
            answer = await answer_across_split(backend, server, proxy, sides, noticed)
        assert proxy.num_dropped
        assert (answer.value, answer.text) == (expected, expected)


@pytest.mark.parametrize("sides", SIDES)
async def test_a_session_goes_on_after_a_split_behind_the_gateway(
    sides: tuple[Side, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server behind the gateway could only refuse the session."""
    monkeypatch.setattr(websocket_proxy, "PING_S", 0.2)
    async with (
        in_thread(api_server(FakeEngine())) as server,
        in_thread(api_server(FakeEngine())) as other,
        proxied(int(server.url.rpartition(":")[2])) as proxy,
    ):
        expected = await whole_text(server.url.replace("http", "ws"))
        urls = [f"http://127.0.0.1:{proxy.port}/v1", f"{other.url}/v1"]
        async with routed(urls, GatewayLimits(check_s=0.2)) as route:
            route.gateway.targets[1].num_websockets = 10

            async def noticed() -> None:
                with monkeypatch.context() as patch:  # before and after, a busy machine has its time
                    patch.setattr(websocket_proxy, "CONNECT_TIMEOUT_S", 0.3)
                    patch.setattr(target, "CHECK_TIMEOUT_S", 0.3)
                    await until(lambda: route.gateway.targets[0].num_websockets == 0)
                    await until(lambda: not route.gateway.targets[0].circuit.is_ready)

            backend = Remote(route.url.replace("http", "ws"))
            answer = await answer_across_split(backend, server, proxy, sides, noticed)
            assert route.gateway.targets[1].num_websockets == 10
        assert (answer.value, answer.text) == (expected, expected)


@pytest.mark.parametrize("sides", SIDES)
async def test_a_split_before_redis_costs_only_what_needs_it(
    sides: tuple[Side, ...], redis: RedisServer
) -> None:
    prefix = f"{secrets.token_hex(8)}:"
    async with proxied(redis.port) as proxy:
        store = SharedStore(f"redis://127.0.0.1:{proxy.port}/0", prefix=prefix, front="a")
        async with (
            in_thread(api_server(FakeEngine(), shared=store)) as server,
            httpx2.AsyncClient(base_url=server.url, timeout=30) as http,
        ):
            url = server.url.replace("http", "ws")
            expected = await whole_text(url)
            asked = {"model": MODEL, "input": "What do plants make?", "max_output_tokens": 4}
            stored = (await http.post("/v1/responses", json=asked)).json()

            def wait_at_most(answer_s: float, connect_s: float) -> None:
                pool = store._client.connection_pool
                pool.connection_kwargs |= {"socket_timeout": answer_s, "socket_connect_timeout": connect_s}
                for connection in (*pool._available_connections, *pool._in_use_connections):
                    connection.socket_timeout, connection.socket_connect_timeout = answer_s, connect_s

            async def needed() -> None:
                await anyio.to_thread.run_sync(server.call, wait_at_most, 0.3, 0.3)
                refused = await http.get(f"/v1/responses/{stored['id']}")
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
                # Before and after, a busy machine has its time.
                await anyio.to_thread.run_sync(
                    server.call, wait_at_most, shared.ANSWER_TIMEOUT_S, shared.CONNECT_TIMEOUT_S
                )

            answer = await answer_across_split(Remote(url), server, proxy, sides, needed)
            assert (answer.value, answer.text) == (expected, expected)
            assert (await http.get(f"/v1/responses/{stored['id']}")).json()["output"] == stored["output"]
