"""While the models load, the server answers that it is not ready, and it can be ended cleanly. On real
sockets, with a loader that waits for the test."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2
import pytest
from support.server.http_clients import only_asyncio
from support.session_peer import HangingGenerator, gen, opened

from agentflow.backends.remote import Remote
from agentflow.errors import ModelError, ServerUnreachable, UnknownModel
from agentflow.protocol import ops
from agentflow.runtime.generator import Generator
from agentflow.runtime.task_group import open_task_group
from agentflow.server import serve as serve_module
from agentflow.server.app import Access
from agentflow.server.models.models import one_model
from agentflow.server.serve import RunningServer, listen, running_server
from agentflow.server.tenants.keys import Tenants

TIMEOUT_S = 30


anyio_backend = pytest.fixture(only_asyncio)


@dataclass
class Starting:
    """``server``: None until its models are loaded."""

    server: RunningServer | None = None
    is_ready: anyio.Event = field(default_factory=anyio.Event)
    client: Any = None


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ports of listening servers: ``running_server`` yields only when the models are loaded."""
    ports: list[int] = []

    def noted(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        ports.append(listener.getsockname()[1])
        return listener

    monkeypatch.setattr(serve_module, "listen", noted)
    return ports


class HeldOpening:
    """Loads until it may go on, and then has a generator or fails. ``answered_at_end``: whether the server
    still took connections when the generator was closed."""

    def __init__(self, ports: list[int], error: Exception | None = None) -> None:
        self.is_loading = anyio.Event()
        self.may_go_on = anyio.Event()
        self.has_ended = False
        self.answered_at_end: bool | None = None
        self._ports = ports
        self._error = error

    @property
    def port(self) -> int:
        return self._ports[-1]

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Generator[Any]]:
        self.is_loading.set()
        try:
            await self.may_go_on.wait()
            if self._error is not None:
                raise self._error
            yield HangingGenerator()
        finally:
            self.has_ended = True
            self.answered_at_end = takes_connections(self.port)


def takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    return True


@asynccontextmanager
async def starting(opening: HeldOpening, **options: Any) -> AsyncIterator[Starting]:
    """A server that loads, until it is left."""
    may_end = anyio.Event()

    async def host() -> None:
        async with running_server(one_model(opening), **options) as server:
            found.server = server
            found.is_ready.set()
            await may_end.wait()

    async with open_task_group() as group:
        found = Starting()
        group.start_soon(host)
        await opening.is_loading.wait()
        url = f"http://127.0.0.1:{opening.port}"
        async with httpx2.AsyncClient(base_url=url, verify=False, timeout=TIMEOUT_S) as found.client:
            yield found
        may_end.set()


# Answers while the server starts


@pytest.mark.anyio
async def test_a_server_that_loads_answers_that_it_is_not_ready_and_then_it_is(ports: list[int]) -> None:
    opening = HeldOpening(ports)
    async with starting(opening) as found:
        live = await found.client.get("/health/live")
        assert (live.status_code, live.json()) == (200, {"status": "live"})
        unready = await found.client.get("/health/ready")
        assert (unready.status_code, unready.json()["status"]) == (503, "unready")
        assert unready.headers["retry-after"] == "1"
        assert found.server is None

        opening.may_go_on.set()
        await found.is_ready.wait()
        now = await found.client.get("/health/ready")
        assert (now.status_code, now.json()["models"]) == (200, ["scripted"])
        async with opened(Remote(f"ws://127.0.0.1:{opening.port}")) as (connection, listener):
            connection.send([ops.Open(1), ops.Text(1, ("hello",)), gen(1, 2)])
            assert await listener.text(2) == "hello"


@pytest.mark.anyio
async def test_a_server_that_loads_refuses_requests_in_the_format_of_their_api(ports: list[int]) -> None:
    opening = HeldOpening(ports)
    async with starting(opening) as found:
        for method, path, status, kind in (
            ("POST", "/v1/chat/completions", 503, "server_error"),
            ("POST", "/v1/messages", 529, "overloaded_error"),
            ("GET", "/v1/models", 503, "server_error"),
        ):
            answer = await found.client.request(method, path)
            assert (answer.status_code, answer.headers["retry-after"]) == (status, "1")
            assert answer.json()["error"]["type"] == kind
        assert (await found.client.get("/openapi.json")).status_code == 200

        metrics = await found.client.get("/metrics")
        assert metrics.status_code == 200
        assert 'agentflow_http_answers_total{route="/v1/models",status="503"} 1.0' in metrics.text
        assert "agentflow_engine_up{" not in metrics.text
        opening.may_go_on.set()


@pytest.mark.anyio
async def test_the_metrics_of_a_server_that_loads_want_a_key_too(ports: list[int]) -> None:
    opening = HeldOpening(ports)
    async with starting(opening, access=Access(Tenants(["af-key"]))) as found:
        assert (await found.client.get("/metrics")).status_code == 401
        assert (await found.client.get("/metrics", headers={"x-api-key": "af-key"})).status_code == 200
        assert (await found.client.get("/health/live")).status_code == 200
        opening.may_go_on.set()


# How it ends


@pytest.mark.anyio
@pytest.mark.parametrize("error", [UnknownModel("no model"), ModelError("broken"), ZeroDivisionError("bug")])
async def test_a_load_error_is_raised_unchanged_and_closes_the_port(
    ports: list[int], error: Exception
) -> None:
    opening = HeldOpening(ports, error)

    async def start_and_fail() -> None:
        async with starting(opening) as found:
            with socket.create_connection(("127.0.0.1", opening.port), timeout=TIMEOUT_S):  # and stays open
                assert (await found.client.get("/health/live")).status_code == 200
                opening.may_go_on.set()
                await anyio.sleep_forever()

    with pytest.raises(type(error)) as caught:
        await start_and_fail()
    assert caught.value is error
    assert not takes_connections(opening.port)


@pytest.mark.anyio
async def test_cancelling_a_server_that_loads_is_a_clean_end(ports: list[int]) -> None:
    opening = HeldOpening(ports)
    with anyio.CancelScope() as scope:
        async with starting(opening) as found:
            assert (await found.client.get("/health/live")).status_code == 200
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert opening.has_ended
    assert found.server is None
    with pytest.raises(ServerUnreachable):
        async with Remote(f"ws://127.0.0.1:{opening.port}").connect(lambda _: None, lambda _: None):
            pytest.fail("it still answers")


@pytest.mark.anyio
async def test_the_models_are_closed_after_the_last_connection(ports: list[int]) -> None:
    opening = HeldOpening(ports)
    async with starting(opening) as found:
        opening.may_go_on.set()
        await found.is_ready.wait()
    assert opening.has_ended
    assert opening.answered_at_end is False
