"""Which requests of browsers are let through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentflow.server.origin_guard import BrowserGuard, accept_hosts, private_host

pytestmark = pytest.mark.anyio

LOOPBACK = accept_hosts(["127.0.0.1"])
HOST = "127.0.0.1:8410"


async def answer_of(
    guard: BrowserGuard, headers: dict[str, str], kind: str = "http", path: str = "/v1/models"
) -> list[Any]:
    """The guard's messages."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {
        "type": kind,
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "extensions": {"websocket.http.response": {}},
    }
    await guard(scope, receive, send)
    return sent


async def status_of(guard: BrowserGuard, headers: dict[str, str], kind: str = "http") -> int:
    """The status for a request: 200 is the answer of the application behind the guard."""
    return (await answer_of(guard, headers, kind))[0]["status"]


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"origin": "http://elsewhere.example", "host": HOST}, "forbidden_origin"),
        ({"host": "x.example"}, "unknown_host"),
    ],
)
async def test_an_error_has_the_format_of_the_path(asked, code):
    guard = BrowserGuard(app, knows_host=LOOPBACK)
    start, body = await answer_of(guard, asked)
    assert json.loads(body["body"])["error"]["code"] == code
    assert dict(start["headers"])[b"x-request-id"].startswith(b"req_")
    start, body = await answer_of(guard, {**asked, "x-request-id": "mine"}, path="/v1/messages/count_tokens")
    reported = json.loads(body["body"])
    assert (reported["type"], reported["error"]["type"]) == ("error", "permission_error")
    assert reported["error"]["details"]["error_code"] == code
    assert dict(start["headers"])[b"request-id"].decode() == reported["request_id"] == "mine"
    _, body = await answer_of(guard, asked, "websocket")
    assert json.loads(body["body"])["reason"]


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": HOST}, 200),
        ({"host": HOST, "origin": f"http://{HOST}"}, 200),
        ({"host": HOST, "origin": "http://127.0.0.1:9999"}, 403),
        ({"host": HOST, "origin": "https://elsewhere.example"}, 403),
        ({"host": HOST, "origin": "null"}, 403),
        ({"host": HOST, "origin": "http://[bad"}, 403),
        ({"host": HOST, "origin": ""}, 403),
        # A page whose name resolves to this machine (DNS rebinding): its origin is the host that it asks.
        ({"host": "elsewhere.example:8410", "origin": "http://elsewhere.example:8410"}, 403),
        ({"host": "elsewhere.example"}, 403),
        ({"host": "LocalHost:8410"}, 200),
        ({"host": "[::1]:8410"}, 200),
        ({"host": "[0:0:0:0:0:0:0:1]:8410"}, 200),
        ({"host": "127.0.0.2"}, 200),
        ({"host": "localhost.elsewhere.example"}, 403),
        ({"host": "[bad"}, 403),
        ({}, 200),
    ],
)
async def test_a_server_on_loopback(headers, status):
    for kind in ("http", "websocket"):
        assert await status_of(BrowserGuard(app, knows_host=LOOPBACK), headers, kind) == status


@pytest.mark.parametrize(
    ("origins", "origin", "status"),
    [
        (("https://app.example",), "https://app.example", 200),
        (("https://app.example",), "http://app.example", 403),
        (("https://app.example",), "https://app.example.evil", 403),
        (("*",), "https://anywhere.example", 200),
    ],
)
async def test_origins_that_are_allowed(origins, origin, status):
    guard = BrowserGuard(app, origins=origins, knows_host=private_host)
    assert await status_of(guard, {"host": "models.example", "origin": origin}) == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("192.0.2.1:8410", 200),
        ("[2001:db8::1]:8410", 200),
        ("gpu-box:8410", 200),
        ("gpu-box.local", 200),
        ("models.svc.cluster.local.", 200),
        ("localhost", 200),
        ("elsewhere.example:8410", 403),
        ("192.0.2.1.elsewhere.example", 403),
        ("local.example", 403),
        ("evillocal.example", 403),
    ],
)
async def test_a_rebound_name_does_not_pass_on_a_server_without_keys(host, status):
    for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
        for kind in ("http", "websocket"):
            assert await status_of(BrowserGuard(app, knows_host=private_host), headers, kind) == status
