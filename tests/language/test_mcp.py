"""Tools of real MCP servers: over stdio and over HTTP on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.docs.page_blocks import DOCS, blocks_of, run_block

import agentflow as af

pytestmark = pytest.mark.anyio

SUPPORT = Path(__file__).parents[1] / "support" / "language"
SOCKET = str(Path(tempfile.gettempdir()) / f"agentflow-mcp-{os.getpid()}")
START = [sys.executable, "-S", "-P", str(SUPPORT / "mcp_start.py"), SOCKET]
COMMAND = [*START, "stdio"]
KEY = {"x-key": "secret"}


@pytest.fixture(scope="module", autouse=True)
def _forking() -> Iterator[None]:
    """The process whose forks are the servers."""
    command = [sys.executable, "-P", str(SUPPORT / "mcp_server.py"), "forks", SOCKET]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
    os.unlink(SOCKET)


class HttpServer:
    """A server on a port, which may be started again."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self._port = 0

    def start(self) -> None:
        command = [*START, "http", str(self._port), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/mcp"


@contextlib.contextmanager
def running(*options: str) -> Iterator[HttpServer]:
    server = HttpServer(*options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def http_server() -> Iterator[str]:
    with running() as server:
        yield server.url


async def shop_with(server: Any) -> list[str]:
    """The results that the model gets for calls of the server's tools."""
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


async def test_a_server_over_http():
    with http_server() as url:
        check(await shop_with(af.mcp(url, headers=KEY)))
        with pytest.raises(af.errors.ServerUnreachable):
            await shop_with(af.mcp(url))


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
            again = [af.tool(tool, name=f"other_{tool.name}") for tool in other.tools]
            s += af.user("?")
            assert await af.act(s, tools=[weather, *shop.tools, *again]) == "done"
            assert [m["content"] for m in await s.messages()][2:4] == ["rain in Oslo", "1 of 3 nail"]


# httpcore2 leaves the response of a cancelled request to the garbage collector, of which trio warns.
of_a_cut_stream = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


async def results_of(s: af.State) -> list[str]:
    return [str(message["content"]) for message in await s.messages() if message["role"] == "tool"]


@of_a_cut_stream
@pytest.mark.parametrize("options", [(), ("legacy",)], ids=["without sessions", "with sessions"])
async def test_f15a_a_lost_connection_fails_its_calls_and_is_opened_again(options):
    left = af.ToolCall("left", {})
    script = {"answer": [[left], [left, left], [af.ToolCall("restart", {})], [left], [left], "done"]}
    with running(*options) as server:
        async with (
            af.mcp(server.url, headers=KEY) as shop,
            af.session(backend=af.Scripted(script)) as flow,
            flow.state() as s,
        ):
            s += af.user("?")
            server.stop()
            answer = await af.act(s, tools=[*shop.tools, af.tool(server.start, name="restart")])
            lost, refused, shared, _, *found = await results_of(s)
            assert answer == "done"
            assert all(text.startswith("error: Server") for text in (lost, refused, shared))
            assert json.loads(found[1]) == {"nail": 3}


@of_a_cut_stream
async def test_f15b_a_restarted_server_that_forgot_its_sessions():
    left = af.ToolCall("left", {})
    script = {"answer": [left, left, "done"]}
    with running("legacy") as server:
        async with (
            af.mcp(server.url, headers=KEY) as shop,
            af.session(backend=af.Scripted(script)) as flow,
            flow.state() as s,
        ):
            s += af.user("?")
            server.stop()
            server.start()
            assert await af.act(s, tools=shop.tools) == "done"
            lost, found = await results_of(s)
            assert lost.startswith("error: ServerLost")
            assert json.loads(found) == {"nail": 3}


async def test_f15c_a_command_that_ends_is_started_again():
    script = {"answer": [af.ToolCall("leave", {}), af.ToolCall("left", {}), "done"]}
    async with (
        af.mcp(COMMAND) as shop,
        af.session(backend=af.Scripted(script)) as flow,
        flow.state() as s,
    ):
        s += af.user("?")
        assert await af.act(s, tools=shop.tools) == "done"
        lost, found = await results_of(s)
        assert lost.startswith("error: ServerLost")
        assert json.loads(found) == {"nail": 3}


async def test_f15d_a_prefix_and_a_renamed_tool_keep_the_schema():
    nail = {"order": {"item": "nail"}}
    calls = [af.ToolCall(name, nail) for name in ("buy", "b_buy", "bought")]
    backend = af.Scripted({"answer": [calls, "done"]})
    async with (
        af.mcp(COMMAND) as a,
        af.mcp(COMMAND, prefix="b_") as b,
        af.session(backend=backend) as flow,
        flow.state() as s,
    ):
        [buy] = [tool for tool in a.tools if tool.name == "buy"]
        s += af.user("?")
        await af.act(s, tools=[*a.tools, *b.tools, af.tool(buy, name="bought", max_calls=1)])
        assert await results_of(s) == ["1 of 3 nail"] * 3
    specs = {tool.name: tool for tool in backend.calls[0].tools}
    assert specs["buy"].parameters == specs["b_buy"].parameters == specs["bought"].parameters
    assert specs["bought"].description == "Buys something."


async def test_f15e_structured_content_is_told_once():
    calls = [af.ToolCall("measured", {"kind": kind}) for kind in ("text", "image")]
    calls += [af.ToolCall("items", {}), af.ToolCall("left", {})]
    async with (
        af.mcp(COMMAND) as shop,
        af.session(backend=af.Scripted({"answer": [calls, "done"]})) as flow,
        flow.state() as s,
    ):
        s += af.user("?")
        await af.act(s, tools=shop.tools)
        text, drawn, items, left = await results_of(s)
    assert text == 'warm\n{"degrees": 21}'
    assert (drawn.count("data:image/png;base64"), drawn.count("degrees")) == (1, 1)
    assert items == "nail\nscrew"
    assert json.loads(left) == {"nail": 3}


async def test_f15f_resources_and_prompts():
    async with (
        af.mcp(COMMAND) as shop,
        af.session(backend=af.Scripted({})) as flow,
        flow.state() as s,
    ):
        assert {resource.uri for resource in await shop.resources()} >= {"shop://rules", "shop://logo"}
        assert await shop.read_text("shop://rules") == "No refunds."
        assert await shop.read_text("shop://items/nail") == "one nail"
        assert await shop.read_bytes("shop://logo") == b"\x89PNG\r\n"
        with pytest.raises(af.errors.RunFailed):
            await shop.read_text("shop://logo")
        with pytest.raises(af.errors.RunFailed):
            await shop.read_text("shop://nothing")
        assert "haggle" in [prompt.name for prompt in await shop.prompts()]
        s += await shop.prompt("haggle", item="nail")
        assert [(m["role"], m["content"]) for m in await s.messages()] == [
            ("user", "Lower the price of a nail."),
            ("assistant", "Why?"),
        ]
        with pytest.raises(af.errors.RunFailed):
            await shop.prompt("nothing")
    with pytest.raises(af.errors.BadArgument):
        await shop.resources()


def test_f15g_a_tool_of_a_tool_is_a_copy_with_changes():
    def ping(text: str) -> str:
        """Pings."""
        return text

    one = af.tool(ping, timeout_s=5, description="Sends it.")
    two = af.tool(one, name="pong")
    assert (two.name, two.description, two.timeout_s, two("a")) == ("pong", "Sends it.", 5, "a")
    assert one.name is None


async def test_f47g_the_blocks_of_the_page_run_on_these_servers():
    page = DOCS / "guides" / "tools.md"
    blocks = [block for block in blocks_of(page) if not block.runs]
    assert len(blocks) == 3

    def weather(city: str) -> str:
        return f"rain in {city}"

    with http_server() as url:
        async with (
            af.session(backend=af.Scripted({"answer": "done"})) as flow,
            flow.state() as s,
            af.mcp(COMMAND) as docs,
        ):
            given = {"af": af, "flow": flow, "weather": weather, "key": KEY["x-key"], "s": s, "docs": docs}
            for block in blocks:
                source = block.source.replace('["uvx", "mcp-server-git"]', repr(COMMAND))
                source = source.replace("https://example.com/mcp", url)
                source = source.replace('"Authorization": f"Bearer {key}"', '"x-key": key')
                source = source.replace('af.mcp("http', "af.mcp(prefix='docs_', server=\"http")
                quiet = {**given, "print": lambda *_, **__: None}
                await run_block(page, block._replace(source=source), quiet)
            assert (await s.text()).endswith("<user>Review the Python.</user>")


async def test_the_tools_are_those_of_an_open_server():
    shop = af.mcp(COMMAND)
    with pytest.raises(af.errors.BadArgument, match="async with"):
        shop.tools  # noqa: B018
    async with shop:
        assert shop.tools
    with pytest.raises(af.errors.BadArgument, match="async with"):
        shop.tools  # noqa: B018


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
    with pytest.raises(af.errors.ServerUnreachable):
        async with af.mcp(command):
            raise AssertionError("entered")


async def test_a_server_that_does_not_answer():
    with pytest.raises(af.errors.ServerUnreachable):
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
        ((["python"], {"prefix": 1}), "prefix"),
    ],
)
def test_wrong_arguments_are_rejected(arguments, param):
    server, options = arguments if len(arguments) == 2 else (*arguments, {})
    with pytest.raises(af.errors.BadArgument) as caught:
        af.mcp(server, **options)
    assert caught.value.param == param


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(af.errors.NotSupported, match=r"agentflow-lm\[mcp\]"):
        af.mcp(["python", "server.py"])
