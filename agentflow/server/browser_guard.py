"""Keeps web pages of other sites away from a server that their visitor can reach.

A browser sends what any page asks it to, to a server on the visitor's own machine too. It tells the page's
origin (RFC 6454); programs tell none. And a page whose own host name is made to resolve to this machine
(DNS rebinding) is known by that name in the Host header.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from agentflow.server.api_routes import refusal_response
from agentflow.server.http_refusal import Refusal

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
        headers = Headers(scope=scope) if scope["type"] != "lifespan" else None
        refusal = None if headers is None else self._refusal(headers)
        if headers is None or refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            answer = JSONResponse({"reason": refusal.message}, status_code=refusal.status)
            await WebSocket(scope, receive, send).send_denial_response(answer)
        else:
            await refusal_response(scope["path"], headers, refusal)(scope, receive, send)

    def _is_known(self, origin: str, host: str) -> bool:
        return "*" in self._origins or origin in self._origins or _netloc(origin) == host

    def _refusal(self, headers: Headers) -> Refusal | None:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if origin is not None and not self._is_known(origin, host):
            text = (
                "pages of other sites may not open sessions or use this server: whoever runs it may allow "
                "their origin (cors_origins)"
            )
            return Refusal(403, "forbidden_origin", text)
        if self._hosts is not None and host and _name_of(host) not in self._hosts:
            text = (
                f"this server is not known as {_name_of(host)[:200]!r}: whoever runs it may add that name "
                "(allowed_hosts)"
            )
            return Refusal(403, "unknown_host", text)
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
