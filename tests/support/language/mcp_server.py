"""An MCP server for tests: over stdio, or with the argument ``http`` on loopback. Then it prints its port and
requires a header."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

KEY = "secret"
server = MCPServer("shop", log_level="CRITICAL")
stock = {"nail": 3}


class Order(BaseModel):
    item: str
    count: int = 1


@server.tool()
def buy(order: Order) -> str:
    """Buys something."""
    if order.item not in stock:
        raise ToolError(f"there is no {order.item}")
    return f"{order.count} of {stock[order.item]} {order.item}"


@server.tool()
def left() -> dict[str, int]:
    """What is left."""
    return stock


@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(0)


def serve_http() -> None:
    app = server.streamable_http_app()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (b"x-key", KEY.encode()) not in scope["headers"]:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await app(scope, receive, send)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(guarded, log_level="critical")).run(sockets=[listener])


if __name__ == "__main__":
    serve_http() if sys.argv[1:] == ["http"] else server.run("stdio")
