"""Keeps web pages of other sites away from a server that their visitor can reach.

A browser sends what any page asks it to, to a server on the visitor's own machine too. It tells the page's
origin (RFC 6454); programs tell none. And a page whose own host name is made to resolve to this machine
(DNS rebinding) is known by that name in the Host header.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class BrowserGuard:
    """Refuses (403) what comes from a page of another origin than the server's own or ``origins``, and what
    is addressed to another name than ``hosts`` (None: any)."""

    def __init__(
        self, app: ASGIApp, *, origins: Sequence[str] = (), hosts: Sequence[str] | None = None
    ) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = None if scope["type"] == "lifespan" else self._refusal(Headers(scope=scope))
        if reason is None:
            await self._app(scope, receive, send)
            return
        answer = _answer(reason)
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(answer)
        else:
            await answer(scope, receive, send)

    def _is_known(self, origin: str, host: str) -> bool:
        return "*" in self._origins or origin in self._origins or _netloc(origin) == host

    def _refusal(self, headers: Headers) -> str | None:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if origin is not None and not self._is_known(origin, host):
            return "pages of other sites may not use this server"
        if self._hosts is not None and host and _name_of(host) not in self._hosts:
            return f"this server is not known as {_name_of(host)[:200]!r}"
        return None


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _name_of(host: str) -> str:
    """Without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return host


def _answer(reason: str) -> Response:
    error = {"message": reason, "type": "permission_error", "param": None, "code": "forbidden_origin"}
    return Response(msgspec.json.encode({"error": error}), status_code=403, media_type="application/json")
