"""``flow.embed`` on a server: a session generates with one model and embeds with another, within the tenant's
limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import anyio
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.api_server import EMBEDDER, MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine, embedding_engine
from support.faults import has_param
from support.faulty_servers import OneTenant
from support.server.openai_peer import sync_client

import agentflow as af
from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.engine.tenant import Tenant
from agentflow.server.config.limits import ServerLimits
from agentflow.server.tenants.rate_limit import TenantGate

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
SIZE = 24
FOLDER = EmbeddingFolder(("lasttoken",), (None,), prompts={"query": "Question: "})


@pytest.fixture(scope="module")
def embedder() -> FakeEngine:
    return embedding_engine(SIZE, 64)


@pytest.fixture(scope="module")
def server(embedder: FakeEngine) -> Iterator[ApiServer]:
    with api_server(constraints=False, embedding=FOLDER, embedder=embedder) as running:
        yield running
        running.assert_idle()
        running.call(embedder.assert_idle)


def of_http(server: ApiServer, texts: list[str], **fields: Any) -> np.ndarray:
    with sync_client(server) as client:
        answer = client.embeddings.create(model=EMBEDDER, input=texts, extra_body=fields)
    return np.array([one.embedding for one in answer.data])


@pytest.mark.parametrize("options", [{}, {"dimensions": 5}, {"prompt_name": "query"}, {"prompt": "Q: "}])
async def test_one_session_generates_and_embeds_as_the_http_route_does(
    server: ApiServer, options: dict[str, Any]
) -> None:
    texts = ["The quick brown fox", "a dog", *[f"text {number}" for number in range(300)]]
    async with af.session(server.url, embed_model=EMBEDDER) as flow, flow.state() as s:
        assert (flow.capabilities.model, flow.capabilities.embedding_models) == (MODEL, (EMBEDDER,))
        s += "Once" + af.gen("tale", max_tokens=4)
        vectors = await flow.embed(texts, **options)
        assert (await s["tale"]) != ""
    assert np.abs(np.array(vectors) - of_http(server, texts, **options)).max() < 1e-6


async def test_a_session_of_the_embedding_model_embeds_too(server: ApiServer) -> None:
    async with af.session(server.url, model=EMBEDDER) as flow, flow.state() as s:
        assert flow.capabilities.embedding_models == (EMBEDDER,)
        assert len(await flow.embed("a dog")) == SIZE
        with pytest.raises(af.errors.NotSupported):
            s += "Once" + af.gen("tale", max_tokens=4)


@pytest.mark.parametrize(
    ("texts", "options", "error", "param"),
    [
        ("word " * 200, {}, af.PromptTooLong, "texts"),
        ("word " * 10_000, {}, af.PromptTooLong, "texts"),
        ("a", {"dimensions": SIZE + 1}, af.errors.BadArgument, "dimensions"),
        ("a", {"prompt_name": "passage"}, af.errors.BadArgument, "prompt_name"),
        ("a", {"model": MODEL}, af.errors.UnknownModel, "model"),
    ],
)
async def test_an_invalid_embedding_fails_alone(
    server: ApiServer, texts: str, options: dict[str, Any], error: type[Exception], param: str
) -> None:
    async with af.session(server.url) as flow:
        with pytest.raises(error, check=has_param(param)):
            await flow.embed(texts, **options)
        assert len(await flow.embed("a dog")) == SIZE


async def test_an_unknown_model_is_refused_when_the_session_opens(server: ApiServer) -> None:
    with pytest.raises(af.errors.UnknownModel, check=has_param("embed_model")):
        async with af.session(server.url, embed_model="other"):
            pytest.fail("it opened")


async def test_a_server_without_one_says_so() -> None:
    with api_server(constraints=False) as server:
        async with af.session(server.url) as flow:
            with pytest.raises(af.errors.NotSupported):
                await flow.embed("a")
        with pytest.raises(af.errors.NotSupported):
            async with af.session(server.url, embed_model=EMBEDDER):
                pytest.fail("it opened")


async def test_a_call_that_is_cancelled_leaves_nothing_in_the_engine(
    server: ApiServer, embedder: FakeEngine
) -> None:
    server.call(embedder.gate.allow, 1)
    async with af.session(server.url) as flow, anyio.create_task_group() as group:
        group.start_soon(flow.embed, [f"text {number}" for number in range(1000)])
        await anyio.to_thread.run_sync(server.call, embedder.gate.held)
        group.cancel_scope.cancel()
    server.call(embedder.gate.open)
    await anyio.to_thread.run_sync(server.call, embedder.assert_idle)


async def test_each_op_is_a_request_of_the_tenant() -> None:
    tenant = Tenant("someone", requests_per_minute=2, models=frozenset({MODEL, EMBEDDER}))
    options = {"gate": TenantGate(), "tenants": OneTenant(tenant), "embedder": embedding_engine(SIZE, 64)}
    with api_server(constraints=False, **options) as server:
        async with af.session(server.url) as flow:
            assert len(await flow.embed(["a"] * 512)) == 512
            with pytest.raises(af.errors.RateLimited) as caught:
                await flow.embed("a")
            assert caught.value.retry_after_s


async def test_a_tenant_embeds_only_with_models_that_it_may_use() -> None:
    tenants = OneTenant(Tenant("someone", models=frozenset({MODEL})))
    with api_server(constraints=False, tenants=tenants, embedder=embedding_engine(SIZE, 64)) as server:
        async with af.session(server.url) as flow:
            with pytest.raises(af.errors.NotSupported):
                await flow.embed("a")


async def test_embeddings_count_in_the_memory_of_the_session() -> None:
    limits = ServerLimits(session_bytes=30_000)
    with api_server(constraints=False, server_limits=limits, embedder=embedding_engine(SIZE, 64)) as server:
        async with af.session(server.url) as flow:
            assert len(await flow.embed(["a"] * 50)) == 50
            with pytest.raises(af.Overloaded):
                await flow.embed(["a"] * 256)
            assert len(await flow.embed(["a"] * 50)) == 50


async def test_embeddings_of_sessions_and_of_http_are_counted(server: ApiServer) -> None:
    before = counted(server)
    async with af.session(server.url) as flow:
        await flow.embed(["a dog", "a fox"])
    of_http(server, ["a dog"])
    after = counted(server)
    num_tokens = sum(len(TOKENIZER.encode(text)) for text in ["a dog", "a fox", "a dog"])
    assert [now - then for now, then in zip(after, before, strict=True)] == [3, num_tokens]


def counted(server: ApiServer) -> list[float]:
    with urlopen(f"{server.url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels.get("model") == EMBEDDER
    }
    return [values[f"agentflow_{name}_total"] for name in ("embeddings", "embedding_tokens")]
