"""The server as an ASGI application: the websocket of sessions, health checks, and metrics.

::

    /v1/session     websocket, docs/protocol.md
    /health/live    200 while the process answers
    /health/ready   200 when sessions can be opened and the generator answers; 503 otherwise
    /metrics        for Prometheus, docs/metrics.md
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from urllib.parse import urlsplit

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from agentflow.generator import ContextT, Generator
from agentflow.protocol import SESSION_PATH
from agentflow.server.limits import ServerLimits
from agentflow.server.metrics import CONTENT_TYPE, ServerMetrics
from agentflow.server.sessions import Sessions, open_sessions
from agentflow.server.ws_session import WsSession

# The engine answers between two steps, and a step may be a long prefill.
STATS_TIMEOUT_S = 5.0

OpenGenerator = Callable[[], AbstractAsyncContextManager[Generator[ContextT]]]


def create_app(open_generator: OpenGenerator[ContextT], limits: ServerLimits | None = None) -> Starlette:
    """The application. Its lifespan opens the generator and holds the sessions (``app.state.sessions``)."""
    limits = limits or ServerLimits()
    metrics = ServerMetrics()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with open_generator() as generator, open_sessions(generator, limits) as sessions:
            app.state.sessions = sessions
            metrics.watch(generator)
            try:
                yield
            finally:
                app.state.sessions = None

    routes = [
        WebSocketRoute(SESSION_PATH, _session),
        Route("/health/live", _live),
        Route("/health/ready", _ready),
        Route("/metrics", _metrics),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.sessions = None
    app.state.metrics = metrics
    return app


async def _session(socket: WebSocket) -> None:
    sessions: Sessions[object] | None = socket.app.state.sessions
    if sessions is None:
        await socket.send_denial_response(_unready("the server is starting or shutting down"))
    elif not _is_from_here(socket):
        reason = "pages of other sites may not open sessions"
        await socket.send_denial_response(JSONResponse({"reason": reason}, status_code=403))
    else:
        await WsSession(socket, sessions).run()


def _is_from_here(socket: WebSocket) -> bool:
    """A server on loopback must not be within reach of any web page that its user visits: browsers tell
    the page's origin (RFC 6454), and other clients send none."""
    origin = socket.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == socket.headers.get("host")


async def _live(request: Request) -> JSONResponse:
    return JSONResponse({"status": "live"})


async def _ready(request: Request) -> JSONResponse:
    sessions: Sessions[object] | None = request.app.state.sessions
    if sessions is None:
        return _unready("the server is starting or shutting down")
    try:
        with anyio.fail_after(STATS_TIMEOUT_S):
            await sessions.generator.stats()
    except TimeoutError:
        return _unready(f"the engine has not answered for {STATS_TIMEOUT_S} s")
    except Exception as error:  # whatever it is: the engine does not answer as it should
        return _unready(f"the engine does not answer: {error}")
    if len(sessions) >= sessions.limits.max_sessions:
        return _unready(f"{len(sessions)} sessions are open, which is the limit")
    model = sessions.generator.capabilities.model
    return JSONResponse({"status": "ready", "model": model, "sessions": len(sessions)})


async def _metrics(request: Request) -> Response:
    sessions: Sessions[object] | None = request.app.state.sessions
    metrics: ServerMetrics = request.app.state.metrics
    if sessions is None:
        text = await metrics.scrape(None, 0)
    else:
        text = await metrics.scrape(sessions.generator, len(sessions))
    return Response(text, media_type=CONTENT_TYPE)


def _unready(reason: str) -> JSONResponse:
    return JSONResponse({"status": "unready", "reason": reason}, status_code=503)
