"""Tools of real MCP servers: over stdio and over HTTP on loopback."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import agentflow as af

pytestmark = pytest.mark.anyio

SCRIPT = str(Path(__file__).parents[1] / "support" / "language" / "mcp_server.py")
COMMAND = [sys.executable, "-P", SCRIPT]
KEY = {"x-key": "secret"}


@contextlib.contextmanager
def http_server() -> Iterator[str]:
    with subprocess.Popen([*COMMAND, "http"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        finally:
            process.kill()


async def shop_with(server: Any) -> list[str]:
    """What the model gets for calls of the server's tools."""
    calls = [
        af.ToolCall("buy", {"order": {"item": "nail", "count": 2}}),
        af.ToolCall("buy", {"order": {"item": "screw"}}),
        af.ToolCall("buy", {"order": 3}),
        af.ToolCall("left", {}),
        af.ToolCall("picture", {}),
    ]
    backend = af.Scripted({"answer": [calls, "done"]})
    async with server as shop, af.session(backend=backend) as flow, flow.state() as s:
        s += af.user("?")
        assert await af.act(s, tools=shop.tools) == "done"
        results = [m["content"] for m in await s.messages() if m["role"] == "tool"]
    specs = {tool.name: tool for tool in backend.calls[0].tools}
    assert specs.keys() >= {"buy", "left", "picture"}
    assert specs["buy"].description == "Buys something."
    assert specs["buy"].parameters["required"] == ["order"]
    return results


def check(results: list[str]) -> None:
    bought, missing, invalid, left, picture = results
    assert bought == "2 of 3 nail"
    assert missing.startswith("error: ")
    assert "there is no screw" in missing
    assert invalid.startswith("error: ")
    assert json.loads(left) == {"nail": 3}
    assert "image/png" in picture


async def test_a_server_over_stdio():
    check(await shop_with(af.mcp(COMMAND)))


@pytest.mark.trio_in_full
async def test_a_server_over_http():
    with http_server() as url:
        check(await shop_with(af.mcp(url, headers=KEY)))
        with pytest.raises(af.ServerUnreachable):
            await shop_with(af.mcp(url))


@pytest.mark.trio_in_full
async def test_two_servers_and_a_function_serve_one_loop():
    def weather(city: str) -> str:
        return f"rain in {city}"

    calls = [af.ToolCall("weather", {"city": "Oslo"}), af.ToolCall("buy", {"order": {"item": "nail"}})]
    script = {"answer": [calls, "done"]}
    with http_server() as url:
        async with (
            af.mcp(COMMAND) as shop,
            af.mcp(url, headers=KEY) as other,
            af.session(backend=af.Scripted(script)) as flow,
            flow.state() as s,
        ):
            again = [af.tool(tool, name=f"other_{tool.name}", parameters={}) for tool in other.tools]
            s += af.user("?")
            assert await af.act(s, tools=[weather, *shop.tools, *again]) == "done"
            assert [m["content"] for m in await s.messages()][2:4] == ["rain in Oslo", "1 of 3 nail"]


async def test_a_server_that_ends_fails_the_call():
    script = {"answer": [af.ToolCall("leave", {}), "done"]}
    async with (
        af.mcp(COMMAND) as shop,
        af.session(backend=af.Scripted(script)) as flow,
        flow.state() as s,
    ):
        s += af.user("?")
        assert await af.act(s, tools=shop.tools) == "done"
        assert (await s.messages())[2]["content"].startswith("error: ")


async def test_the_tools_are_those_of_an_open_server():
    shop = af.mcp(COMMAND)
    with pytest.raises(af.BadArgument, match="async with"):
        shop.tools  # noqa: B018
    async with shop:
        assert shop.tools
    with pytest.raises(af.BadArgument, match="async with"):
        shop.tools  # noqa: B018


@pytest.mark.trio_in_full
async def test_an_error_in_the_block_leaves_as_itself():
    with pytest.raises(KeyError):
        async with af.mcp(COMMAND):
            raise KeyError("mine")
    with anyio.CancelScope() as scope:
        async with af.mcp(COMMAND):
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    "command",
    [["no-such-command"], [sys.executable, "-c", "1"], "http://127.0.0.1:9/mcp"],
    ids=["no command", "no server", "no listener"],
)
async def test_a_server_that_is_not_there(command):
    with pytest.raises(af.ServerUnreachable):
        async with af.mcp(command):
            raise AssertionError("entered")


async def test_a_server_that_does_not_answer():
    with pytest.raises(af.ServerUnreachable):
        async with af.mcp([sys.executable, "-c", "input(); input()"], timeout_s=0.2):
            raise AssertionError("entered")


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (("python server.py",), "server"),
        (([],), "server"),
        (([1],), "server"),
        (("http://localhost/mcp", {"env": {}}), "env"),
        ((["python"], {"headers": {}}), "headers"),
    ],
)
def test_wrong_arguments_are_rejected(arguments, param):
    server, options = arguments if len(arguments) == 2 else (*arguments, {})
    with pytest.raises(af.BadArgument) as caught:
        af.mcp(server, **options)
    assert caught.value.param == param


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(af.NotSupported, match=r"agentflow-lm\[mcp\]"):
        af.mcp(["python", "server.py"])
