"""``POST /api/embed`` and the older ``POST /api/embeddings``: the embeddings of texts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentflow.protocol.events import Usage
from agentflow.runtime.generator import EmbeddingOptions
from agentflow.server.compatible.embeddings import compute_embeddings, reply_written
from agentflow.server.errors import invalid_field
from agentflow.server.http.call import ApiCall
from agentflow.server.ollama.request import resolve_name
from agentflow.server.ollama.types import (
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)


async def embed(call: ApiCall) -> None:
    """Makes the embeddings of one text or several."""
    began_ns = time.perf_counter_ns()
    body = await call.process(call.read, OllamaEmbedRequest)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if body.input in ("", []):
        texts = []  # clients send this to load a model
    most = call.service.http_limits.max_embedding_inputs
    if len(texts) > most:
        raise invalid_field("input", f"{len(texts):,} texts exceed the limit of {most:,} for a request")
    prepared_ns = time.perf_counter_ns()
    vectors, usage = await _embedded(call, body.model, texts, "input", body.dimensions)
    total = time.perf_counter_ns() - began_ns

    def answer() -> OllamaEmbedAnswer:
        return OllamaEmbedAnswer(
            model=body.model,
            embeddings=[vector.tolist() for vector in vectors],
            total_duration=total,
            load_duration=prepared_ns - began_ns,
            prompt_eval_count=usage.prompt_tokens,
        )

    await reply_written(call, vectors, answer)


async def embed_prompt(call: ApiCall) -> None:
    """Makes the embedding of one text."""
    body = await call.process(call.read, OllamaEmbeddingsRequest)
    texts = [body.prompt] if body.prompt else []
    vectors, _ = await _embedded(call, body.model, texts, "prompt")

    def answer() -> OllamaEmbeddingsAnswer:
        return OllamaEmbeddingsAnswer(embedding=vectors[0].tolist() if vectors else [])

    await reply_written(call, vectors, answer)


async def _embedded(
    call: ApiCall, model: str, texts: Sequence[str], param: str, dimensions: int | None = None
) -> tuple[Sequence[NDArray[np.float32]], Usage]:
    """The embeddings. ``param``: the field of the texts, for errors."""
    generator = call.embedder(resolve_name(call, model))
    if not texts:
        async with generator.metered():
            return [], Usage()
    if "" in texts:
        raise invalid_field(f"{param}[{texts.index('')}]", "an empty text has no embedding")
    return await compute_embeddings(
        call, generator, texts, EmbeddingOptions(None, None, dimensions), param=param
    )
