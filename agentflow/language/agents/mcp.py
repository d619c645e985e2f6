"""MCP servers by the official package ``mcp`` (the extra ``mcp``), imported when it is needed: their tools,
prompts and resources.

A connection lives in a task of the server's task group, because its cancel scopes must end in their order.
When it is lost, the calls that wait for it fail, and the next call opens another one.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup, TaskStatus

from agentflow.errors import BadArgument, NotSupported, RunFailed, ServerLost, ServerUnreachable
from agentflow.language.expressions import Appendable, ImageExpression, RoleExpression, Sequence_
from agentflow.language.media import image
from agentflow.language.typed.json_form import json_text
from agentflow.language.typed.tools import FunctionTool, check_timeout, tool
from agentflow.runtime.task_group import first_error, open_task_group

if TYPE_CHECKING:
    from mcp.types import Prompt, Resource

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
_LOST_CODES = frozenset([-32000, -32001, -32600])
"""The codes of a lost connection, and of a session that a restarted server does not know."""


def mcp(
    server: str | Sequence[str],
    *,
    prefix: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None = CONNECT_TIMEOUT_S,
) -> McpServer:
    """An MCP server, whose ``tools`` are for ``af.act``. Enter it with ``async with``, and leave it in the
    same task.

    If the connection is lost, or the server ends, the calls that wait for it fail, and ``af.act`` reports
    this to the model. The next call connects again, or starts the command again.

    Args:
        server: A list of a command and its arguments, which starts the server (stdio); or the URL of a
            running one (streamable HTTP).
        prefix: Put before the names of its tools, for servers whose tools have the same names.
        env: Added to a small default environment of the command.
        cwd: The folder in which the command runs.
        headers: Sent with each request to the URL.
        timeout_s: The time to connect and to list the tools.

    Returns:
        The server.

    Raises:
        NotSupported: The package ``mcp`` is missing.
        ServerUnreachable: On entering, with the reason as its cause.

    ::

        async with af.mcp(["uvx", "mcp-server-git"]) as git, flow.state() as s:
            s += af.user("What changed in the last commit?")
            print(await af.act(s, tools=[*git.tools, weather]))

    >>> af.mcp(["uvx", "mcp-server-git"])
    <MCP server uvx mcp-server-git with no tools>
    """
    check_timeout("mcp", timeout_s)
    if not isinstance(prefix, str):
        raise BadArgument(f"mcp: prefix must be a string, not {prefix!r}", param="prefix")
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
    return McpServer(server, prefix, env, cwd, headers, timeout_s)


class McpServer:
    """An MCP server, which ``af.mcp`` returns. The arguments are as in ``af.mcp``.

    ::

        print(await docs.resources(), await docs.prompts())
        s += af.user(await docs.read_text("file:///a.md"), af.image(await docs.read_bytes("file:///a.png")))
        s += await docs.prompt("review", language="Python")

    >>> af.mcp("https://example.com/mcp")
    <MCP server https://example.com/mcp with no tools>
    """

    def __init__(
        self,
        server: str | Sequence[str],
        prefix: str,
        env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None,
        headers: Mapping[str, str] | None,
        timeout_s: float | None,
    ) -> None:
        self._server = server
        self._prefix = prefix
        self._env = env
        self._cwd = cwd
        self._headers = headers
        self._timeout_s = timeout_s
        self._stack = AsyncExitStack()
        self._group: TaskGroup | None = None  # while the block runs
        self._connecting = anyio.Lock()
        self._connection: _Connection | None = None
        self._num_failures = 0
        self._failure: Exception | None = None  # of the last attempt
        self._tools: list[FunctionTool] = []

    @property
    def tools(self) -> list[FunctionTool]:
        """The tools of the server, while the block runs. ``BadArgument`` outside of it.

        >>> af.mcp("https://example.com/mcp").tools
        Traceback (most recent call last):
        BadArgument: mcp: https://example.com/mcp is not open: write `async with af.mcp(…) as ...
        """
        self._check_open()
        return self._tools

    async def resources(self) -> list[Resource]:
        """The resources of the server, in the types of the package ``mcp``.

        Returns:
            Such as ``mcp.types.Resource(uri="file:///notes.txt", name="notes", …)``.

        Raises:
            ServerUnreachable: The server cannot be reached.
            ServerLost: The connection was lost during the request.
            RunFailed: The server answered with an error.
        """
        found: list[Resource] = await self._asked(partial(_listed, "resources"))
        return found

    async def read_text(self, uri: str) -> str:
        """The text of a resource.

        Args:
            uri: The URI of the resource, one of ``resources()`` or another that the server knows.

        Returns:
            The text; of several contents, all of them with a line break between. Binary contents are
            decoded from UTF-8.

        Raises:
            ServerUnreachable: The server cannot be reached.
            ServerLost: The connection was lost during the request.
            RunFailed: The server has no such resource, or it is not a text.
        """
        contents = await self._read(uri)
        try:
            return "\n".join([content.decode() for content in contents])
        except UnicodeDecodeError as error:
            raise RunFailed(f"the resource {uri!r} is not a text: use read_bytes") from error

    async def read_bytes(self, uri: str) -> bytes:
        """The bytes of a resource, such as an image. Arguments and errors as for ``read_text``."""
        return b"".join(await self._read(uri))

    async def prompts(self) -> list[Prompt]:
        """The prompts of the server, in the types of the package ``mcp``.

        Returns:
            Such as ``mcp.types.Prompt(name="review", arguments=[…])``.

        Raises:
            ServerUnreachable: The server cannot be reached.
            ServerLost: The connection was lost during the request.
            RunFailed: The server answered with an error.
        """
        found: list[Prompt] = await self._asked(partial(_listed, "prompts"))
        return found

    async def prompt(self, name: str, /, **arguments: str) -> Sequence_:
        """The turns of a prompt, which a state can append.

        Args:
            name: The name of the prompt, one of ``prompts()``.
            arguments: The arguments of the prompt.

        Returns:
            A turn of the user or the assistant for each message.

        Raises:
            ServerUnreachable: The server cannot be reached.
            ServerLost: The connection was lost during the request.
            RunFailed: The server has no such prompt, or rejects the arguments.
        """
        found = await self._asked(lambda client: client.get_prompt(name, arguments))
        return Sequence_(
            tuple([RoleExpression(one.role, (_read_part(one.content),)) for one in found.messages])
        )

    def __repr__(self) -> str:
        names = ", ".join([str(one.name) for one in self._tools]) or "no tools"
        return f"<MCP server {self._shown} with {names}>"

    @property
    def _shown(self) -> str:
        return self._server if isinstance(self._server, str) else " ".join(self._server)

    async def __aenter__(self) -> McpServer:
        async with AsyncExitStack() as stack:
            self._group = await stack.enter_async_context(open_task_group())
            stack.callback(self._close)
            async with self._client():
                pass
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def _close(self) -> None:
        self._tools = []
        self._group = None
        if self._connection is not None:
            self._connection.closing.set()

    def _check_open(self) -> TaskGroup:
        if self._group is None:
            raise BadArgument(
                f"mcp: {self._shown} is not open: write `async with af.mcp(…) as server:`, and use "
                "the server inside the block"
            )
        return self._group

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        """A client that is connected. ``ServerUnreachable`` if there is none. If the block shows that the
        connection is lost, it raises ``ServerLost``, and the next block gets another connection."""
        from mcp import MCPError

        connection = await self._opened()
        connection.num_users += 1
        try:
            yield connection.client
        except MCPError as error:
            if error.code not in _LOST_CODES:
                raise
            self._forget(connection)
            raise ServerLost(
                f"the connection to the MCP server {self._shown!r} was lost ({error}); the next call "
                "connects again"
            ) from error
        finally:
            connection.num_users -= 1
            if connection is not self._connection and not connection.num_users:
                connection.closing.set()

    async def _opened(self) -> _Connection:
        """The connection, opened if there is none. Calls that wait for an attempt share its failure."""
        group, number = self._check_open(), self._num_failures
        async with self._connecting:
            if self._connection is not None:
                return self._connection
            if self._num_failures == number:
                try:
                    with anyio.fail_after(self._timeout_s):
                        self._connection = await group.start(self._connect)
                    return self._connection
                except Exception as error:
                    self._failure = first_error(error)
                    self._num_failures += 1
            is_late = isinstance(self._failure, TimeoutError)
            why = f"it did not answer in {self._timeout_s} s" if is_late else str(self._failure)
            raise ServerUnreachable(
                f"the MCP server {self._shown!r} cannot be used: {why}"
            ) from self._failure

    def _forget(self, connection: _Connection) -> None:
        if self._connection is connection:
            self._connection = None

    async def _connect(self, *, task_status: TaskStatus[_Connection]) -> None:
        """Keeps a connection open until it is closed or lost."""
        connection: _Connection | None = None
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._made_client(stack))
                self._tools = await self._read_tools(client)
                connection = _Connection(client)
                task_status.started(connection)
                await connection.closing.wait()
        except Exception as error:
            if connection is None:
                raise
            logger.info("the connection to the MCP server %r was lost: %s", self._shown, first_error(error))
        finally:
            if connection is not None:
                self._forget(connection)

    async def _made_client(self, stack: AsyncExitStack) -> Any:
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

        timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=None)  # calls have separate limits
        http = httpx2.AsyncClient(headers=dict(self._headers), timeout=timeout)
        return Client(streamable_http_client(self._server, http_client=await stack.enter_async_context(http)))

    async def _read_tools(self, client: Any) -> list[FunctionTool]:
        return [
            tool(
                partial(self._call, one.name),
                name=self._prefix + one.name,
                description=one.description or "",
                parameters=one.input_schema,
            )
            for one in await _listed("tools", client)
        ]

    async def _call(self, name: str, /, **arguments: Any) -> str | list[str | ImageExpression]:
        """The result of a tool: a text, or a list with its images. ``ValueError`` with the server's message
        if the call failed."""
        async with self._client() as client:
            result = await client.call_tool(name, arguments)
        texts = [_read_text(block) for block in result.content]
        found = {
            number: shown for number, block in enumerate(result.content) if (shown := _read_image(block))
        }
        value = result.structured_content
        if value is not None and not _says(texts, value):
            texts.append(json_text(value))
        if result.is_error:
            raise ValueError("\n".join(texts) or f"{name} failed")
        if not found:
            return "\n".join(texts)
        parts: list[str | ImageExpression] = []
        for number, text in enumerate(texts):
            parts += ["\n"] if number else []
            parts.append(found.get(number, text))
        return parts

    async def _read(self, uri: str) -> list[bytes]:
        found = await self._asked(lambda client: client.read_resource(uri))
        return [
            base64.b64decode(one.blob) if hasattr(one, "blob") else one.text.encode()
            for one in found.contents
        ]

    async def _asked(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer to a request of the program."""
        from mcp import MCPError

        try:
            async with self._client() as client:
                return await ask(client)
        except MCPError as error:
            raise RunFailed(f"the MCP server {self._shown!r} failed: {error}") from error


class _Connection:
    """A client that is open. ``num_users``: the calls that use it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.closing = anyio.Event()
        self.num_users = 0


async def _listed(what: str, client: Any) -> list[Any]:
    """All tools, prompts or resources of the server."""
    if getattr(client.server_capabilities, what) is None:
        return []
    found: list[Any] = []
    cursor = None
    while True:
        page = await getattr(client, f"list_{what}")(cursor=cursor)
        found += getattr(page, what)
        cursor = page.next_cursor
        if not cursor:
            return found


def _says(texts: Sequence[str], value: Any) -> bool:
    """Whether the texts of a result contain its structured value: as JSON, item by item, or without the
    ``{"result": …}`` that servers put around values that are no objects.

    >>> [_says(["12"], {"result": 12}), _says(["a", "b"], {"result": ["a", "b"]}), _says(["12 degrees"], 12)]
    [True, True, False]
    """
    if len(texts) == 1 and _is_written(texts[0], value):
        return True
    if isinstance(value, list) and len(value) == len(texts):
        return all(_is_written(text, item) for text, item in zip(texts, value, strict=True))
    return isinstance(value, dict) and value.keys() == {"result"} and _says(texts, value["result"])


def _is_written(text: str, value: Any) -> bool:
    try:
        return bool(text == value or json.loads(text) == value)
    except (ValueError, RecursionError):
        return False


def _read_part(block: Any) -> Appendable:
    """A part of a prompt."""
    return image(base64.b64decode(block.data)) if block.type == "image" else _read_text(block)


def _read_image(block: Any) -> ImageExpression | None:
    """The image of a part of a result; None for other parts, and for images that models cannot be shown."""
    data = block.data if block.type == "image" else None
    if block.type == "resource" and str(block.resource.mime_type).startswith("image/"):
        data = getattr(block.resource, "blob", None)
    if data is None:
        return None
    try:
        return image(base64.b64decode(data))
    except ValueError:  # also ``BadArgument``
        return None


def _read_text(block: Any) -> str:
    """A part of a result as text; for an image or a sound, its type."""
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
