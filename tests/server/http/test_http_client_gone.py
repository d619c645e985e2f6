"""A client closes its connection while the engine has its request, in the queue, within the prompt or
within the answer: it is aborted within a step, and no slot stays in use. test_http_client_gone_early.py tests
earlier disconnects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.api_server import ApiServer, api_server
from support.fake_engine import FakeEngine
from support.server.apis import APIS, CHAT, SGLANG, TEXT, Api
from support.server.disconnecting_clients import disconnect, post

PROMPT = "The quick brown fox " * 20
# Several answers, where the API has them.
THREE: dict[Api, Any] = {CHAT: {"n": 3}, TEXT: {"n": 3}, SGLANG: {"sampling_params": {"n": 3}}}
EACH_API = pytest.mark.parametrize("api", APIS.values(), ids=APIS)


@pytest.fixture
def engine() -> FakeEngine:
    """Runs one request at a time, and computes few tokens of a prompt in a step."""
    return FakeEngine(max_running=1, token_budget=16)


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[ApiServer]:
    with api_server(engine, constraints=False) as running:
        yield running


def body(api: Api, stream: bool, extra: Any = None) -> dict[str, Any]:
    return {**api.body(PROMPT, max_tokens=500, extra=extra), "stream": stream}


@pytest.mark.parametrize("stream", [True, False])
@EACH_API
@pytest.mark.parametrize(("num_steps", "is_answering"), [(1, False), (16, True)], ids=["prompt", "answer"])
def test_a_client_that_goes_while_its_request_is_computed(
    server: ApiServer, engine: FakeEngine, api: Api, stream: bool, num_steps: int, is_answering: bool
) -> None:
    requests = server.observe_requests()
    engine.gate.allow(num_steps)
    connection = post(server, api.path, body(api, stream))
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
@EACH_API
def test_f37_a_client_that_has_sent_another_request_goes(
    server: ApiServer, engine: FakeEngine, api: Api, stream: bool
) -> None:
    requests = server.observe_requests()
    engine.gate.allow(16)
    live = b"GET /health/live HTTP/1.1\r\nhost: here\r\n\r\n"
    connection = post(server, api.path, body(api, stream), then=live)
    server.call(requests.wait_for, 1)
    server.call(engine.gate.held)
    disconnect(server, connection)
    engine.gate.open()
    server.assert_idle()
    assert len(engine.gate.batches) == 17


@pytest.mark.parametrize("stream", [True, False])
@EACH_API
def test_a_client_that_goes_while_its_request_waits(
    server: ApiServer, engine: FakeEngine, api: Api, stream: bool
) -> None:
    requests = server.observe_requests()
    engine.gate.allow(0)
    first = post(server, api.path, body(api, True))
    server.call(requests.wait_for, 1)
    server.call(engine.gate.held)
    second = post(server, api.path, body(api, stream, THREE.get(api)))
    server.call(requests.wait_for, 1 + (3 if api in THREE else 1))
    first.close()
    disconnect(server, second)
    engine.gate.open()
    server.assert_idle()
    assert len(engine.gate.batches) == 1
    assert server.stats().generated_tokens == 0
