"""Keeps web pages of other sites away from a server that their visitor can reach.

A browser sends what any page asks it to, to a server on the visitor's own machine or network too. It tells
the page's origin (RFC 6454); programs tell none. A page may also have its own host name resolve to the
server's address (DNS rebinding): then its origin is the server's, and only the name in the Host header shows
it. So a server that wants no key answers to names alone that a page cannot have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from agentflow.server.http.addresses import address_of, is_loopback
from agentflow.server.http.errors import ApiError
from agentflow.server.http.routes import error_response

# Top-level domains that the public DNS does not have (RFC 6762, RFC 8375, RFC 6761, and ICANN's for private
# use).
PRIVATE_DOMAINS = ("local", "home.arpa", "localhost", "internal")

KnowsHost = Callable[[str], bool]
"""Whether the server answers to a host name, which is in lower case and without a port."""


def any_host(name: str) -> bool:
    """For a server whose keys no page has."""
    return True


def one_of(names: Sequence[str]) -> KnowsHost:
    """These names. One for this machine stands for all of them."""
    known = frozenset(name.lower() for name in names)
    has_loopback = any(map(is_loopback, known))
    return lambda name: name in known or (has_loopback and is_loopback(name))


def private_host(name: str) -> bool:
    """An address, or a name that no public name server can resolve: without a dot, or in a private domain.

    >>> private_host("192.0.2.1"), private_host("gpu-box.local"), private_host("pages.example")
    (True, True, False)
    """
    name = name.removesuffix(".")
    return (
        address_of(name) is not None
        or "." not in name
        or name.endswith(tuple(f".{domain}" for domain in PRIVATE_DOMAINS))
    )


class BrowserGuard:
    """Refuses (403) what comes from a page of another origin than the server's own or ``origins``, and what
    is addressed to a name that ``knows_host`` refuses."""

    def __init__(
        self, app: ASGIApp, *, origins: Sequence[str] = (), knows_host: KnowsHost = any_host
    ) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._knows_host = knows_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] != "lifespan" else None
        refusal = None if headers is None else self._refusal(headers)
        if headers is None or refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            answer = JSONResponse({"reason": refusal.message}, status_code=refusal.status)
            await WebSocket(scope, receive, send).send_denial_response(answer)
        else:
            await error_response(scope["path"], headers, refusal)(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if origin is not None and ("*" in self._origins or origin in self._origins):
            return None  # not the origin of a page that has taken the server's address
        if origin is not None and _netloc(origin) != host:
            text = (
                "pages of other sites may not open sessions or use this server: whoever runs it may allow "
                "their origin (cors_origins)"
            )
            return ApiError(403, "forbidden_origin", text)
        if host and not self._knows_host(_name_of(host)):
            text = (
                f"this server is not known as {_name_of(host)[:200]!r}: whoever runs it may add that name "
                "(allowed_hosts)"
            )
            return ApiError(403, "unknown_host", text)
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
