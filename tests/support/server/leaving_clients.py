"""Clients that ask over HTTP and close their connection: for tests of what is left of their work."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
from support.api_server import MODEL, ApiServer

# What each API generates under, with a prompt of its own.
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")


def asking(path: str, text: str) -> dict[str, Any]:
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


def goes(server: ApiServer, connection: socket.socket) -> None:
    """The client closes, and the server has heard of it: nothing is being answered any more."""
    connection.close()
    server.call(server.service.calls.until_none)


def wait_until(server: ApiServer, holds: Callable[[], bool]) -> None:
    """Waits, in the server's loop, for what will be without anything else being done."""

    async def until() -> None:
        with anyio.fail_after(20):
            while not holds():
                await anyio.lowlevel.checkpoint()

    server.call(until)


class Heard:
    """Counts what the engine is sent from now on."""

    def __init__(self, server: ApiServer) -> None:
        self.num_sent = 0
        self._server = server
        server.call(server.generator.observe, self)

    def sent(self, submit: object) -> None:
        self.num_sent += 1

    def received(self, messages: object) -> None:
        pass

    def wait_for(self, number: int) -> None:
        """Until it was sent so many requests."""
        wait_until(self._server, lambda: self.num_sent >= number)
