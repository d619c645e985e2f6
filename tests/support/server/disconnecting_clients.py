"""HTTP clients that close their connection before the response ends."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
from support.api_server import ApiServer


def post(server: ApiServer, path: str, body: Any, *, then: bytes = b"") -> socket.socket:
    """Sends a request, followed by ``then``, and returns its connection."""
    data = msgspec.json.encode(body)
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data + then)
    return connection


def disconnect(server: ApiServer, connection: socket.socket) -> None:
    """Closes the connection, and waits until the server handles no request any more."""
    connection.close()
    server.call(server.service.calls.until_none)
