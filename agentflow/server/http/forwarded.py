"""Answers the requests that other servers with the same store forward, through the application's routes."""

from __future__ import annotations

import anyio
from starlette.types import ASGIApp, Message, Scope

from agentflow.server.http.call import FORWARDED
from agentflow.server.stores.fronts import ForwardedAnswer, ForwardedRequest


async def answer_forwarded(routes: ASGIApp, app: ASGIApp, asked: ForwardedRequest) -> ForwardedAnswer:
    """Answers a request.

    Args:
        routes: The routes of the application, without its checks of origins and host names.
        app: The application, whose state the handlers use.
        asked: The request, which the other server has authenticated.
    """
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "query_string": asked.query,
        "root_path": "",
        "headers": [*asked.headers],
        "client": None,
        "server": None,
        "app": app,
        "state": {},
        FORWARDED: asked.tenant,
    }
    parts: list[bytes] = []
    start: Message = {}
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:  # the other server cancels the call when its client is gone
            await anyio.sleep_forever()
        is_read = True
        return {"type": "http.request", "body": asked.body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    await routes(scope, receive, send)
    headers = tuple([(bytes(name), bytes(value)) for name, value in start["headers"]])
    return ForwardedAnswer(status=start["status"], headers=headers, body=b"".join(parts))
