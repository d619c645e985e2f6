"""The agent with tools: calls of a function and of the example's MCP server, one of which is denied."""

import io

import agent_with_tools
import pytest
from rich.console import Console

import agentflow as af

pytestmark = pytest.mark.anyio


async def test_the_agent_calls_both_kinds_of_tools_and_orders_nothing():
    """It shows the markup in the model's text literally."""
    calls = [
        af.ToolCall("left", {"item": "nail"}),
        af.ToolCall("price", {"item": "nail"}),
        af.ToolCall("order", {"item": "nail", "count": 9}),
    ]
    backend = af.Scripted({"answer": [calls, "[/] [red 120, and 0.30 euros."]}, strict=True)
    output = io.StringIO()
    async with af.session(backend=backend) as flow:
        await agent_with_tools.main(flow, Console(file=output, width=200))
    lines = output.getvalue().splitlines()
    assert lines[-1] == "[/] [red 120, and 0.30 euros."
    results = {line.partition(" ")[0]: line.rpartition("}: ")[2] for line in lines[1:-1]}
    assert (results["left"], results["price"]) == ("120", "0.1")
    assert results["order"].startswith("error: ")
    assert {tool.name for tool in backend.calls[0].tools} == {"price", "left", "order"}
