"""Requests that fail, in the format of either API, and their responses: for the test of
docs/reference/errors.md."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from support.api_server import MODEL, ApiServer
from support.sent_requests import SentRequests
from support.server.apis import CHAT, Api

TIMEOUT_S = 30
HELLO = [{"role": "user", "content": "What do plants do?"}]
# Headers that instruct the client.
SHOWN_HEADERS = ("Allow", "Connection", "Retry-After", "Upgrade", "WWW-Authenticate")


@dataclass(frozen=True)
class Response:
    """``cell``: the response as the page writes it. ``code``: the error's code. ``headers``: the headers of
    ``SHOWN_HEADERS`` in the response."""

    cell: str
    code: str | None
    headers: str


CLOSED = Response("closed", None, "")


def port_of(server: ApiServer) -> int:
    return int(server.url.rpartition(":")[2])


def request_fields(**fields: Any) -> dict[str, Any]:
    """The body of a short request, for both APIs, with other fields; None removes one."""
    body = {"model": MODEL, "max_tokens": 4, "messages": HELLO, **fields}
    return {name: value for name, value in body.items() if value is not None}


def response_to(
    server: ApiServer,
    api: Api,
    body: Any = None,
    *,
    method: str = "POST",
    path: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """Sends a request and reads the error. ``body``: bytes, or a value that becomes JSON."""
    data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request(method, path or api.path, data, headers or {})
        return response_of(connection.getresponse(), api)


def response_of(answer: http.client.HTTPResponse, api: Api) -> Response:
    """The error of a response; a stream's error is its last event."""
    text, headers = answer.read(), _shown_headers(answer)
    media_type = (answer.headers["content-type"] or "").partition(";")[0]
    if media_type == "text/plain":
        return Response(f"{answer.status} as text", None, headers)
    if media_type == "text/event-stream":
        text = text.strip().rpartition(b"data: ")[2]
    body = json.loads(text)
    error = body["error"]
    assert error["message"]
    request_id = answer.headers[api.id_header]
    if api is CHAT:
        assert request_id
        return Response(f"{answer.status} `{error['type']}` `{error['code']}`", error["code"], headers)
    assert body["type"] == "error"
    assert request_id == body["request_id"]
    return Response(f"{answer.status} `{error['type']}`", error["details"]["error_code"], headers)


def _shown_headers(answer: http.client.HTTPResponse) -> str:
    found = [f"`{name}`" for name in SHOWN_HEADERS if name in answer.headers]
    return ", ".join(found)


@contextmanager
def connection_with(server: ApiServer, data: bytes) -> Iterator[socket.socket]:
    """A connection over which these bytes were sent."""
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=TIMEOUT_S) as stream:
        stream.sendall(data)
        yield stream


def response_to_bytes(server: ApiServer, api: Api, data: bytes) -> Response:
    """The response to bytes that are no complete request."""
    with connection_with(server, data) as stream:
        answer = http.client.HTTPResponse(stream)
        try:
            answer.begin()
        except (http.client.RemoteDisconnected, ConnectionResetError):
            return CLOSED
        return response_of(answer, api)


def request_bytes(api: Api, body: Any, *headers: str) -> bytes:
    """A request as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {api.path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(data)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + data


@contextmanager
def gated(server: ApiServer, api: Api, count: int = 1, *headers: str) -> Iterator[None]:
    """The engine is paused before a step, with ``count`` unfinished requests."""
    server.call(server.engine.gate.allow, 0)
    try:
        with contextlib.ExitStack() as stack:
            client = server.engine.client
            assert client is not None
            requests = SentRequests()
            server.call(client.observe, requests)
            for number in range(count):
                stack.enter_context(connection_with(server, request_bytes(api, request_fields(), *headers)))
                server.call(server.engine.gate.held)
                server.call(requests.wait_for, number + 1)
            yield
    finally:
        server.call(server.engine.gate.open)
