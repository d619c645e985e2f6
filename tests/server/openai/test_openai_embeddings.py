"""``POST /v1/embeddings``, by OpenAI's client and by hand."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from support.api_errors import response_to
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER, embedding_engine
from support.faulty_servers import OneTenant
from support.server.apis import CHAT
from support.server.disconnecting_clients import disconnect, post
from support.server.openai_peer import async_client, logit_server, sync_client

from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.engine.tenant import Tenant
from agentflow.runtime.word_embedding import word_embedding
from agentflow.server.config.limits import HttpLimits
from agentflow.server.tenants.rate_limit import TenantGate

pytestmark = pytest.mark.timeout(60)
SIZE = 24
MAX_CONTEXT = 64
FOLDER = EmbeddingFolder(("lasttoken",), (None,), prompts={"query": "Question: "})
TEXTS = ["The quick brown fox", "a dog", "An answer is the answer to a question."]
generating = pytest.fixture(logit_server, scope="module", name="generating")


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    limits = HttpLimits(max_embedding_inputs=8, max_embedding_tokens=200)
    with api_server(
        embedding_engine(SIZE, MAX_CONTEXT), constraints=False, limits=limits, embedding=FOLDER
    ) as running:
        yield running
        running.assert_idle()


def create(server: ApiServer, **fields: Any) -> openai.types.CreateEmbeddingResponse:
    with sync_client(server) as client:
        return client.embeddings.create(**fields)


def card_of(server: ApiServer) -> dict[str, Any]:
    with sync_client(server) as client:
        return client.models.retrieve(MODEL).to_dict()


def of_ids(ids: list[int], size: int = SIZE) -> np.ndarray:
    whole = np.array(word_embedding([b"%d" % token for token in ids], SIZE), dtype=np.float32)[:size]
    return whole / np.linalg.norm(whole)


def of_text(text: str, size: int = SIZE) -> np.ndarray:
    return of_ids(TOKENIZER.encode(text), size)


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_openai_s_client_gets_the_embedding_of_each_text(server: ApiServer, encoding: dict[str, str]) -> None:
    answer = create(server, model=MODEL, input=TEXTS, user="me", **encoding)
    found = [one.embedding for one in answer.data]
    if encoding.get("encoding_format") == "base64":
        found = [np.frombuffer(base64.b64decode(str(one)), dtype="<f4") for one in found]
    for row, text in zip(found, TEXTS, strict=True):
        assert np.abs(np.array(row) - of_text(text)).max() < 1e-6
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert answer.model == MODEL
    num_tokens = sum(len(TOKENIZER.encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the client needs it
async def test_the_asynchronous_client_too(server: ApiServer, anyio_backend: str) -> None:
    async with async_client(server) as client:
        answer = await client.embeddings.create(model=MODEL, input="a dog", dimensions=5)
    assert np.abs(np.array(answer.data[0].embedding) - of_text("a dog", 5)).max() < 1e-6


@pytest.mark.parametrize("given", [[5, 6, 7], [[5, 6, 7], [8]]])
def test_token_ids_are_taken_as_they_are(server: ApiServer, given: Any) -> None:
    answer = create(server, model=MODEL, input=given)
    rows = given if isinstance(given[0], list) else [given]
    assert len(answer.data) == len(rows)
    for one, ids in zip(answer.data, rows, strict=True):
        assert np.abs(np.array(one.embedding) - of_ids(ids)).max() < 1e-6


@pytest.mark.parametrize("extra", [{"prompt_name": "query"}, {"prompt": "Question: "}])
def test_a_prompt_precedes_each_text(server: ApiServer, extra: dict[str, str]) -> None:
    answer = create(server, model=MODEL, input=["Why?"], extra_body=extra)
    assert np.abs(np.array(answer.data[0].embedding) - of_text("Question: Why?")).max() < 1e-6


def test_the_list_of_models_has_the_size(server: ApiServer, generating: ApiServer) -> None:
    card = card_of(server)
    assert (card["embedding_size"], card["max_model_len"]) == (SIZE, MAX_CONTEXT)
    assert card["owned_by"] == "agentflow"
    assert card_of(generating)["embedding_size"] is None


def test_a_client_that_vanishes_ends_its_work() -> None:
    engine = embedding_engine(SIZE, MAX_CONTEXT)
    with api_server(engine, constraints=False) as server:
        engine.gate.allow(1)
        requests = server.observe_requests()
        texts = [[n + 5] * 60 for n in range(40)]
        connection = post(server, "/v1/embeddings", {"model": MODEL, "input": texts})
        server.call(engine.gate.held)
        disconnect(server, connection)
        engine.gate.open()
        server.assert_idle()
        assert len(requests.submits) == len(texts)


def test_a_request_counts_as_one_with_the_tokens_of_all_inputs() -> None:
    gate = TenantGate()
    tenant = Tenant("someone", tokens_per_minute=100, requests_per_minute=2)
    with api_server(
        embedding_engine(SIZE, MAX_CONTEXT), constraints=False, gate=gate, tenants=OneTenant(tenant)
    ) as server:
        body = {"model": MODEL, "input": [[5] * 60, [6] * 60]}
        assert create(server, **body).usage.total_tokens == 120
        answer = response_to(server, CHAT, body, path="/v1/embeddings")
        assert (answer.cell[:3], answer.code) == ("429", "rate_limit_exceeded")
