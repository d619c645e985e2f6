"""The gateway as an ASGI application.

::

    /health         200 while a target is up; 503 otherwise; also /health/live and /health/ready
    /metrics        for Prometheus
    /gateway/…      the state of the targets, and draining them; only with the admin key
    /v1/models      the models of all targets; also /api/tags
    other paths     forwarded to a target
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from typing import Any

import anyio
import httpx2
import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from agentflow.protocol.unreadable import UNREADABLE
from agentflow.runtime.task_group import open_task_group
from agentflow.server.errors import ApiError
from agentflow.server.gateway.defaults import GatewayLimits
from agentflow.server.gateway.http_proxy import HttpProxy, raw_path
from agentflow.server.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from agentflow.server.gateway.model_lists import LISTS, ModelLists
from agentflow.server.gateway.target import NotCompatible, Target, logger
from agentflow.server.gateway.target_choice import TargetChoice
from agentflow.server.gateway.websocket_proxy import WebSocketProxy
from agentflow.server.origin_guard import BrowserGuard, KnowsHost, any_host
from agentflow.server.routes import error_response
from agentflow.server.tenants.keys import key_of_headers

ADMIN_PATH = "/gateway/"
_MAX_ADMIN_BYTES = 4_096


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    target: str


class Gateway:
    """The application.

    Args:
        targets: The servers.
        transport: Sends requests to the targets.
        limits: The gateway's limits.
        cache_tokens: The size of a target's cache; None: the size in its metrics, or a default.
        api_key: The key for requesting the health, models and cache sizes of targets.
        admin_key: The key for ``/gateway/`` and the metrics; None: there is no ``/gateway/``.
        origins: The origins whose pages may use the gateway. The CORS headers are the targets'.
        knows_host: The accepted host names.
    """

    def __init__(
        self,
        targets: list[Target],
        transport: httpx2.AsyncBaseTransport,
        *,
        limits: GatewayLimits | None = None,
        cache_tokens: int | None = None,
        api_key: str | None = None,
        admin_key: str | None = None,
        origins: Sequence[str] = (),
        knows_host: KnowsHost = any_host,
    ) -> None:
        self.targets = targets
        self.limits = limits or GatewayLimits()
        self.placement = TargetChoice(targets, check_s=self.limits.check_s)
        self._cache_tokens = cache_tokens
        for target in targets if cache_tokens is not None else ():
            target.cache_tokens = cache_tokens or target.cache_tokens
        self._transport = transport
        self._api_key, self._admin_key = api_key, admin_key
        self._name = f"agentflow-{secrets.token_hex(8)}"
        via = f"1.1 {self._name}"
        self.proxy = HttpProxy(self.placement, transport, self.limits, via)
        self._websockets = WebSocketProxy(self.placement, via)
        self._lists = ModelLists(targets, transport, via)
        self.metrics = GatewayMetrics(targets, self.placement, self.proxy)
        self._guarded: ASGIApp = BrowserGuard(self._answer, origins=origins, knows_host=knows_host)
        self._running = 0
        self._none_runs = anyio.Event()
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request or a websocket."""
        self._running += 1
        try:
            await self._guarded(scope, receive, send)
        finally:
            self._running -= 1
            if not self._running:
                self._none_runs.set()
                self._none_runs = anyio.Event()

    async def aclose(self) -> None:
        """Closes the connections to the targets."""
        await self._transport.aclose()

    async def until_idle(self) -> None:
        """Waits until no request and no websocket is being served."""
        while self._running:
            await self._none_runs.wait()

    # Health

    async def check_all(self, *, is_first: bool = False) -> dict[Target, NotCompatible]:
        """Checks all targets. Returns the errors of targets that do not have the API. ``is_first``: the check
        at the start."""
        wrong: dict[Target, NotCompatible] = {}

        async def check(target: Target) -> None:
            was_closed = target.circuit.status == "closed"
            try:
                await target.check(self._transport, self._api_key)
            except NotCompatible as error:
                wrong[target] = error
            is_closed = target.circuit.status == "closed"
            if is_closed and (is_first or not was_closed) and self._cache_tokens is None:
                await target.read_cache_size(self._transport, self._api_key)
            if is_closed and not was_closed:
                self.placement.back(target)
            elif was_closed and not is_closed and not is_first:
                self.placement.lost(target, target.why_down)

        async with open_task_group() as group:
            for target in self.targets:
                group.start_soon(check, target)
        return wrong

    async def watch(self) -> None:
        """Checks the targets every ``check_s``, until it is cancelled."""
        while True:
            await anyio.sleep(self.limits.check_s)  # noqa: TID251  (the interval)
            await self.check_all()

    # Requests

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        headers = Headers(scope=scope)
        if self._name in headers.get("via", ""):
            text = "the request came back to the gateway: --to must be the address of another server"
            await self._refuse(scope, receive, send, ApiError(508, "loop", text))
        elif "/../" in f"{path}/":  # would leave the path of a target's address
            await self._refuse(scope, receive, send, ApiError(400, "invalid_request", "the path has '..'"))
        elif not self._has_address(scope):
            text = "the path of the URL is invalid: it must begin with '/' and have only ASCII characters"
            await self._refuse(scope, receive, send, ApiError(400, "invalid_request", text))
        elif scope["type"] == "websocket":
            if self.is_draining:
                await WebSocket(scope, receive, send).send_denial_response(Response(status_code=503))
                return
            await self._websockets(scope, receive, send)
        elif path in ("/health", "/health/ready", "/health/live"):
            is_up = path == "/health/live" or (
                not self.is_draining and any(target.is_up for target in self.targets)
            )
            state = {"status": "ready" if is_up else "unready"}
            await JSONResponse(state, 200 if is_up else 503)(scope, receive, send)
        elif path == "/metrics" or path.startswith(ADMIN_PATH):
            await (await self._administer(Request(scope, receive)))(scope, receive, send)
        elif self.is_draining:
            text = "the gateway is shutting down: try again in a moment"
            await self._refuse(scope, receive, send, ApiError(503, "unready", text, retry_after_s=1.0))
        elif path in LISTS and scope["method"] == "GET":
            await self._lists(scope, receive, send)
        else:
            await self.proxy(scope, receive, send)

    def _has_address(self, scope: Scope) -> bool:
        """Whether a request to a target can have this path: ``*``, for example, is invalid."""
        try:
            self.targets[0].url(raw_path(scope), scope.get("query_string", b""))
        except (httpx2.InvalidURL, UnicodeError):
            return False
        return True

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
        if scope["type"] == "websocket":
            response = Response(error.message, error.status, error.headers, "text/plain")
            await WebSocket(scope, receive, send).send_denial_response(response)
            return
        await error_response(scope["path"], Headers(scope=scope), error, error.headers)(scope, receive, send)

    async def _administer(self, request: Request) -> Response:
        path, headers = request.url.path, request.headers
        try:
            if self._admin_key is not None:
                given = (key_of_headers(headers) or "").encode()
                if not hmac.compare_digest(given, self._admin_key.encode()):
                    raise ApiError(401, "invalid_api_key", "this needs the admin key of the gateway")
            elif path != "/metrics":
                raise ApiError(404, "not_found", f"{ADMIN_PATH} needs an admin key (--admin-key)")
            if path == "/metrics":
                return Response(self.metrics.text(), media_type=CONTENT_TYPE)
            return await self._administered(request)
        except ApiError as error:
            return error_response(path, headers, error, error.headers)

    async def _administered(self, request: Request) -> Response:
        action = request.url.path.removeprefix(ADMIN_PATH)
        if request.method == "GET" and action == "targets":
            return JSONResponse({"targets": [_shown(target) for target in self.targets]})
        if request.method == "POST" and action in ("drain", "resume"):
            try:
                named = msgspec.json.decode(await _small_body(request), type=_Named).target
            except UNREADABLE as error:
                text = 'send {"target": "http://…"}, the address of a target'
                raise ApiError(400, "invalid_request", text) from error
            for target in self.targets:
                if named.rstrip("/").removesuffix("/v1") == target.base:
                    target.is_draining = action == "drain"
                    logger.warning("%s: %s", target.base, action)
                    return JSONResponse(_shown(target))
            raise ApiError(404, "unknown_target", "no target has this address", "target")
        text = f"{ADMIN_PATH} has GET targets, POST drain and POST resume"
        raise ApiError(404, "not_found", text)


async def _small_body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_ADMIN_BYTES:
            raise ApiError(413, "request_too_large", f"the body has more than {_MAX_ADMIN_BYTES:,} bytes")
    return body


def _shown(target: Target) -> dict[str, Any]:
    state = "draining" if target.is_draining else "up" if target.circuit.is_ready else "down"
    return {
        "target": target.base,
        "state": state,
        "why": target.why_down,
        "models": None if target.models is None else sorted(target.models),
        "cache_tokens": target.cache_tokens,
        "requests": target.num_running,
        "websockets": target.num_websockets,
    }
