"""An agent with the tools of an MCP server over stdio, and a plain Python function as a tool.

The server is this file itself, started with ``--serve``. The model calls tools until it answers. Every call
is approved before it runs. Small models rarely call tools by themselves, and then call them without end: so
the first round requires a call, and no reply may have more than one.

    python examples/agent_with_tools.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import sys
from typing import Literal

from example_session import example_parser, run_example
from rich.console import Console

import agentflow as af

QUESTION = "How many nails are left, and what do three of them cost?"
Item = Literal["nail", "screw", "hammer"]


def price(item: Item) -> float:
    """The price of one item, in euros."""
    return {"nail": 0.1, "screw": 0.2, "hammer": 12.5}[item]


def approve(call: af.ToolCall) -> bool | str:
    return call.name in ("left", "price") or "this agent only reads"


@af.program
async def agent(s: af.State, question: str, shop: af.McpServer, console: Console) -> str:
    s += af.system("You answer questions about a shop with its tools.") + af.user(question)
    answer = ""
    loop = af.act(
        s,
        tools=[price, *shop.tools],
        approve=approve,
        max_rounds=4,
        choice="required",
        parallel=False,
        max_tokens=64,
    )
    async for event in loop:
        if isinstance(event, af.ToolDone):
            console.print(f"{event.call.name} {event.call.arguments}: {event.text}", markup=False)
        elif isinstance(event, af.ActDone):
            answer = str(event.result)
    return answer


async def main(flow: af.Session, console: Console) -> None:
    console.print(QUESTION, style="bold")
    async with af.mcp([sys.executable, __file__, "--serve"]) as shop:
        try:
            console.print(await flow.run(agent, QUESTION, shop, console), markup=False)
        except af.errors.LimitExceeded as error:  # small models may go on calling
            console.print(str(error), style="yellow")


def serve() -> None:
    """The MCP server."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("shop", log_level="CRITICAL")

    @server.tool()
    def left(item: Item) -> int:
        """How many of an item are left."""
        return {"nail": 120, "screw": 7, "hammer": 1}[item]

    @server.tool()
    def order(item: Item, count: int) -> str:
        """Orders an item."""
        return f"ordered {count} {item}"

    server.run("stdio")


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve()
    else:
        sys.exit(run_example(main, example_parser(__doc__).parse_args()))
