"""``AgentflowEmbeddings``: LangChain's own suites on a script, its prompts, and a vector store."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from langchain_agentflow import AgentflowEmbeddings, AgentflowInvalidRequestError
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

import agentflow as af


class OnAScript:
    @property
    def embeddings_class(self) -> type[AgentflowEmbeddings]:
        return AgentflowEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"backend": af.Scripted("")}


class TestUnit(OnAScript, EmbeddingsUnitTests):
    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"AGENTFLOW_API_KEY": "secret"}, {"backend": af.Scripted("")}, {"api_key": "secret"}


class TestIntegration(OnAScript, EmbeddingsIntegrationTests):
    pass


async def test_queries_and_documents_have_prompts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = af.Scripted("")
    embed, seen = backend.generator.embed, []

    async def observed(texts: Any, options: Any) -> Any:
        seen.append((options.prompt, options.prompt_name, options.dimensions, *texts))
        return await embed(texts, type(options)(dimensions=options.dimensions))

    monkeypatch.setattr(backend.generator, "embed", observed)
    made = AgentflowEmbeddings(
        backend=backend, dimensions=5, query_prompt_name="query", document_prompt="passage: "
    )
    assert len(made.embed_query("a")) == 5
    assert [len(vector) for vector in await made.aembed_documents(["b", "c"])] == [5, 5]
    assert seen == [(None, "query", 5, "a"), ("passage: ", None, 5, "b", "c")]


def test_a_vector_store_finds_the_nearest() -> None:
    store = InMemoryVectorStore(AgentflowEmbeddings(backend=af.Scripted("")))
    store.add_texts(["Bees make honey.", "A glacier is a river of ice."])
    [found] = store.similarity_search("How do bees make honey?", k=1)
    assert found.page_content == "Bees make honey."


def test_wrong_calls_are_langchain_s_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AgentflowInvalidRequestError):
        AgentflowEmbeddings(backend=af.Scripted("")).embed_query("")
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    with pytest.raises(pydantic.ValidationError, match="model"):
        AgentflowEmbeddings()
    with pytest.raises(pydantic.ValidationError):
        AgentflowEmbeddings(modell="a")  # type: ignore[call-arg]
