"""``AgentflowEmbedding``: a callable for ``dspy.Embedder``, on agentflow."""

from __future__ import annotations

import os
from typing import Any

import agentflow as af
from agentflow.integrations import EmbedCall, cache_key, connection_through, embedding_connection_to


class AgentflowEmbedding:
    """Computes embeddings with ``model``, in this process or on an agentflow server, for ``dspy.Embedder``.

    ``model``: one of the server's embedding models (default: its first), or without a server one that
    ``agentflow pull`` knows, ``OWNER/NAME`` or a folder. ``base_url``: ``ws://…`` or ``wss://…``; default:
    the environment variable AGENTFLOW_URL. ``api_key``: default: AGENTFLOW_API_KEY. ``backend``: an agentflow
    backend instead; for tests, ``af.Scripted``. The other arguments are passed to ``flow.embed``.

    >>> embedder = dspy.Embedder(AgentflowEmbedding("Qwen/Qwen3-Embedding-0.6B"))
    >>> search = dspy.retrievers.Embeddings(embedder=embedder, corpus=passages, k=2)
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        backend: Any = None,
        dimensions: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_retries: int = 2,
    ) -> None:
        if backend is None:
            base_url = base_url or os.environ.get("AGENTFLOW_URL") or None
            key = api_key or os.environ.get("AGENTFLOW_API_KEY") or None
            self._connection = embedding_connection_to(base_url, model, key)
        elif base_url is None and model is None:
            self._connection = connection_through(backend)
        else:
            raise af.errors.BadArgument(
                "AgentflowEmbedding: a backend cannot be combined with a base_url or a model"
            )
        self._options = (dimensions, prompt, prompt_name)
        self._max_retries = max_retries
        # DSPy's cache knows a callable by its name: one for each model and its options.
        own = (base_url, model, None if backend is None else cache_key(backend), *self._options)
        self.__name__ = f"{type(self).__name__}{own!r}"

    def __call__(self, texts: list[str]) -> list[list[float]]:
        """The embeddings of the texts, in their order."""
        return self._connection.embed(EmbedCall(texts, *self._options), max_retries=self._max_retries)

    def __deepcopy__(self, memo: dict[int, Any]) -> AgentflowEmbedding:
        """Itself: DSPy copies objects that it caches and optimizes, but the process has one connection."""
        return self
