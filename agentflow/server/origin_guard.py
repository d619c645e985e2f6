"""Protects a server from web pages of other sites, whose visitors can reach it.

A browser sends the requests of any page, also to servers on the visitor's own machine or network. It adds the
page's origin (RFC 6454), which other programs do not. A page may also make its own host name resolve to the
server's address (DNS rebinding). Then its origin is the server's, and only the Host header differs. So a
server without keys accepts only host names that a page cannot have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from agentflow.server.addresses import is_loopback, parse_address
from agentflow.server.errors import ApiError
from agentflow.server.routes import error_response

# Domains that are not in the public DNS (RFC 6762, RFC 8375, RFC 6761, and ICANN's for private use).
PRIVATE_DOMAINS = ("local", "home.arpa", "localhost", "internal")

KnowsHost = Callable[[str], bool]
"""Whether the server accepts a host name, given in lower case and without a port."""


def any_host(name: str) -> bool:
    """Accepts every name: for a server with keys, which pages do not have."""
    return True


def accept_hosts(names: Sequence[str]) -> KnowsHost:
    """Accepts these names. One loopback name allows all loopback names."""
    known = frozenset(name.lower() for name in names)
    has_loopback = any(map(is_loopback, known))
    return lambda name: name in known or (has_loopback and is_loopback(name))


def private_host(name: str) -> bool:
    """Accepts addresses, and names that the public DNS cannot resolve: without a dot, or in a private domain.

    >>> private_host("192.0.2.1"), private_host("gpu-box.local"), private_host("pages.example")
    (True, True, False)
    """
    name = name.removesuffix(".")
    return (
        parse_address(name) is not None
        or "." not in name
        or name.endswith(tuple(f".{domain}" for domain in PRIVATE_DOMAINS))
    )


class BrowserGuard:
    """Rejects (403) requests of pages whose origin is neither the server's own nor in ``origins``, and
    requests to a host name that ``knows_host`` does not accept."""

    def __init__(
        self, app: ASGIApp, *, origins: Sequence[str] = (), knows_host: KnowsHost = any_host
    ) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._knows_host = knows_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] != "lifespan" else None
        error = None if headers is None else self._error(headers)
        if headers is None or error is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            answer = JSONResponse({"reason": error.message}, status_code=error.status)
            await WebSocket(scope, receive, send).send_denial_response(answer)
        else:
            await error_response(scope["path"], headers, error)(scope, receive, send)

    def _error(self, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if origin is not None and ("*" in self._origins or origin in self._origins):
            return None  # an allowed page; its host name is not checked
        if origin is not None and _netloc(origin) != host:
            text = (
                "pages of other origins may not use this server; its operator can allow an origin "
                "(cors_origins)"
            )
            return ApiError(403, "forbidden_origin", text)
        if host and not self._knows_host(_host_name(host)):
            text = (
                f"the host name {_host_name(host)[:200]!r} is not accepted; the server's operator can add it "
                "(allowed_hosts)"
            )
            return ApiError(403, "unknown_host", text)
        return None


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """The host without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return host
