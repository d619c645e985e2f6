"""One request that is refused, in the dialect of either API, and what comes of it: for the test of
docs/reference/errors.md."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
from support.api_server import MODEL, ApiServer

TIMEOUT_S = 30
HELLO = [{"role": "user", "content": "What do plants do?"}]
# Headers that tell a client what to do.
TELLING = ("Allow", "Connection", "Retry-After", "Upgrade", "WWW-Authenticate")


@dataclass(frozen=True)
class Api:
    """One of the two APIs. ``id_header``: where it tells the id of a request."""

    name: str
    path: str
    id_header: str


OPENAI = Api("OpenAI", "/v1/chat/completions", "x-request-id")
ANTHROPIC = Api("Anthropic", "/v1/messages", "request-id")


@dataclass(frozen=True)
class Came:
    """What came: ``cell`` as the page writes it; ``code``: our name for the cause, which Anthropic's bodies
    have elsewhere."""

    cell: str
    code: str | None
    headers: str


CLOSED = Came("closed", None, "")


def port_of(server: ApiServer) -> int:
    return int(server.url.rpartition(":")[2])


def asked(**fields: Any) -> dict[str, Any]:
    """A short request that both APIs take, with other fields; None leaves one out."""
    body = {"model": MODEL, "max_tokens": 4, "messages": HELLO, **fields}
    return {name: value for name, value in body.items() if value is not None}


def come(
    server: ApiServer,
    api: Api,
    body: Any = None,
    *,
    method: str = "POST",
    path: str | None = None,
    headers: dict[str, str] | None = None,
) -> Came:
    """Sends a request and reads the refusal. ``body``: bytes, or what JSON is made of."""
    data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request(method, path or api.path, data, headers or {})
        return came_of(connection.getresponse(), api)


def came_of(answer: http.client.HTTPResponse, api: Api) -> Came:
    """What an answer says; of a stream, in its last event."""
    text, told = answer.read(), _telling(answer)
    media_type = (answer.headers["content-type"] or "").partition(";")[0]
    if media_type == "text/plain":
        return Came(f"{answer.status} as text", None, told)
    if media_type == "text/event-stream":
        text = text.strip().rpartition(b"data: ")[2]
    body = json.loads(text)
    error = body["error"]
    assert error["message"]
    request_id = answer.headers[api.id_header]
    if api is OPENAI:
        assert request_id
        return Came(f"{answer.status} `{error['type']}` `{error['code']}`", error["code"], told)
    assert body["type"] == "error"
    assert request_id == body["request_id"]
    return Came(f"{answer.status} `{error['type']}`", error["details"]["error_code"], told)


def _telling(answer: http.client.HTTPResponse) -> str:
    found = [f"`{name}`" for name in TELLING if name in answer.headers]
    return ", ".join(found)


@contextmanager
def talking(server: ApiServer, data: bytes) -> Iterator[socket.socket]:
    """A connection on which these bytes were sent."""
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=TIMEOUT_S) as stream:
        stream.sendall(data)
        yield stream


def come_of_bytes(server: ApiServer, api: Api, data: bytes) -> Came:
    """What comes of bytes that are no whole request."""
    with talking(server, data) as stream:
        answer = http.client.HTTPResponse(stream)
        try:
            answer.begin()
        except (http.client.RemoteDisconnected, ConnectionResetError):
            return CLOSED
        return came_of(answer, api)


def request_bytes(api: Api, body: Any, *headers: str) -> bytes:
    """A request as it is sent."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {api.path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(data)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + data


@contextmanager
def held(server: ApiServer, api: Api, count: int = 1, *headers: str) -> Iterator[None]:
    """The engine stands before a step, and that many requests are unfinished."""
    server.call(server.engine.gate.allow, 0)
    try:
        with contextlib.ExitStack() as stack:
            client = server.engine.client
            assert client is not None
            for number in range(count):
                stack.enter_context(talking(server, request_bytes(api, asked(), *headers)))
                server.call(server.engine.gate.held)
                until(server, lambda number=number: client.num_calls > number)
            yield
    finally:
        server.call(server.engine.gate.open)


def until(server: ApiServer, holds: Callable[[], bool]) -> None:
    """Waits, in the server's loop, for what somebody else does there."""

    async def wait() -> None:
        with anyio.fail_after(TIMEOUT_S):
            while not holds():
                await anyio.lowlevel.checkpoint()

    server.call(wait)
