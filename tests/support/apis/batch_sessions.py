"""Sessions on a fake vendor with batches, and programs to run there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from support.apis.batch_vendors import AnthropicVendor, FakeVendor, OpenAIVendor
from support.apis.fake_server import FakeServer, fake_server

import agentflow as af

VENDORS = {"openai": OpenAIVendor, "anthropic": AnthropicVendor}
MODELS = {OpenAIVendor: "gpt-4.1-mini", AnthropicVendor: "claude-opus-4-5"}


@dataclass
class Place:
    """A server, and an open session on it."""

    server: FakeServer
    flow: af.Session


def backend_at(kind: type[FakeVendor], url: str, **options: Any) -> Any:
    """The backend of a vendor's model."""
    options = {"api_key": "k", "max_retries": 0} | options
    if kind is OpenAIVendor:
        return af.OpenAI(MODELS[kind], base_url=f"{url}/v1", **options)
    return af.Anthropic(MODELS[AnthropicVendor], base_url=url, **options)


@asynccontextmanager
async def session_on(
    vendor: FakeVendor,
    *,
    max_retries: int = 0,
    given: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> AsyncIterator[Place]:
    """A session. ``given``: arguments of the backend. ``options``: of ``af.session``."""
    async with fake_server(vendor) as server:
        backend = backend_at(type(vendor), server.url, max_retries=max_retries, **given)
        async with af.session(backend=backend, **options) as flow:
            yield Place(server, flow)


@af.program
async def ask(s: af.State, question: str) -> str:
    """One stage."""
    s += af.user(question) + af.assistant(af.gen("answer", max_tokens=8))
    return await s["answer"]


@af.program
async def compare(s: af.State, question: str) -> str:
    """A fork, whose branches are one stage, and a join: two stages."""
    s += af.user(question)
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += af.user(f"As person {number}.") + af.assistant(af.gen("view", max_tokens=8))
    s += af.user("Views:")
    for branch in branches:
        s += branch["view"]
    s += af.assistant(af.gen("verdict", max_tokens=8))
    return await s["verdict"]
