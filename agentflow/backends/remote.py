"""A backend on a server: where it is, and how a websocket to it is opened and greeted."""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

import anyio
from websockets.exceptions import InvalidURI
from websockets.uri import WebSocketURI, parse_uri

from agentflow.backends.remote_connection import RemoteConnection
from agentflow.backends.websocket import WebSocket, WebSocketEnded, open_websocket, shown_url
from agentflow.errors import BadArgument, ProtocolError, ServerUnreachable
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.protocol.wire import (
    SESSION_PATH,
    VERSION,
    Hello,
    Refused,
    Resume,
    Welcome,
    encode,
    frame_name,
    server_frames,
)
from agentflow.runtime.task_group import open_task_group

# What goes through a header as it is.
_API_KEY = re.compile(r"[!-~]([ -~]*[!-~])?")


class Remote:
    """A server; what ``af.session("ws://127.0.0.1:8410")`` uses.

    ``url``: ``ws://`` or ``wss://`` (``http://`` and ``https://`` mean the same), the path
    ``/v1/session`` unless it names one. ``api_key`` goes into the Authorization header. ``model``: by
    its name there; None: the server's first one.
    ``encoding``: of the frames; ``json`` to read them in a network trace. ``open_timeout_s``: for
    the first answer. ``keepalive_s``: after so much silence the connection is probed, and after as
    much again taken up anew. ``ssl_context``: for ``wss``, in place of the default.

    >>> server = af.Remote("ws://127.0.0.1:8410", encoding="json", open_timeout_s=2.5)
    >>> async with af.session(backend=server) as flow:
    ...     grade = await flow.run(judge, essay)
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        encoding: Literal["msgpack", "json"] = "msgpack",
        open_timeout_s: float = 10.0,
        keepalive_s: float = 20.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        if encoding not in ("msgpack", "json"):
            raise BadArgument(f"Remote: encoding must be 'msgpack' or 'json', not {encoding!r}")
        if api_key is not None and not (isinstance(api_key, str) and _API_KEY.fullmatch(api_key)):
            raise BadArgument("Remote: api_key must be printable ASCII, and not empty")
        self.uri = _parsed(url)
        self.url = shown_url(self.uri)
        self.model = model
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.binary = encoding == "msgpack"
        self.open_timeout_s = open_timeout_s
        self.keepalive_s = keepalive_s
        self.ssl_context = ssl_context

    def __repr__(self) -> str:
        return f"Remote({self.url!r})"

    def connect(self, deliver: Deliver, lost: Lost) -> AbstractAsyncContextManager[Connection]:
        """Opens a session on the server. ``ServerUnreachable`` when nobody answers; what the server
        refuses with, when it does: ``NotAuthorized`` for a wrong key, ``Overloaded``. For the session."""
        return self._connect(deliver, lost)

    @asynccontextmanager
    async def _connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        websocket, welcome = await self.open(None)
        connection = RemoteConnection(self.url, self.open, websocket, welcome, deliver, lost)
        async with open_task_group() as group:
            group.start_soon(connection.run)
            try:
                yield connection
            finally:
                await connection.leave()

    async def open(self, resume: Resume | None) -> tuple[WebSocket, Welcome]:
        """A websocket with the greeting done. For the connection."""
        try:
            with anyio.fail_after(self.open_timeout_s):
                websocket = await open_websocket(
                    self.uri,
                    headers=self.headers,
                    ssl_context=self.ssl_context,
                    binary=self.binary,
                    keepalive_s=self.keepalive_s,
                )
                try:
                    return websocket, await self._greet(websocket, resume)
                except BaseException:
                    await websocket.aclose()
                    raise
        except TimeoutError:
            raise ServerUnreachable(
                f"{self.url} did not answer within {self.open_timeout_s} s: "
                "it may be overloaded or still starting"
            ) from None
        except WebSocketEnded as error:
            raise ServerUnreachable(f"{self.url} hung up before it answered: {error}") from error

    async def _greet(self, websocket: WebSocket, resume: Resume | None) -> Welcome:
        await websocket.send_now(encode(Hello(VERSION, resume, self.model), binary=self.binary))
        match server_frames().decode(await websocket.receive()):
            case Welcome() as welcome if welcome.version == VERSION:
                return welcome
            case Welcome(version=version):
                raise ProtocolError(
                    f"the server at {self.url} speaks version {version} of the protocol and this client "
                    f"version {VERSION}: install the same agentflow on both sides"
                )
            case Refused(error=error):
                raise error.to_exception()
            case frame:
                raise ProtocolError(
                    f"expected a welcome frame from {self.url}, and a {frame_name(frame)} frame came"
                )


def _parsed(url: str) -> WebSocketURI:
    if not isinstance(url, str):
        raise BadArgument(f"Remote: the url must be a string, not {url!r:.200}")
    try:
        parts = urlsplit(url)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        path = parts.path if parts.path not in ("", "/") else SESSION_PATH
        return parse_uri(urlunsplit((scheme, parts.netloc, path, parts.query, parts.fragment)))
    except (InvalidURI, ValueError) as error:
        raise BadArgument(
            f"{url!r} is no server's url ({error}): it looks like ws://127.0.0.1:8410"
        ) from None
