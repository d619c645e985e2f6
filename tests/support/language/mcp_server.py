"""An MCP server for tests: over stdio, or with the arguments ``http`` and a port (0: a free one) on loopback.
Then it prints its port and requires a header. With ``legacy`` it knows the handshake with sessions only. With
``forks`` and a path, ``mcp_start.py`` starts it."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from typing import Any

import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.prompts.base import AssistantMessage, UserMessage
from mcp.types import CallToolResult, ImageContent, TextContent
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
def measured(kind: str) -> CallToolResult:
    """A result with a structured value next to text or an image."""
    text = TextContent(type="text", text="warm")
    drawn = ImageContent(type="image", data="iVBORw0K", mime_type="image/png")
    return CallToolResult(content=[text if kind == "text" else drawn], structured_content={"degrees": 21})


@server.tool()
def items() -> list[str]:
    """A list."""
    return ["nail", "screw"]


@server.resource("shop://rules")
def rules() -> str:
    """The rules."""
    return "No refunds."


@server.resource("shop://logo", mime_type="image/png")
def logo() -> bytes:
    """The logo."""
    return b"\x89PNG\r\n"


@server.resource("file:///guide.md")
def guide() -> str:
    """The guide that docs/guides/tools.md reads."""
    return "Read me."


@server.resource("file:///chart.png", mime_type="image/png")
def chart() -> bytes:
    """The chart that docs/guides/tools.md reads."""
    return b"\x89PNG\r\n"


@server.resource("shop://items/{item}")
def one_item(item: str) -> str:
    """An item."""
    return f"one {item}"


@server.prompt()
def haggle(item: str) -> list[UserMessage | AssistantMessage]:
    """How to haggle."""
    return [UserMessage(f"Lower the price of a {item}."), AssistantMessage("Why?")]


@server.prompt()
def review(language: str) -> str:
    """The prompt that docs/guides/tools.md uses."""
    return f"Review the {language}."


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(0)


async def refuse(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def serve_http(port: int, is_legacy: bool) -> None:
    app = server.streamable_http_app()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        headers = scope.get("headers", ())
        if scope["type"] == "http" and (b"x-key", KEY.encode()) not in headers:
            await refuse(send, 401)
        elif is_legacy and (b"mcp-method", b"server/discover") in headers:
            await refuse(send, 404)
        else:
            await app(scope, receive, send)

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(guarded, log_level="critical")).run(sockets=[listener])


def serve_forks(path: str) -> None:
    """Listens at a path for ``mcp_start.py``. A fork serves each connection and ends with it: the import of
    the package takes much longer than anything that a test does with a server. Ends when stdin does."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while select.select([sys.stdin, listener], [], [])[0] == [listener]:
            connection, _ = listener.accept()
            arguments, files, _, _ = socket.recv_fds(connection, 1000, 2)
            if os.fork() == 0:
                listener.close()
                for file, standard in zip(files, (0, 1), strict=True):
                    os.dup2(file, standard)
                    os.close(file)
                threading.Thread(target=end_with, args=[connection], daemon=True).start()
                serve(arguments.decode().split("\0"))
                os._exit(0)
            connection.close()
            for file in files:
                os.close(file)


def end_with(connection: socket.socket) -> None:
    """Ends the process when the other side of the connection does."""
    connection.recv(1)
    os._exit(0)


def serve(arguments: list[str]) -> None:
    match arguments:
        case ["forks", path]:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork is waited for
            serve_forks(path)
        case ["http", port, *options]:
            serve_http(int(port), is_legacy="legacy" in options)
        case _:
            server.run("stdio")


if __name__ == "__main__":
    serve(sys.argv[1:])
