"""``AgentflowEmbeddings``: LangChain's embeddings on agentflow, for its vector stores and retrievers."""

from __future__ import annotations

import os
from typing import Any, Self

from langchain_core.embeddings import Embeddings
from langchain_core.utils import secret_from_env
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, model_validator

from agentflow.integrations import EmbedCall, ModelConnection, connection_through, embedding_connection_to
from langchain_agentflow.errors import langchain_errors


class AgentflowEmbeddings(BaseModel, Embeddings):
    """An embedding model, in this process or on an agentflow server.

    >>> embeddings = AgentflowEmbeddings(model="Qwen/Qwen3-Embedding-0.6B", query_prompt_name="query")
    >>> vectors = embeddings.embed_documents(["Plants turn light into sugar.", "Bees make honey."])
    >>> vector = embeddings.embed_query("How do plants eat?")
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    model_name: str | None = Field(default=None, alias="model")
    """One of the server's embedding models (default: its first), or without a server one that
    ``agentflow pull`` knows, ``OWNER/NAME`` or a folder."""

    base_url: str | None = Field(default_factory=lambda: os.environ.get("AGENTFLOW_URL") or None)
    """``ws://…`` or ``wss://…``. Without it, the model runs in this process."""

    api_key: SecretStr | None = Field(default_factory=secret_from_env("AGENTFLOW_API_KEY", default=None))
    """The server's API key."""

    backend: Any = Field(default=None, exclude=True, repr=False)
    """An agentflow backend, instead of ``base_url`` and ``model``; for tests, ``af.Scripted``."""

    dimensions: int | None = None
    """Keep only the first ``dimensions`` dimensions, for models that are trained for it."""
    query_prompt: str | None = None
    """Inserted before each query. ``query_prompt_name``: the model's own prompt with this name instead."""
    query_prompt_name: str | None = None
    document_prompt: str | None = None
    """Inserted before each document. ``document_prompt_name``: the model's own prompt with this name
    instead."""
    document_prompt_name: str | None = None
    max_retries: int = 2
    """Retries of a call after a transient failure."""

    _connection: ModelConnection = PrivateAttr()

    @model_validator(mode="after")
    def _connect(self) -> AgentflowEmbeddings:
        if self.backend is not None:
            self._connection = connection_through(self.backend)
        else:
            key = None if self.api_key is None else self.api_key.get_secret_value()
            self._connection = embedding_connection_to(self.base_url, self.model_name, key)
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return super().__deepcopy__({**(memo or {}), id(self.backend): self.backend})

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The embeddings of documents, in their order."""
        with langchain_errors():
            return self._connection.embed(self._documents(texts), max_retries=self.max_retries)

    def embed_query(self, text: str) -> list[float]:
        """The embedding of a query."""
        with langchain_errors():
            return self._connection.embed(self._query(text), max_retries=self.max_retries)[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """Like ``embed_documents``, without blocking the event loop."""
        with langchain_errors():
            return await self._connection.aembed(self._documents(texts), max_retries=self.max_retries)

    async def aembed_query(self, text: str) -> list[float]:
        """Like ``embed_query``, without blocking the event loop."""
        with langchain_errors():
            return (await self._connection.aembed(self._query(text), max_retries=self.max_retries))[0]

    def _documents(self, texts: list[str]) -> EmbedCall:
        return EmbedCall(texts, self.dimensions, self.document_prompt, self.document_prompt_name)

    def _query(self, text: str) -> EmbedCall:
        return EmbedCall([text], self.dimensions, self.query_prompt, self.query_prompt_name)
