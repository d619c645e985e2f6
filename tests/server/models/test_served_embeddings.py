"""A model behind an API that makes embeddings: over HTTP and in sessions. A script stands for the API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from support.server.http_clients import only_asyncio

import agentflow as af
from agentflow.server.app import Access
from agentflow.server.models.api_model import ApiModel
from agentflow.server.models.models import Models
from agentflow.server.serve import RunningServer, running_server
from agentflow.server.tenants.keys import Tenants, hashed_key
from agentflow.server.tenants.rate_limit import TenantGate

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)

TEXTS = ["a small dog", "a small cat", "the stock market"]


@asynccontextmanager
async def serving(tenants: Tenants | None = None) -> AsyncIterator[RunningServer]:
    tenants = tenants or Tenants()
    gate = TenantGate(current=tenants.current)
    generator = af.Scripted("x").generator
    generator.capabilities = msgspec.structs.replace(generator.capabilities, generates=False)
    model = ApiModel("embedder", generator, gate=gate, aliases=["text-embedding-3-small"])

    @asynccontextmanager
    async def opening() -> AsyncIterator[Models]:
        yield Models([model], gate=gate)

    async with running_server(opening, access=Access(tenants)) as server:
        yield server


async def post(server: RunningServer, path: str, key: str = "any", **body: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
        return await client.post(f"{server.http_url}{path}", json={"model": "embedder", **body})


def closeness(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


async def test_embeddings_over_http() -> None:
    async with serving() as server:
        answer = (await post(server, "/v1/embeddings", input=TEXTS)).json()
        dog, cat, market = [one["embedding"] for one in answer["data"]]
        assert closeness(dog, cat) > closeness(dog, market)
        assert answer["model"] == "embedder"
        assert answer["usage"]["prompt_tokens"] == 9
        named = (await post(server, "/v1/embeddings", model="text-embedding-3-small", input="a dog")).json()
        assert named["model"] == "text-embedding-3-small"
        ollama = (await post(server, "/api/embed", input=TEXTS)).json()
        assert len(ollama["embeddings"]) == 3
        async with httpx2.AsyncClient() as client:
            metrics = (await client.get(f"{server.http_url}/metrics")).text
        assert 'agentflow_ttft_seconds_count{model="embedder"} 0.0' in metrics


async def test_token_ids_need_an_engine() -> None:
    async with serving() as server:
        response = await post(server, "/v1/embeddings", input=[[1, 2]])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")


async def test_an_embedding_model_generates_nothing() -> None:
    async with serving() as server:
        messages = [{"role": "user", "content": "Hi"}]
        response = await post(server, "/v1/chat/completions", messages=messages)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


async def test_a_session_embeds_with_it() -> None:
    async with serving() as server, af.session(server.url) as flow:
        assert "embedder" in flow.capabilities.embedding_models
        dog, cat, market = await flow.embed(TEXTS)
        assert closeness(dog, cat) > closeness(dog, market)


async def test_its_tokens_count_towards_the_tenants_limit(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.ann]\nkeys = ["{hashed_key("af-ann")}"]\ntokens_per_minute = 5\n')
    async with serving(Tenants(file=keys)) as server:
        assert (await post(server, "/v1/embeddings", "af-ann", input=TEXTS)).status_code == 200
        assert (await post(server, "/v1/embeddings", "af-ann", input=TEXTS)).status_code == 429
