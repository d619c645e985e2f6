"""A client closes its connection while the engine has its request, in the queue, within the prompt or
within the answer: it is aborted within a step, and no slot stays in use. test_http_client_gone_early.py tests
earlier disconnects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import FakeEngine
from support.server.disconnecting_clients import PATHS, disconnect, post, prompt_fields
from support.server.openai_peer import MESSAGES, sync_client

TEXT = "The quick brown fox " * 20
# Several answers, where the API supports them.
THREE = {path: {} if path == "/v1/messages" else {"n": 3} for path in PATHS}


@pytest.fixture
def engine() -> FakeEngine:
    """Runs one request at a time, and computes few tokens of a prompt in a step."""
    return FakeEngine(max_running=1, token_budget=16)


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[ApiServer]:
    with api_server(engine, constraints=False) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("num_steps", "is_answering"), [(1, False), (14, True)], ids=["prompt", "answer"])
def test_while_it_is_computed(
    server: ApiServer, engine: FakeEngine, path: str, stream: bool, num_steps: int, is_answering: bool
) -> None:
    requests = server.observe_requests()
    engine.gate.allow(num_steps)
    connection = post(server, path, stream=stream, **prompt_fields(path, TEXT))
    server.call(requests.wait_for, 1)
    server.call(engine.gate.held)
    disconnect(server, connection)
    num_batches = len(engine.gate.batches)
    engine.gate.open()
    server.assert_idle()
    # The paused step ran to its end, and no other followed.
    assert len(engine.gate.batches) == num_batches == num_steps + 1
    assert (server.stats().generated_tokens > 0) == is_answering


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_while_it_waits(server: ApiServer, engine: FakeEngine, path: str, stream: bool) -> None:
    requests = server.observe_requests()
    engine.gate.allow(0)
    first = post(server, path, stream=True, **prompt_fields(path, TEXT))
    server.call(requests.wait_for, 1)
    server.call(engine.gate.held)
    second = post(server, path, stream=stream, **prompt_fields(path, TEXT), **THREE[path])
    server.call(requests.wait_for, 1 + THREE[path].get("n", 1))
    first.close()
    disconnect(server, second)
    engine.gate.open()
    server.assert_idle()
    assert len(engine.gate.batches) == 1
    assert server.stats().generated_tokens == 0


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
