"""An application on an agentflow server: a page that shows a program's branches while they are written.

Three views of a question stream side by side over the prefix that they share, and flow into a summary. A
reader who presses Stop or closes the page cancels the program on the server. docker-compose.yml runs it, and
this does without containers:

    AGENTFLOW_URL=ws://127.0.0.1:8410 uvicorn --app-dir examples --factory app.service:create_app
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

import agentflow as af
from app.sse import server_sent_events

VIEWS = ("an optimist", "a sceptic", "a teacher of children")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

OpenSession = Callable[[], Awaitable[af.OpenSession]]


@af.program
async def discuss(s: af.State, question: str) -> str:
    """Answers a question from three points of view, and sums them up."""
    s += af.system("You answer in two or three short sentences.") + af.user(question)
    async with s.fork(len(VIEWS)) as branches:  # they share the prompt so far
        for branch, view in zip(branches, VIEWS, strict=True):
            branch += af.user(f"Answer as {view}.") + af.assistant(af.gen("view", max_tokens=80))
    s += af.user("Here are three answers.\n", *(f"{branch['view']}\n" for branch in branches), "Sum them up.")
    summary = af.gen("summary", max_tokens=80)
    s += af.assistant(summary)
    return await s[summary]


class Connection:
    """The application's session with the server: one for all requests, so that they share a batch and a
    cache. It is opened at the first request that reaches a server, and reconnects by itself."""

    def __init__(self, open_session: OpenSession) -> None:
        self._open_session = open_session
        self._flow: af.OpenSession | None = None
        self._opening = anyio.Lock()

    async def session(self) -> af.Session:
        """Returns the open session. Errors of ``af.open_session``."""
        async with self._opening:
            if self._flow is None:
                self._flow = await self._open_session()
            return self._flow

    async def close(self) -> None:
        """Closes the session, and cancels what runs in it."""
        flow, self._flow = self._flow, None
        if flow is not None:
            await flow.close()


def create_app(open_session: OpenSession = af.open_session) -> FastAPI:
    """Returns the application. Without an argument, it connects to ``AGENTFLOW_URL`` with the key in
    ``AGENTFLOW_API_KEY``."""
    connection = Connection(open_session)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await connection.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None)  # those pages load scripts from elsewhere

    @app.middleware("http")
    async def with_headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/views")
    async def views() -> list[str]:
        return list(VIEWS)

    @app.get("/discuss")
    async def streamed(question: str = Query(min_length=1, max_length=2000)) -> Response:
        try:
            flow = await connection.session()
        except af.AgentflowError as error:
            return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "2"})
        return StreamingResponse(
            server_sent_events(flow.stream(discuss, question)), media_type="text/event-stream"
        )

    app.mount("/", StaticFiles(directory=Path(__file__).parent / "static", html=True))
    return app
