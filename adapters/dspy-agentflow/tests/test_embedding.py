"""``AgentflowEmbedding`` under ``dspy.Embedder``, on scripts."""

from __future__ import annotations

import dspy
import numpy as np
import pytest
from dspy_agentflow import AgentflowEmbedding

import agentflow as af

PASSAGES = ["Bees make honey.", "A glacier is a river of ice.", "Owls hunt at night."]


def test_an_embedder_and_a_retriever_use_it() -> None:
    embedder = dspy.Embedder(AgentflowEmbedding(backend=af.Scripted("")), caching=False)
    vectors = embedder(PASSAGES)
    assert vectors.shape == (3, 64)
    assert np.allclose(embedder(PASSAGES[1]), vectors[1])
    search = dspy.retrievers.Embeddings(embedder=embedder, corpus=PASSAGES, k=1)
    assert search("What do owls hunt?").passages == ["Owls hunt at night."]


def test_dspy_s_cache_does_not_mix_models_and_options() -> None:
    backend = af.Scripted("")
    whole, part = (
        dspy.Embedder(AgentflowEmbedding(backend=backend, dimensions=size), caching=True) for size in (64, 5)
    )
    assert whole(PASSAGES).shape == (3, 64)
    assert part(PASSAGES).shape == (3, 5)
    num_tokens = backend.generator._stats["prompt_tokens"]
    assert whole(PASSAGES).shape == (3, 64)
    assert backend.generator._stats["prompt_tokens"] == num_tokens


def test_f37_dspy_s_cache_does_not_mix_backends() -> None:
    names = {AgentflowEmbedding(backend=af.Scripted("")).__name__ for _ in range(20)}  # ids are used again
    assert len(names) == 20
    assert AgentflowEmbedding(backend=af.Remote("ws://a")).__name__.count("ws://a") == 1


def test_wrong_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    with pytest.raises(af.errors.BadArgument):
        AgentflowEmbedding()
    with pytest.raises(af.errors.BadArgument):
        AgentflowEmbedding("a", backend=af.Scripted(""))
    with pytest.raises(af.errors.BadArgument):
        AgentflowEmbedding(backend=af.Scripted(""))([""])
