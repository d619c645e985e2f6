"""Retrieval: the passages that the store finds stand in the question."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import retrieval
from hypothesis import given
from hypothesis import strategies as st
from passages import PASSAGES, QUESTIONS, embed
from retrieval import Store, ask, embedder_of
from scripted_example import run, shown

import agentflow as af
from agentflow.protocol.events import Capabilities

pytestmark = pytest.mark.anyio

SCRIPT = {"query": " soft feathers\nand so on", "answer": " Because it is so. "}


@asynccontextmanager
async def filled(passages: list[str], backend: af.Scripted | None = None) -> AsyncIterator[Store]:
    """A store with vectors of letters, or with a backend's embeddings."""
    if backend is None:
        backend = af.Scripted("")
        backend.generator.capabilities = Capabilities("without embeddings")
    async with af.session(backend=backend) as flow:
        store = Store(embedder_of(flow))
        await store.fill(passages)
        yield store


async def test_the_query_finds_what_the_answer_is_made_of():
    backend = af.Scripted(SCRIPT)
    async with filled(PASSAGES) as store:
        found = await run(ask, backend, "Why?", store)
    owls, other = found.passages.split("\n")
    assert "feathers" in owls
    assert (found.query, found.answer) == ("soft feathers", "Because it is so.")
    assert backend.prompts == [
        "<user>Why? Which words should I search for to find it out? Write only these words.</user>"
        "<assistant>",
        f"<user>{owls}\n{other}\n\nWhy? Answer in one sentence.</user><assistant>",
    ]


@pytest.mark.parametrize("backend", [None, af.Scripted("")], ids=["letters", "embeddings"])
async def test_a_passage_is_the_nearest_to_itself(backend):
    async with filled(PASSAGES, backend) as store:
        assert [await store.search(passage, 1) for passage in PASSAGES] == [[one] for one in PASSAGES]


async def test_the_questions_find_their_passages():
    async with filled(PASSAGES) as store:
        for question, word in zip(QUESTIONS, ["nectar", "glacier", "Owls"], strict=True):
            assert word in (await store.search(question, 1))[0]


WORDS = st.lists(st.sampled_from(["seas", "hills", "wind", "rain", "snow"]), min_size=1, max_size=6).map(
    " ".join
)


@given(passages=st.lists(WORDS, min_size=1, max_size=6, unique=True), query=WORDS, count=st.integers(1, 4))
async def test_the_store_finds_the_nearest_by_cosine(passages, query, count):
    def distance(passage: str) -> float:
        one, other = (embed(text) for text in (passage, query))
        return 1 - float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))

    async with filled(passages) as store:
        found = [distance(passage) for passage in await store.search(query, count)]
    assert found == pytest.approx(sorted(map(distance, passages))[:count], abs=1e-5)


async def test_the_answers_are_shown():
    page = await shown(retrieval.main, af.Scripted(SCRIPT))
    assert page.count("Because it is so.") == len(QUESTIONS)
    assert "about one metre a day" in page
