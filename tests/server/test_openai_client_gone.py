"""A client that closes its connection: its request is aborted within a step, and no slot stays held."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import anyio.lowlevel
import msgspec
import pytest
from api_server import MODEL, ApiServer, api_server
from fake_engine import FakeEngine
from openai_peer import MESSAGES, sync_client

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "The quick brown fox " * 20},
}


@pytest.fixture
def engine() -> FakeEngine:
    """Runs one request at a time, and computes few tokens of a prompt in a step."""
    return FakeEngine(max_running=1, token_budget=16)


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[ApiServer]:
    with api_server(engine, constraints=False) as running:
        yield running


def post(server: ApiServer, path: str, **body: Any) -> socket.socket:
    """The connection of a request whose answer nobody has read yet."""
    text = msgspec.json.encode({"model": MODEL, "max_tokens": 900, **PATHS[path], **body})
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(text)}\r\n\r\n"
    connection.sendall(head.encode() + text)
    return connection


class Heard:
    """Lets a test wait, in the server's loop, until the engine was sent so many requests."""

    def __init__(self, server: ApiServer) -> None:
        self.num_sent = 0
        self._server = server
        server.call(server.generator.observe, self)

    def sent(self, submit: object) -> None:
        self.num_sent += 1

    def heard(self, messages: object) -> None:
        pass

    def wait_for(self, number: int) -> None:
        async def until() -> None:
            while self.num_sent < number:
                await anyio.lowlevel.checkpoint()

        self._server.call(until)


def goes(server: ApiServer, connection: socket.socket) -> None:
    """The client closes, and the server has heard of it and asks nothing of the engine any more."""
    connection.close()
    server.call(server.service.calls.until_none)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_steps", [1, 8])  # within the prompt; within the answer
def test_while_it_is_computed(
    server: ApiServer, engine: FakeEngine, path: str, stream: bool, num_steps: int
) -> None:
    heard = Heard(server)
    engine.gate.allow(num_steps)
    connection = post(server, path, stream=stream, prompt_cache_key="x")
    heard.wait_for(1)
    server.call(engine.gate.held)
    goes(server, connection)
    num_batches = len(engine.gate.batches)
    engine.gate.open()
    server.assert_idle()
    # The step that was held ran to its end, and none came after it.
    assert len(engine.gate.batches) == num_batches


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_while_it_waits(server: ApiServer, engine: FakeEngine, path: str, stream: bool) -> None:
    heard = Heard(server)
    engine.gate.allow(0)
    first = post(server, path, stream=True)
    heard.wait_for(1)
    server.call(engine.gate.held)
    second = post(server, path, stream=stream, n=3)
    heard.wait_for(4)
    first.close()
    goes(server, second)
    engine.gate.open()
    server.assert_idle()
    assert server.stats().generated_tokens <= 1


def test_a_stream_that_is_closed_half_way(server: ApiServer, engine: FakeEngine) -> None:
    engine.gate.allow(12)
    with sync_client(server) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, max_tokens=900, n=2
        )
        next(iter(stream))
        stream.close()
    server.call(server.service.calls.until_none)
    engine.gate.open()
    server.assert_idle()
    assert server.stats().generated_tokens < 40
