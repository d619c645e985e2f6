"""Tools of MCP servers, by the official package ``mcp`` (the extra ``mcp``), imported when it is needed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any

import anyio
from anyio.abc import TaskStatus

from agentflow.errors import BadArgument, NotSupported, ServerUnreachable
from agentflow.language.typed.tools import FunctionTool, tool
from agentflow.protocol.ops import check_timeout
from agentflow.runtime.task_group import first_of, open_task_group

CONNECT_TIMEOUT_S = 30.0


def mcp(
    server: str | Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None = CONNECT_TIMEOUT_S,
) -> McpServer:
    """An MCP server, whose ``tools`` ``af.act`` takes. Enter it with ``async with``, and leave it in the same
    task.

    ``server``: a list of a command and its arguments, which starts the server (stdio), with ``env`` added to
    a small default environment, in the folder ``cwd``; or the URL of a running one (streamable HTTP), which
    gets the ``headers`` with each request. ``timeout_s``: to connect and to list the tools.

    ``NotSupported`` without the package ``mcp``. On entering, ``ServerUnreachable``, whose cause says why.

    ::

        async with af.mcp(["uvx", "mcp-server-git"]) as git, flow.state() as s:
            s += af.user("What changed in the last commit?")
            print(await af.act(s, tools=[*git.tools, weather]))

    >>> af.mcp(["uvx", "mcp-server-git"])
    <MCP server uvx mcp-server-git with no tools>
    """
    check_timeout(timeout_s, "mcp")
    is_url = isinstance(server, str)
    if is_url and not server.startswith(("http://", "https://")):  # type: ignore[union-attr]
        raise BadArgument(
            f"mcp: {server!r} is not a URL: give one, or a list such as ['python', 'server.py']",
            param="server",
        )
    if not is_url and (not server or not all(isinstance(part, str) for part in server)):
        raise BadArgument(f"mcp: the command must be a list of strings, not {server!r}", param="server")
    if is_url and (env is not None or cwd is not None):
        raise BadArgument("mcp: env and cwd are for a command, not for a URL", param="env")
    if not is_url and headers is not None:
        raise BadArgument("mcp: headers are for a URL, not for a command", param="headers")
    try:
        import mcp as package
    except ImportError as error:
        raise NotSupported(
            f"MCP servers need the package {error.name!r}: pip install 'agentflow-lm[mcp]'"
        ) from None
    if not hasattr(package, "Client"):
        raise NotSupported("MCP servers need version 2 of the package mcp: pip install 'agentflow-lm[mcp]'")
    return McpServer(server, env, cwd, headers, timeout_s)


class McpServer:
    """What ``af.mcp`` returns.

    >>> af.mcp("https://example.com/mcp")
    <MCP server https://example.com/mcp with no tools>
    """

    def __init__(
        self,
        server: str | Sequence[str],
        env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None,
        headers: Mapping[str, str] | None,
        timeout_s: float | None,
    ) -> None:
        self._server = server
        self._env = env
        self._cwd = cwd
        self._headers = headers
        self._timeout_s = timeout_s
        self._stack = AsyncExitStack()
        self._closing = anyio.Event()
        self._tools: list[FunctionTool] | None = None

    @property
    def tools(self) -> list[FunctionTool]:
        """Those of the server, while the block runs. ``BadArgument`` outside of it.

        >>> af.mcp("https://example.com/mcp").tools
        Traceback (most recent call last):
        BadArgument: mcp: https://example.com/mcp is not open: write `async with af.mcp(…) as ...
        """
        if self._tools is None:
            raise BadArgument(
                f"mcp: {self._shown} is not open: write `async with af.mcp(…) as server:`, and use "
                "server.tools inside the block"
            )
        return self._tools

    def __repr__(self) -> str:
        names = ", ".join([str(one.name) for one in self._tools or ()]) or "no tools"
        return f"<MCP server {self._shown} with {names}>"

    @property
    def _shown(self) -> str:
        return self._server if isinstance(self._server, str) else " ".join(self._server)

    async def __aenter__(self) -> McpServer:
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(open_task_group())
            stack.callback(self._closing.set)
            try:
                with anyio.fail_after(self._timeout_s):
                    self._tools = await group.start(self._live)
            except Exception as error:
                cause = first_of(error)
                is_late = isinstance(cause, TimeoutError)
                why = f"it did not answer in {self._timeout_s} s" if is_late else str(cause)
                raise ServerUnreachable(f"the MCP server {self._shown!r} cannot be used: {why}") from cause
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tools = None
        await self._stack.__aexit__(kind, error, trace)

    async def _live(self, *, task_status: TaskStatus[list[FunctionTool]]) -> None:
        """Keeps the client open, in a task of its own: it opens cancel scopes that end in their order."""
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(await self._client(stack))
            task_status.started(await _tools_of(client))
            await self._closing.wait()

    async def _client(self, stack: AsyncExitStack) -> Any:
        from mcp import Client

        if not isinstance(self._server, str):
            from mcp import StdioServerParameters

            command, *args = self._server
            env = None if self._env is None else dict(self._env)
            return Client(
                StdioServerParameters(
                    command=command,
                    args=args,
                    env=env,
                    cwd=None if self._cwd is None else os.fspath(self._cwd),
                )
            )
        if self._headers is None:
            return Client(self._server)
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=None)  # calls have limits of their own
        http = httpx2.AsyncClient(headers=dict(self._headers), timeout=timeout)
        return Client(streamable_http_client(self._server, http_client=await stack.enter_async_context(http)))


async def _tools_of(client: Any) -> list[FunctionTool]:
    found: list[FunctionTool] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for one in page.tools:
            call = partial(_call, client, one.name)
            described = one.description or ""
            found.append(tool(call, name=one.name, description=described, parameters=one.input_schema))
        cursor = page.next_cursor
        if not cursor:
            return found


async def _call(client: Any, name: str, /, **arguments: Any) -> str:
    """The result as text. ``ValueError`` with the server's message if the call failed."""
    result = await client.call_tool(name, arguments)
    text = "\n".join([_text_of(block) for block in result.content])
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise ValueError(text or f"{name} failed")
    return text


def _text_of(block: Any) -> str:
    """A part of a result as text. Of an image or a sound, what it is."""
    match block.type:
        case "text":
            return str(block.text)
        case "resource":
            resource = block.resource
            return str(getattr(resource, "text", None) or f"[{resource.mime_type}: {resource.uri}]")
        case "resource_link":
            return f"[{block.name}: {block.uri}]"
        case kind:
            return f"[{kind}: {block.mime_type}]"
