"""A FastAPI service that streams a program's text as server-sent events, and stops when a client disconnects.

This script serves the application on a free port of this machine. Its clients read one answer to its end and
leave another in the middle, whose program is then cancelled. To serve it for others:

    AGENTFLOW_URL=ws://127.0.0.1:8410 uvicorn --app-dir examples --factory fastapi_stream:create_app

    python examples/fastapi_stream.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

import anyio
import httpx2
import uvicorn
from app.sse import server_sent_events
from example_session import example_parser, run_example
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from rich.console import Console
from rich.markup import escape

import agentflow as af


@af.program
async def explain(s: af.State, question: str) -> str:
    """Answers a question."""
    answer = af.gen("answer", max_tokens=200)
    s += af.user(question) + af.assistant(answer)
    return await s[answer]


def create_app(open_session: Callable[[], AbstractAsyncContextManager[af.Session]] = af.session) -> FastAPI:
    """Returns the application. All its requests share one session, and so one batch and one cache."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_session() as app.state.flow:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/explain")
    async def whole(request: Request, question: str) -> dict[str, str]:
        try:
            return {"answer": await request.app.state.flow.run(explain, question)}
        except af.Overloaded as error:
            raise HTTPException(503, "try again later", {"Retry-After": "1"}) from error
        except af.errors.RequestRefused as error:
            raise HTTPException(400, str(error)) from error

    @app.get("/explain/stream")
    async def streamed(request: Request, question: str) -> StreamingResponse:
        # A client that disconnects closes the iterator, which cancels the program.
        events = server_sent_events(request.app.state.flow.stream(explain, question))
        return StreamingResponse(events, media_type="text/event-stream")

    return app


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    """Serves the application, and gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    async with anyio.create_task_group() as group:
        group.start_soon(server.serve, [listener])
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True


async def read(base: str, question: str, console: Console, num_pieces: int | None = None) -> None:
    """Prints an answer as it comes, and disconnects after ``num_pieces`` (None: at its end)."""
    console.print(f"[bold]{escape(question)}[/]")
    async with (
        httpx2.AsyncClient(timeout=60) as client,
        client.stream("GET", f"{base}/explain/stream", params={"question": question}) as response,
    ):
        kind = ""
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            kind = value if name == "event" else kind
            if name != "data":
                continue
            if kind == "error":
                console.print(json.loads(value), style="red", markup=False, end="")
            if kind != "message":
                break
            console.print(json.loads(value)["text"], end="", markup=False)
            num_pieces = None if num_pieces is None else num_pieces - 1
            if num_pieces == 0:
                console.print(" [yellow]… (disconnected)[/]", end="")
                break
    console.print("\n")


async def main(flow: af.Session, console: Console) -> None:
    """Serves the application, and reads two answers."""
    async with served(create_app(lambda: nullcontext(flow))) as base:
        await read(base, "What do plants live on?", console)
        await read(base, "Tell me a long story about the sea.", console, num_pieces=12)


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
