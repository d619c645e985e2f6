"""Shared parts of tests with OpenAI's and Anthropic's own client: sync and async clients, and a twin that
asks the engine without HTTP."""

from __future__ import annotations

from typing import Literal

from support.api_server import ApiServer

from agentflow.server.completion.completion import completing
from agentflow.server.completion.request import Answer, CompletionRequest

ClientKind = Literal["sync", "async"]
CLIENTS: tuple[ClientKind, ...] = ("sync", "async")


def only_asyncio() -> str:
    """``anyio_backend = pytest.fixture(only_asyncio)``: uvicorn needs asyncio, and on trio OpenAI's client
    leaves its streams to the garbage collector, with a warning."""
    return "asyncio"


def ask_engine(server: ApiServer, request: CompletionRequest) -> list[Answer]:
    """The twin: the same generator, without HTTP."""

    async def ask() -> list[Answer]:
        async with completing(server.generator, request) as completion:
            return await completion.answers()

    return server.call(ask)
