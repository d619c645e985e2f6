"""Sessions with the backends of model APIs, each on a fake server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from support.apis.fake_server import FakeServer, Script, fake_server

import agentflow as af
from agentflow.protocol.backend import Backend

ApiSession = AbstractAsyncContextManager[tuple[af.Session, FakeServer]]


@asynccontextmanager
async def api_session(
    script: Script, backend: Callable[[str], Backend], **session: Any
) -> AsyncIterator[tuple[af.Session, FakeServer]]:
    """A session on a fake server. ``backend``: makes it, from the server's address. ``session``: options of
    ``af.session``."""
    async with fake_server(script) as server, af.session(backend=backend(server.url), **session) as flow:
        yield flow, server


def openai_session(
    script: Script, model: str = "gpt-4o", *, session: Any = None, **options: Any
) -> ApiSession:
    """A session with OpenAI's backend. ``session``: options of ``af.session``."""
    options = {"api_key": "sk-1", "max_retries": 0, **options}
    return api_session(
        script, lambda url: af.OpenAI(model, base_url=f"{url}/v1", **options), **(session or {})
    )


def anthropic_session(
    script: Script, model: str = "claude-opus-4-5", *, session: Any = None, **options: Any
) -> ApiSession:
    """A session with Anthropic's backend. ``session``: options of ``af.session``."""
    options = {"api_key": "sk-1", "max_retries": 0, **options}
    return api_session(script, lambda url: af.Anthropic(model, base_url=url, **options), **(session or {}))


def compatible_session(script: Script, flavour: Any = "vllm", **options: Any) -> ApiSession:
    """A session with a compatible server."""
    options = {"max_retries": 0, **options}
    return api_session(script, lambda url: af.OpenAICompatible(f"{url}/v1", "m", flavour=flavour, **options))


async def failure(
    opening: ApiSession, expected: type[af.AgentflowError], *, num_requests: int = 1, **params: Any
) -> af.AgentflowError:
    """The error of a gen with these parameters, for which ``num_requests`` requests were sent."""
    async with opening as (flow, server), flow.state() as s:
        s += af.user("Hi")
        with pytest.raises(expected) as caught:
            await s.add(af.assistant(af.gen("x", **params)))["x"]
    assert len(server.received) == num_requests
    return caught.value
