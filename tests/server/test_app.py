"""The ASGI application behind a real web server: health checks, refusals before the session, ping and
frame limits of the websocket implementation."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Message
from support.api_server import api_server
from support.faults import has_param
from support.faulty_servers import BEARER, tenants
from support.server.http_clients import only_asyncio
from support.session_peer import HANG, HangingGenerator, gen, opened
from support.wire_server import ThreadServer, open_generator, thread_server
from websockets.sync.client import connect

from agentflow.backends.remote import Remote
from agentflow.engine.tenant import ANONYMOUS
from agentflow.errors import BadArgument, EngineFailed, UnknownModel
from agentflow.protocol import ops
from agentflow.protocol.wire import VERSION, Hello, encode
from agentflow.server.app import Access, create_app
from agentflow.server.config.limits import ServerLimits
from agentflow.server.models.models import Models, OneGenerator, one_model
from agentflow.server.serve import running_server
from agentflow.server.tenants.keys import Tenants

FRAME_BYTES = 64 * 1024


anyio_backend = pytest.fixture(only_asyncio)


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadServer]:
    limits = ServerLimits(frame_bytes=FRAME_BYTES, max_sessions=2, resume_grace_s=0)
    with thread_server(limits) as running:
        yield running


def get(server: ThreadServer, path: str) -> tuple[int, dict[str, Any]]:
    """Status and body of a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_health(server: ThreadServer) -> None:
    assert get(server, "/health/live") == (200, {"status": "live"})
    assert get(server, "/health/ready") == (200, {"status": "ready", "models": ["scripted"], "sessions": 0})


@pytest.mark.parametrize("fault", [EngineFailed("the engine broke"), ZeroDivisionError("the engine broke")])
def test_a_broken_engine_is_live_but_not_ready(server: ThreadServer, fault: Exception) -> None:
    server.generator.stats_fault = fault
    try:
        status, body = get(server, "/health/ready")
    finally:
        server.generator.stats_fault = None
    assert (status, body["status"]) == (503, "unready")
    assert "the engine broke" in body["reason"]
    assert get(server, "/health/live")[0] == 200


def test_a_full_server_is_not_ready(server: ThreadServer) -> None:
    url = f"{server.url}/v1/session"
    with connect(url, compression=None) as first, connect(url, compression=None) as second:
        for connection in (first, second):
            connection.send(encode(Hello(VERSION), binary=True))
            connection.recv()
        status, body = get(server, "/health/ready")
    assert (status, body["status"]) == (503, "unready")


async def _answers(app: Any, scope: dict[str, Any]) -> list[Message]:
    """The application's messages after a first message."""
    kind = "websocket.connect" if scope["type"] == "websocket" else "http.request"
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": kind}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


@pytest.mark.anyio
async def test_before_and_after_its_lifespan_the_application_is_unready() -> None:
    app = create_app(one_model(open_generator))
    common = {"headers": [], "query_string": b"", "extensions": {"websocket.http.response": {}}}
    ready = {"type": "http", "method": "GET", "path": "/health/ready", **common}
    session = {"type": "websocket", "path": "/v1/session", **common}
    for _ in range(2):
        for scope in (ready, session):
            start, body = await _answers(app, dict(scope))
            assert start["status"] == 503
            assert "starting or shutting down" in json.loads(body["body"])["reason"]
        async with app.router.lifespan_context(app):
            start, _ = await _answers(app, dict(ready))
            assert start["status"] == 200


def test_an_unknown_path_or_method_is_refused_with_the_known_ones(server: ThreadServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    try:
        for method, path, status, header in (
            ("GET", "/v1/session", 426, ("upgrade", "websocket")),
            ("PUT", "/v1/models", 405, ("allow", "GET, HEAD")),
            ("PUT", "/v1/responses/x", 405, ("allow", "DELETE, GET, HEAD")),
            ("PUT", "/v1/responses/input_tokens", 405, ("allow", "POST")),
            ("GET", "/metrics/", 404, ("location", None)),
            ("POST", "/v1/messages/", 404, ("request-id", "mine")),
        ):
            connection.request(method, path, headers={"x-request-id": "mine"})
            answer = connection.getresponse()
            assert (answer.status, answer.headers[header[0]]) == (status, header[1])
            assert "mine" in (answer.headers["x-request-id"], answer.headers["request-id"])
            assert json.loads(answer.read())["error"]
    finally:
        connection.close()


@pytest.mark.anyio
async def test_a_page_that_is_allowed_reads_the_headers_that_say_what_to_do() -> None:
    page = "https://app.example"
    app = create_app(one_model(open_generator), access=Access(cors_origins=(page,)))
    headers = [(b"origin", page.encode()), (b"host", b"models.example")]
    scope = {"type": "http", "method": "GET", "path": "/v1/nowhere", "headers": headers, "query_string": b""}
    start, _ = await _answers(app, scope)
    reported = dict(start["headers"])
    assert (start["status"], reported[b"access-control-allow-origin"]) == (404, page.encode())
    exposed = reported[b"access-control-expose-headers"].decode().split(", ")
    assert exposed[:3] == ["x-request-id", "request-id", "retry-after"]
    assert {"x-ratelimit-remaining-tokens", "anthropic-ratelimit-input-tokens-reset"} < set(exposed)


def test_nothing_is_compressed(server: ThreadServer) -> None:
    with connect(f"{server.url}/v1/session") as connection:
        assert connection.response is not None
        assert "Sec-WebSocket-Extensions" not in connection.response.headers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frame_bytes", 4095),
        ("max_sessions", 0),
        ("max_connections", 0),
        ("resume_grace_s", -1.0),
        ("hello_timeout_s", 0.0),
        ("ping_interval_s", 0.0),
    ],
)
def test_limits_that_make_no_sense_are_refused(field: str, value: float) -> None:
    with pytest.raises(BadArgument, check=has_param(field)):
        ServerLimits(**{field: value})  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_session_is_on_the_model_that_it_names() -> None:
    def named(name: str) -> OneGenerator:
        model = OneGenerator(HangingGenerator())
        model.name = name
        return model

    one, other = named("one"), named("other")

    @asynccontextmanager
    async def open_models() -> AsyncIterator[Models]:
        yield Models([one, other])

    def num_open(model: OneGenerator) -> int:
        return model.generator(ANONYMOUS).num_open  # type: ignore[attr-defined]

    async with running_server(open_models) as server:
        for name, counts in ((None, (1, 0)), ("one", (1, 0)), ("other", (0, 1))):
            async with opened(Remote(server.url, model=name)) as (connection, listener):
                connection.send([ops.Open(1), ops.Text(1, (HANG,)), gen(1, 2)])
                await listener.wait_for(lambda received: 2 in received.texts)
                assert (num_open(one), num_open(other)) == counts
        with pytest.raises(UnknownModel):
            async with Remote(server.url, model="none").connect(listener.deliver, listener.lost):
                pytest.fail("it opened")


@pytest.mark.anyio
async def test_other_origins_are_allowed_only_if_configured() -> None:
    page = "https://app.example"
    preflight = {
        "type": "http",
        "method": "OPTIONS",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [
            (b"host", b"127.0.0.1:8410"),
            (b"origin", page.encode()),
            (b"access-control-request-method", b"POST"),
            (b"access-control-request-headers", b"authorization,content-type"),
        ],
    }
    for origins, status, reported in (((), 403, None), ((page,), 200, page.encode())):
        app = create_app(one_model(open_generator), access=Access(cors_origins=origins))
        async with app.router.lifespan_context(app):
            start, *_ = await _answers(app, dict(preflight))
        headers = dict(start["headers"])
        assert start["status"] == status
        assert headers.get(b"access-control-allow-origin") == reported
        if reported:
            assert b"authorization" in headers[b"access-control-allow-headers"]


@pytest.mark.parametrize(
    ("keys", "hosts", "status"),
    [
        ([], None, 403),
        ([], ("pages.example",), 200),
        ([], ("other.example",), 403),
        (["af-key"], None, 200),
        (["af-key"], ("other.example",), 403),
    ],
)
def test_a_public_name_needs_keys_or_a_setting(
    keys: list[str], hosts: tuple[str, ...] | None, status: int
) -> None:
    with api_server(tenants=Tenants(keys), hosts=hosts, constraints=False) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        with contextlib.closing(connection):
            connection.request("GET", "/health/live", headers={"Host": "pages.example"})
            assert connection.getresponse().status == status


@pytest.mark.parametrize(
    ("settings", "headers", "shows"),
    [
        ([], {}, False),
        ([], BEARER, False),
        ([], {"x-api-key": "af-wrong"}, False),
        (["sees_metrics = true"], {}, False),
        (["sees_metrics = true"], BEARER, True),
        (None, {}, True),
    ],
)
def test_names_of_models_are_for_keys_that_see_the_metrics(
    settings: list[str] | None, headers: dict[str, str], shows: bool
) -> None:
    known = None if settings is None else tenants(*settings)
    with api_server(tenants=known, constraints=False) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))

        def ready() -> dict[str, Any]:
            connection.request("GET", "/health/ready", headers=headers)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer

        with contextlib.closing(connection):
            everything = {"status": "ready", "models": ["fake"], "sessions": 0}
            assert ready() == (everything if shows else {"status": "ready"})
            server.call(server.engine.client.end_all, "its model fake broke")  # type: ignore[union-attr]
            assert ("fake" in ready()["reason"]) == shows
