"""While the models load, the server answers that it is not ready, and it can be ended cleanly. On real
sockets, with a loader that waits for the test."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import pytest
from support.server.http_clients import only_asyncio
from support.session_peer import HangingGenerator, Listener, gen

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
ResultT = TypeVar("ResultT")


anyio_backend = pytest.fixture(only_asyncio)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> list[int]:
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
            self.answered_at_end = takes_connections(self._ports[-1])


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)


def ask(port: int, method: str, path: str, **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request(method, path, b"{}" if method == "POST" else None, headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read().decode())


async def beside(function: Callable[..., ResultT], *args: Any) -> ResultT:
    """Runs a blocking call in a thread, so that the server's event loop continues."""
    return await anyio.to_thread.run_sync(function, *args)


def takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    return True


@asynccontextmanager
async def starting(
    opening: HeldOpening, **options: Any
) -> AsyncIterator[tuple[list[RunningServer], anyio.Event]]:
    """A server that loads; the list has it when it is ready, and it ends when the event is set."""
    ready: list[RunningServer] = []
    may_end = anyio.Event()

    async def host(is_ready: anyio.Event) -> None:
        async with running_server(one_model(opening), **options) as server:
            ready.append(server)
            is_ready.set()
            await may_end.wait()

    async with open_task_group() as group:
        is_ready = anyio.Event()
        group.start_soon(host, is_ready)
        await opening.is_loading.wait()
        yield ready, is_ready
        may_end.set()


# What it answers


@pytest.mark.anyio
async def test_a_server_that_loads_answers_that_it_is_not_ready_and_then_it_is(port: list[int]) -> None:
    opening = HeldOpening(port)
    async with starting(opening) as (ready, is_ready):
        live = await beside(ask, port[0], "GET", "/health/live")
        assert (live.status, live.body) == (200, {"status": "live"})
        unready = await beside(ask, port[0], "GET", "/health/ready")
        assert (unready.status, unready.body["status"], unready.headers["retry-after"]) == (
            503,
            "unready",
            "1",
        )
        assert ready == []

        opening.may_go_on.set()
        await is_ready.wait()
        now = await beside(ask, port[0], "GET", "/health/ready")
        assert (now.status, now.body["models"]) == (200, ["scripted"])
        listener = Listener()
        async with Remote(ready[0].url).connect(listener.deliver, listener.lost) as connection:
            connection.send([ops.Open(1), ops.Text(1, ("hello",)), gen(1, 2)])
            assert await listener.text(2) == "hello"


@pytest.mark.anyio
async def test_a_server_that_loads_refuses_requests_in_the_words_of_their_api(port: list[int]) -> None:
    opening = HeldOpening(port)
    async with starting(opening):
        chat = await beside(ask, port[0], "POST", "/v1/chat/completions")
        assert (chat.status, chat.body["error"]["code"], chat.headers["retry-after"]) == (503, "unready", "1")
        message = await beside(ask, port[0], "POST", "/v1/messages")
        assert (message.status, message.body["error"]["type"]) == (529, "overloaded_error")
        assert message.headers["retry-after"] == "1"
        models = await beside(ask, port[0], "GET", "/v1/models")
        assert (models.status, models.body["error"]["code"]) == (503, "unready")
        assert (await beside(ask, port[0], "GET", "/openapi.json")).status == 200

        metrics = await beside(ask, port[0], "GET", "/metrics")
        assert metrics.status == 200
        assert 'agentflow_http_answers_total{route="/v1/models",status="503"} 1.0' in metrics.text
        assert "agentflow_engine_up{" not in metrics.text
        opening.may_go_on.set()


@pytest.mark.anyio
async def test_the_metrics_of_a_server_that_loads_want_a_key_too(port: list[int]) -> None:
    opening = HeldOpening(port)
    async with starting(opening, access=Access(Tenants(["af-key"]))):
        assert (await beside(ask, port[0], "GET", "/metrics")).status == 401
        with_key = await beside(lambda: ask(port[0], "GET", "/metrics", **{"x-api-key": "af-key"}))
        assert with_key.status == 200
        assert (await beside(ask, port[0], "GET", "/health/live")).status == 200
        opening.may_go_on.set()


# How it ends


@pytest.mark.anyio
@pytest.mark.parametrize("error", [UnknownModel("no model"), ModelError("broken"), ZeroDivisionError("bug")])
async def test_a_load_error_is_raised_unchanged_and_closes_the_port(
    port: list[int], error: Exception
) -> None:
    opening = HeldOpening(port, error)

    async def start_and_fail() -> None:
        async with starting(opening):
            with socket.create_connection(("127.0.0.1", port[0]), timeout=TIMEOUT_S):  # and stays open
                assert (await beside(ask, port[0], "GET", "/health/live")).status == 200
                opening.may_go_on.set()
                await anyio.sleep_forever()

    with pytest.raises(type(error)) as caught:
        await start_and_fail()
    assert caught.value is error
    assert not takes_connections(port[0])


@pytest.mark.anyio
async def test_cancelling_a_server_that_loads_is_a_clean_end(port: list[int]) -> None:
    opening = HeldOpening(port)
    with anyio.CancelScope() as scope:
        async with starting(opening) as (ready, _):
            assert (await beside(ask, port[0], "GET", "/health/live")).status == 200
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert opening.has_ended
    assert ready == []
    with pytest.raises(ServerUnreachable):
        async with Remote(f"ws://127.0.0.1:{port[0]}").connect(lambda _: None, lambda _: None):
            pytest.fail("it still answers")


@pytest.mark.anyio
async def test_the_models_are_closed_after_the_last_connection(port: list[int]) -> None:
    opening = HeldOpening(port)
    async with starting(opening) as (_, is_ready):
        opening.may_go_on.set()
        await is_ready.wait()
    assert opening.has_ended
    assert opening.answered_at_end is False
