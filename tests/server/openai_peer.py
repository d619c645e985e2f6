"""What tests with OpenAI's client share: clients, the twin that asks the engine without HTTP, and what the
engine was sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
from api_server import ApiServer
from fake_engine import FakeEngine
from logit_runner import logit_runner

from agentflow.sampling import SamplingParams
from agentflow.server.chat_message import Message
from agentflow.server.completion import completing
from agentflow.server.completion_request import Answer, CompletionRequest
from agentflow.server.engine_messages import Submit

MAX_CONTEXT = 512
SEED = 11
ASK = (Message("system", "Be brief."), Message("user", "What do plants do?"))
MESSAGES: Any = [{"role": message.role, "content": message.content} for message in ASK]


def logit_engine_of_server() -> FakeEngine:
    """Writes plain text, and takes all parameters."""
    return FakeEngine(runner=logit_runner(max_context=MAX_CONTEXT))


def sync_client(server: ApiServer, **options: Any) -> openai.OpenAI:
    """As users make it, but it never tries again."""
    return openai.OpenAI(base_url=f"{server.url}/v1", **({"api_key": "none", "max_retries": 0} | options))


@asynccontextmanager
async def async_client(server: ApiServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_defaults(**changes: Any) -> SamplingParams:
    """The parameters of a chat request that says nothing but its seed."""
    return SamplingParams(**({"max_tokens": MAX_CONTEXT, "temperature": 1.0, "seed": SEED} | changes))


def ask_engine(server: ApiServer, request: CompletionRequest) -> list[Answer]:
    """The twin: the same generator, without HTTP."""

    async def ask() -> list[Answer]:
        async with completing(server.generator, request) as completion:
            return await completion.answers()

    return server.call(ask)


class Sent:
    """What the engine is sent from now on."""

    def __init__(self, server: ApiServer) -> None:
        self.submits: list[Submit] = []
        server.call(server.generator.observe, self)

    def sent(self, submit: Submit) -> None:
        self.submits.append(submit)

    def heard(self, messages: object) -> None:
        pass
