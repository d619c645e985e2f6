"""Ollama's descriptions of models, its embeddings, and how its clients find a server."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx2
import numpy as np
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine
from support.server.ollama_peer import error, post
from support.server.openai_peer import logit_server, sync_client

from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.server.config.limits import HttpLimits

pytestmark = pytest.mark.timeout(60)
SIZE = 24

generating = pytest.fixture(logit_server, scope="module", name="generating")


@pytest.fixture(scope="module")
def embedding() -> Iterator[ApiServer]:
    engine = FakeEngine()
    engine.runner = FakeRunner(
        vocab_size=TOKENIZER.vocab_size, max_context=64, embedding_size=SIZE, on_step=engine.gate
    )
    limits = HttpLimits(max_embedding_inputs=8, max_embedding_tokens=200)
    folder = EmbeddingFolder(("lasttoken",), (None,))
    with api_server(engine, constraints=False, limits=limits, embedding=folder) as running:
        yield running
        running.assert_idle()


def get(server: ApiServer, path: str, method: str = "GET", **headers: str) -> httpx2.Response:
    return httpx2.request(method, server.url + path, headers=headers)


def test_models_are_listed_and_loaded(generating: ApiServer) -> None:
    [listed] = get(generating, "/api/tags").json()["models"]
    [running] = get(generating, "/api/ps").json()["models"]
    assert listed["name"] == listed["model"] == running["name"] == f"{MODEL}:latest"
    assert len(listed["digest"]) == 64
    for name in ("digest", "size", "details"):
        assert listed[name] == running[name]
    info = generating.generator.info
    assert running["context_length"] == info.max_context
    assert listed["details"]["quantization_level"] == info.weights
    assert datetime.fromisoformat(listed["modified_at"]) < datetime.fromisoformat(running["expires_at"])
    assert get(generating, "/api/tags", "HEAD").status_code == 200


@pytest.mark.parametrize("fields", [{"model": MODEL}, {"model": None, "name": f"{MODEL}:latest"}])
def test_a_model_is_described(generating: ApiServer, fields: dict[str, Any]) -> None:
    shown = post(generating, "show", verbose=True, **fields).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["template"] == generating.generator.template.source
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == generating.generator.info.max_context


def test_capabilities_are_those_of_the_model(embedding: ApiServer) -> None:
    shown = post(embedding, "show").json()
    assert shown["capabilities"] == ["embedding"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.embedding_length"] == SIZE
    with api_server(template=ChatTemplate(None), constraints=False) as plain:
        shown = post(plain, "show").json()
    assert (shown["capabilities"], shown["template"]) == (["completion"], "")


def test_descriptions_of_unknown_models_are_not_found(generating: ApiServer) -> None:
    assert error(generating, "show", model="other") == (404, "model_not_found", None)
    assert error(generating, "show", model=None) == (400, "invalid_request", "model")


def test_embeddings_are_those_of_openais_api(embedding: ApiServer) -> None:
    texts = ["The quick brown fox", "a dog"]
    found = post(embedding, "embed", input=texts, truncate=True, keep_alive="5m").json()
    with sync_client(embedding) as client:
        other = client.embeddings.create(model=MODEL, input=texts)
    expected = [one.embedding for one in other.data]
    assert np.allclose(found["embeddings"], expected)
    assert found["prompt_eval_count"] == other.usage.prompt_tokens
    assert 0 < found["load_duration"] < found["total_duration"]
    single = post(embedding, "embed", input="a dog", dimensions=5).json()
    assert np.shape(single["embeddings"]) == (1, 5)
    older = post(embedding, "embeddings", prompt="a dog").json()
    assert np.allclose(older["embedding"], expected[1])


def test_without_a_text_there_are_no_embeddings(embedding: ApiServer) -> None:
    assert post(embedding, "embed", input="").json()["embeddings"] == []
    assert post(embedding, "embed", input=[]).json()["embeddings"] == []
    assert post(embedding, "embeddings").json() == {"embedding": []}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("has_page", [True, False])
def test_clients_find_the_server(method: str, has_page: bool) -> None:
    with api_server(constraints=False, has_page=has_page) as server:
        found = get(server, "/", method)
        assert found.status_code == 200
        assert found.headers["link"] == '</openapi.json>; rel="service-desc"'
        assert found.text == ("Ollama is running" if method == "GET" else "")
        browser = get(server, "/", method, accept="text/html,*/*;q=0.8")
        assert browser.status_code == (303 if has_page else 200)
        version = get(server, "/api/version").json()["version"]
        assert all(part.isdecimal() for part in version.split("."))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/pull"),
        ("POST", "/api/create"),
        ("DELETE", "/api/delete"),
        ("HEAD", "/api/blobs/sha256:1"),
        ("GET", "/api/other"),
    ],
)
def test_models_are_not_managed_here(generating: ApiServer, method: str, path: str) -> None:
    found = get(generating, path, method)
    assert found.status_code == 404
    if method != "HEAD":
        assert found.json()["code"] == "not_found"
        assert ("agentflow pull" in found.json()["error"]) == (path != "/api/other")


def test_pages_of_other_origins_are_rejected_in_the_format_of_the_api(generating: ApiServer) -> None:
    found = get(generating, "/api/tags", origin="https://pages.example")
    assert (found.status_code, found.json()["code"]) == (403, "forbidden_origin")
