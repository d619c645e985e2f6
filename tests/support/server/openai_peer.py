"""OpenAI's client, sync and async, on a server with the deterministic engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Any

import anyio
import openai
from support.api_server import ApiServer, api_server
from support.fake_engine import FakeEngine
from support.logit_runner import logit_runner
from support.server.http_clients import ClientKind, only_asyncio

from agentflow.protocol.chat import Message
from agentflow.protocol.sampling import SamplingParams

MAX_CONTEXT = 512
SEED = 11
ASK = (Message("system", "Be brief."), Message("user", "What do plants do?"))
MESSAGES: Any = [{"role": message.role, "content": message.content} for message in ASK]


def logit_engine_of_server() -> FakeEngine:
    """Writes plain text, and supports all parameters."""
    return FakeEngine(runner=logit_runner(max_context=MAX_CONTEXT))


def logit_server() -> Iterator[ApiServer]:
    """A server on it: ``server = pytest.fixture(logit_server, scope="module")``."""
    with api_server(logit_engine_of_server(), constraints=False) as running:
        yield running
        running.assert_idle()


def constrained_logit_server() -> Iterator[ApiServer]:
    """The same with a compiler of constraints."""
    with api_server(logit_engine_of_server()) as running:
        yield running
        running.assert_idle()


def any_text_server() -> Iterator[ApiServer]:
    """A server whose model writes any text that a constraint allows."""
    with api_server(FakeEngine(runner=logit_runner(max_context=1024))) as running:
        yield running


def sync_client(server: ApiServer, **options: Any) -> openai.OpenAI:
    """A client with users' options, except that it never tries again."""
    return openai.OpenAI(base_url=f"{server.url}/v1", **{"api_key": "none", "max_retries": 0, **options})


@asynccontextmanager
async def async_client(server: ApiServer, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    made = {"api_key": "none", "max_retries": 0, **options}
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", **made) as client:
        yield client


def called(
    server: ApiServer,
    kind: ClientKind,
    method: str,
    key: str = "none",
    *,
    hear: Callable[[Any], None] | None = None,
    **asked: Any,
) -> Any:
    """The result of a method of the client, such as ``chat.completions.create``: for a stream the list of its
    chunks (``hear`` is called with each as it comes), for the ``stream`` helper the answer at its end."""
    chunks: list[Any] = []
    take = chunks.append if hear is None else hear
    is_helper = method.endswith(".stream")

    async def call() -> Any:
        async with async_client(server, api_key=key) as client:
            if is_helper:
                async with attrgetter(method)(client)(**asked) as stream:
                    return await stream.get_final_completion()
            answer = await attrgetter(method)(client)(**asked)
            if not asked.get("stream"):
                return answer
            async for chunk in answer:
                take(chunk)
            return chunks

    if kind == "async":
        return anyio.run(call, backend=only_asyncio())
    with sync_client(server, api_key=key) as client:
        if is_helper:
            with attrgetter(method)(client)(**asked) as stream:
                return stream.get_final_completion()
        answer = attrgetter(method)(client)(**asked)
        if not asked.get("stream"):
            return answer
        for chunk in answer:
            take(chunk)
        return chunks


def chat_defaults(**changes: Any) -> SamplingParams:
    """The parameters of a chat request that sets only its seed."""
    return SamplingParams(**({"max_tokens": MAX_CONTEXT, "temperature": 1.0, "seed": SEED} | changes))
