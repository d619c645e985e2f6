"""HTTP clients that close their connection before the response ends."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
from support.api_server import MODEL, ApiServer

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")


def prompt_fields(path: str, text: str) -> dict[str, Any]:
    """The fields of a request with this prompt."""
    if path == "/v1/completions":
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


def post(server: ApiServer, path: str, **fields: Any) -> socket.socket:
    """Sends a request and returns its connection. A field of None is left out."""
    values = {"model": MODEL, "max_tokens": 900, **fields}
    body = msgspec.json.encode({name: value for name, value in values.items() if value is not None})
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def disconnect(server: ApiServer, connection: socket.socket) -> None:
    """Closes the connection, and waits until the server handles no request any more."""
    connection.close()
    server.call(server.service.calls.until_none)
