"""An MCP server for tests: over stdio, or with the arguments ``http`` and a port (0: a free one) on loopback.
Then it prints its port and requires a header. With ``legacy`` it knows the handshake with sessions only."""

from __future__ import annotations

import os
import socket
import sys
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


if __name__ == "__main__":
    if sys.argv[1] == "http":
        serve_http(int(sys.argv[2]), is_legacy="legacy" in sys.argv)
    else:
        server.run("stdio")
