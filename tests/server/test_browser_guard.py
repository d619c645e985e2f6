"""Which requests of browsers are let through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentflow.server.browser_guard import LOOPBACK_NAMES, BrowserGuard

pytestmark = pytest.mark.anyio

HOST = "127.0.0.1:8410"


async def status_of(guard: BrowserGuard, headers: dict[str, str], kind: str = "http") -> int:
    """What the guard answers; 200 is what the application behind it would."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {
        "type": kind,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "extensions": {"websocket.http.response": {}},
    }
    await guard(scope, receive, send)
    if sent[0].get("status") == 403:
        body = next(message["body"] for message in sent if "body" in message)
        assert json.loads(body)["error"]["code"] == "forbidden_origin"
    return sent[0]["status"]


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize("kind", ["http", "websocket"])
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
        ({"host": "[bad"}, 403),
        ({}, 200),
    ],
)
async def test_a_server_on_loopback(kind, headers, status):
    assert await status_of(BrowserGuard(app, hosts=LOOPBACK_NAMES), headers, kind) == status


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
    guard = BrowserGuard(app, origins=origins)
    assert await status_of(guard, {"host": "models.example", "origin": origin}) == status
