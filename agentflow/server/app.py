"""The server as an ASGI application: the websocket of sessions, the HTTP APIs, health checks, metrics.

::

    /v1/session     websocket, docs/reference/protocol.md
    /v1/…           OpenAI's and Anthropic's APIs, programs, tickets of sessions, routes.py
    /api/…          Ollama's API, routes.py
    /generate       SGLang's API, routes.py
    /ui/            the page, ui/pages.py
    /               redirects browsers to the page; the endpoints as JSON, or Ollama's text
    /health/live    200 while the process answers
    /health/ready   200 when requests are accepted and all engines answer; 503 otherwise
    /health         the status of /health/ready without a body; also /ping and /health_generate
    /version        the server's version
    /metrics        for Prometheus, docs/reference/metrics.md
    /openapi.json   the requests and answers of the HTTP APIs

The health checks need no key. With a key that may see the metrics, ``/health/ready`` also lists the models,
or gives details if the server is not ready.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from agentflow.engine.tenant import ANONYMOUS
from agentflow.errors import NotAuthorized, Overloaded, RateLimited
from agentflow.protocol.wire import SESSION_PARAM, SESSION_PATH, SUBPROTOCOL
from agentflow.runtime.generator import SessionModels
from agentflow.runtime.task_group import open_task_group
from agentflow.server.completion.streaming import RELAXED, VIOLATED
from agentflow.server.config.limits import HttpLimits, ServerLimits
from agentflow.server.errors import ENDING, ApiError, make_api_error, not_ready
from agentflow.server.http.call import client_address
from agentflow.server.http.forwarded import answer_forwarded
from agentflow.server.metrics.metrics import CONTENT_TYPE, ServerMetrics
from agentflow.server.models.models import OpenModels
from agentflow.server.ollama.models import MANAGEMENT, WHY_NOT_MANAGED
from agentflow.server.openapi import openapi
from agentflow.server.origin_guard import BrowserGuard, accept_hosts, any_host, private_host
from agentflow.server.programs.programs import open_programs
from agentflow.server.programs.shared_values import SharedValues
from agentflow.server.responses.background import open_background_runs
from agentflow.server.responses.keeping import LocalResponses, Responses
from agentflow.server.responses.shared_store import SharedResponses
from agentflow.server.responses.store import ResponseStore
from agentflow.server.routes import ROUTES, api_routes, error_response
from agentflow.server.service import Service
from agentflow.server.sglang.models import FLUSH, WHY_NOT_FLUSHED
from agentflow.server.stores.entries import SharedEntries
from agentflow.server.stores.fronts import Fronts, open_fronts
from agentflow.server.stores.shared import SharedStore
from agentflow.server.tenants.keys import Tenants, key_of_headers
from agentflow.server.tenants.limit_headers import ANY_LIMITS, anthropic_limit_headers, openai_limit_headers
from agentflow.server.tenants.tickets import find_ticket
from agentflow.server.ui.pages import page_routes
from agentflow.server.websocket.connection import WsSession
from agentflow.server.websocket.sessions import open_sessions, session_front
from agentflow.version import __version__

ENDPOINTS = (
    *[f"{route.method} {route.path.replace(':path', '')}" for route in ROUTES],
    f"WebSocket {SESSION_PATH}",
    *[f"GET {path}" for path in ("/health", "/metrics", "/openapi.json", "/version")],
)
# Headers of answers that pages of other origins may read.
EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "retry-after",
    "openai-processing-ms",
    RELAXED,
    VIOLATED,
    *[name.decode() for name in (*openai_limit_headers(ANY_LIMITS), *anthropic_limit_headers(ANY_LIMITS))],
)
# An engine answers between two steps, and a long prefill is one step.
STATS_TIMEOUT_S = 5.0


async def live(request: Request) -> JSONResponse:
    """Returns 200 while the process answers."""
    return JSONResponse({"status": "live"})


async def ready(request: Request) -> JSONResponse:
    """Returns 200 if every engine answers and another session can be opened."""
    service: Service | None = request.app.state.service
    if service is None or service.is_draining:
        return unready(ENDING)
    shows_all = _may_see_all(request)
    for model in service.models:
        try:
            with anyio.fail_after(STATS_TIMEOUT_S):
                await model.generator(ANONYMOUS).stats()
        except Exception as error:  # any error means that the engine cannot serve
            is_late = isinstance(error, TimeoutError)
            why = f"has not answered for {STATS_TIMEOUT_S} s" if is_late else f"does not answer: {error}"
            return unready(f"the engine of {model.name} {why}" if shows_all else "an engine does not answer")
    num_sessions = len(service.sessions)
    if num_sessions >= service.limits.max_sessions:
        return unready(
            f"{num_sessions} sessions are open, which is the limit"
            if shows_all
            else "the limit of open sessions is reached"
        )
    answer: dict[str, Any] = {"status": "ready"}
    if shows_all:
        answer |= {"models": [model.name for model in service.models], "sessions": num_sessions}
    return JSONResponse(answer)


async def healthy(request: Request) -> Response:
    """Returns the status of ``ready`` without a body, as vLLM and SGLang do."""
    return Response(status_code=(await ready(request)).status_code)


async def show_version(request: Request) -> JSONResponse:
    """Returns the version of the server."""
    return JSONResponse({"version": __version__})


async def show_root(request: Request) -> Response:
    """Redirects browsers to the page, and lists the endpoints for clients that accept JSON. Other clients get
    the text by which clients of Ollama recognise a server, and a link to the OpenAPI document."""
    accepted, headers = request.headers.get("accept", ""), {"vary": "accept"}
    if request.app.state.has_page and "text/html" in accepted:
        return RedirectResponse("/ui/", status_code=303, headers=headers)
    if "application/json" in accepted:
        shown = {"server": "agentflow", "version": __version__, "endpoints": ENDPOINTS}
        return JSONResponse(shown, headers=headers)
    headers["link"] = '</openapi.json>; rel="service-desc"'
    return PlainTextResponse("Ollama is running", headers=headers)


def _may_see_all(request: Request) -> bool:
    """Whether the request has a key that may see the metrics, or the server needs no key."""
    tenants: Tenants = request.app.state.tenants
    try:
        return tenants.of_request(request.headers, client_address(request.scope)).sees_metrics
    except (NotAuthorized, RateLimited):
        return False


def unready(reason: str) -> JSONResponse:
    """The response of a server that is not ready: 503 with the reason."""
    error = not_ready()
    return JSONResponse(
        {"status": "unready", "reason": reason}, status_code=error.status, headers=error.headers
    )


@dataclass(frozen=True, slots=True)
class Access:
    """Access to the server."""

    tenants: Tenants = field(default_factory=Tenants)
    cors_origins: tuple[str, ...] = ()  # other origins whose pages may use the server
    # Accepted host names. None: any; on a server without keys, only names that the public DNS cannot resolve.
    allowed_hosts: tuple[str, ...] | None = None
    logs_prompts: bool = False  # log prompts and answers
    has_page: bool = True  # serve the page at ``/ui``


def create_app(
    open_models: OpenModels,
    limits: ServerLimits | None = None,
    *,
    http_limits: HttpLimits | None = None,
    access: Access | None = None,
    shared: SharedStore | None = None,
) -> Starlette:
    """Returns the application. Its lifespan opens the models and the sessions (``app.state.service``).

    Args:
        open_models: Opens the models.
        limits: Limits of connections and sessions.
        http_limits: Limits of the HTTP APIs.
        access: The tenants, and the pages and host names that may use the server.
        shared: The store that several servers share.
    """
    limits, access = limits or ServerLimits(), access or Access()
    metrics = ServerMetrics()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        http = http_limits or HttpLimits()
        async with (
            open_models() as models,
            models.gate.running(),
            open_sessions(limits, "" if shared is None else shared.front) as sessions,
            open_background_runs(http.max_background_responses) as background,
            _open_responses(shared, http) as responses,
            _open_values(shared, http) as values,
            open_programs(http.programs, values=values) as programs,
            _open_fronts(app, shared) as fronts,
        ):
            service = Service(
                models,
                sessions,
                access.tenants,
                limits,
                http,
                background,
                programs,
                responses,
                fronts,
                logs_prompts=access.logs_prompts,
            )
            app.state.service = service
            metrics.watch(models)
            try:
                yield
            finally:
                app.state.service = None

    pages = page_routes() if access.has_page else []
    routes = [
        WebSocketRoute(SESSION_PATH, _session),
        *api_routes(),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/health", healthy),
        *[Route(path, healthy, methods=["GET", "POST"]) for path in ("/ping", "/health_generate")],
        Route("/version", show_version),
        Route("/metrics", _metrics),
        Route("/openapi.json", openapi),
        Route("/", show_root),
        *pages,
    ]
    origins = access.cors_origins
    if access.allowed_hosts is not None:
        knows_host = accept_hosts(access.allowed_hosts)
    else:
        knows_host = any_host if access.tenants.need_keys else private_host
    guard = Middleware(BrowserGuard, origins=origins, knows_host=knows_host)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "PUT", "DELETE"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[cors, guard] if origins else [guard],
        exception_handlers={HTTPException: _not_found},
    )
    # A redirect to a path without its trailing slash would have the address that the server sees. Behind a
    # TLS proxy, a client that followed it would send its key unencrypted.
    app.router.redirect_slashes = False
    app.router.default = _no_route
    app.state.service = None
    app.state.metrics, app.state.answers = metrics, metrics.answers
    app.state.relaxed = metrics.relaxed
    app.state.tenants, app.state.has_page = access.tenants, bool(pages)
    return app


@asynccontextmanager
async def _open_fronts(app: Starlette, shared: SharedStore | None) -> AsyncIterator[Fronts | None]:
    if shared is None:
        yield None
        return
    async with open_fronts(shared, partial(answer_forwarded, app.router, app)) as fronts:
        yield fronts


@asynccontextmanager
async def _open_responses(shared: SharedStore | None, limits: HttpLimits) -> AsyncIterator[Responses]:
    if shared is None:
        yield LocalResponses(ResponseStore(limits.responses_bytes, limits.response_lifetime_s))
        return
    async with _swept(shared, "responses", limits.responses_bytes, limits.response_lifetime_s) as entries:
        yield SharedResponses(entries)


@asynccontextmanager
async def _open_values(shared: SharedStore | None, limits: HttpLimits) -> AsyncIterator[SharedValues | None]:
    if shared is None:
        yield None
        return
    async with _swept(shared, "values", limits.programs_bytes, limits.program_idle_s) as entries:
        yield SharedValues(entries)


@asynccontextmanager
async def _swept(
    shared: SharedStore, space: str, max_bytes: int, lifetime_s: float
) -> AsyncIterator[SharedEntries]:
    """Entries of a shared store. Expired entries are removed while the scope is open."""
    entries = SharedEntries(shared, space, max_bytes, lifetime_s)
    async with open_task_group() as group:
        group.start_soon(entries.sweep)
        yield entries
        group.cancel_scope.cancel()


async def _session(socket: WebSocket) -> None:
    service: Service | None = socket.app.state.service
    if service is None or service.is_draining:
        await socket.send_denial_response(unready(ENDING))
        return
    tenants, address = service.tenants, client_address(socket.scope)
    offered = socket.scope.get("subprotocols", [])
    ticket = find_ticket(offered)
    try:
        if ticket is None:
            tenant = tenants.of_request(socket.headers, address)
            is_valid = partial(tenants.still_names, key_of_headers(socket.headers), tenant)
        else:
            tenant, hashed = await tenants.of_ticket(ticket, address)
            is_valid = partial(tenants.still_hashed, hashed, tenant)
    except (NotAuthorized, RateLimited, Overloaded) as error:
        await socket.send_denial_response(_unauthorized(error))
        return

    front = session_front(socket.query_params.get(SESSION_PARAM, ""))
    if front and await _runs_elsewhere(service, front):
        text = f"this session is on the server {front[:60]!r}: the proxy must route it there"
        await socket.send_denial_response(unready(text))
        return

    def find(model: str | None) -> SessionModels:
        return service.models.of_session(model, tenant)

    session = WsSession(
        socket,
        service.sessions,
        find,
        tenant=tenant.name,
        is_valid=is_valid,
        subprotocol=SUBPROTOCOL if SUBPROTOCOL in offered else None,
    )
    await session.run()


async def _runs_elsewhere(service: Service, front: str) -> bool:
    try:
        return await service.runs_at(front)
    except Overloaded:  # unknown: if the session is not here, its first frame fails
        return False


async def _metrics(request: Request) -> Response:
    service: Service | None = request.app.state.service
    metrics: ServerMetrics = request.app.state.metrics
    tenants: Tenants = request.app.state.tenants
    try:
        # Not the service's tenants: keys are also checked while the server starts, before there is a service.
        may_see = tenants.of_request(request.headers, client_address(request.scope)).sees_metrics
    except (NotAuthorized, RateLimited) as error:
        return _unauthorized(error)
    if not may_see:
        reason = "this API key may not read metrics: use the key of a tenant with sees_metrics"
        return JSONResponse({"reason": reason}, status_code=403)
    if service is None:
        text = await metrics.scrape()
    else:
        text = await metrics.scrape(service.models, service.sessions, service.programs)
    return Response(text, media_type=CONTENT_TYPE)


def _unauthorized(error: NotAuthorized | RateLimited | Overloaded) -> Response:
    shown = make_api_error(error)
    return JSONResponse({"reason": shown.message}, status_code=shown.status, headers=shown.headers)


async def _not_found(request: Request, error: Exception) -> Response:
    """Answers if the path does not exist, or does not support the method."""
    assert isinstance(error, HTTPException)
    path, headers = request.scope["path"], dict(error.headers or {})
    shown = f"{request.method} {path[:200]}"
    if path == SESSION_PATH:
        headers |= {"connection": "upgrade", "upgrade": "websocket"}
        failure = ApiError(426, "upgrade_required", f"{shown}: open a websocket")
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(_list_methods(request))
        text = f"{shown}: this path supports {headers['Allow']}"
        failure = ApiError(405, "method_not_allowed", text)
    else:
        is_managing = path in MANAGEMENT or path.startswith(tuple(f"{one}/" for one in MANAGEMENT))
        why = WHY_NOT_MANAGED if is_managing else f"the endpoints are {', '.join(ENDPOINTS)}"
        why = WHY_NOT_FLUSHED if path == FLUSH else why
        failure = ApiError(404, "not_found", f"{shown} does not exist: {why}")
    return error_response(path, request.headers, failure, headers)


def _list_methods(request: Request) -> list[str]:
    """The methods that the path supports. Starlette itself considers only the first route of a path. A path
    without parameters is no id of another route."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    fitting = [route for route in routes if route.path == request.scope["path"]]
    fitting = fitting or [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in fitting for method in route.methods or ()})


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers requests without a route."""
    if scope["type"] == "websocket":
        reason = {"reason": f"there is no websocket at {scope['path'][:200]}: use {SESSION_PATH}"}
        answer = JSONResponse(reason, status_code=404)
        await WebSocket(scope, receive, send).send_denial_response(answer)
        return
    raise HTTPException(404)
