"""Retrieval: the model writes a search query, a vector store finds passages, and the model answers from them.

The store is SQLite with the extension sqlite-vec. ``flow.embed`` makes its vectors, with an embedding model
that the same session has next to the model that writes. Without one, the vectors compare groups of three
letters, not meanings (``passages.embed``).

    python examples/retrieval.py --embed-model sentence-transformers/all-MiniLM-L6-v2
    python examples/retrieval.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import apsw  # SQLite, also where Python's own cannot load extensions
import sqlite_vec
from example_session import example_parser, run_example
from passages import PASSAGES, QUESTIONS, embed
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

import agentflow as af

Embed = Callable[[list[str]], Awaitable[list[list[float]]]]


class Store:
    """Passages with their vectors, compared by the cosine."""

    def __init__(self, embed: Embed) -> None:
        self._embed = embed
        self._database = apsw.Connection(":memory:")
        self._database.enable_load_extension(True)
        self._database.load_extension(sqlite_vec.loadable_path())

    async def fill(self, passages: list[str]) -> None:
        """Adds the passages."""
        vectors = await self._embed(passages)
        self._database.execute(
            "create virtual table passages using vec0("
            f"vector float[{len(vectors[0])}] distance_metric=cosine, +text text)"
        )
        rows = [
            (sqlite_vec.serialize_float32(vector), passage)
            for vector, passage in zip(vectors, passages, strict=True)
        ]
        self._database.executemany("insert into passages(vector, text) values (?, ?)", rows)

    async def search(self, query: str, count: int) -> list[str]:
        """Returns the ``count`` nearest passages, the nearest first."""
        [vector] = await self._embed([query])
        found = self._database.execute(
            "select text from passages where vector match ? and k = ? order by distance",
            (sqlite_vec.serialize_float32(vector), count),
        )
        return [str(text) for (text,) in found]


@dataclass
class Found:
    """The model's query, the passages and the answer."""

    query: str
    passages: str
    answer: str


@af.program
async def ask(s: af.State, question: str, store: Store) -> Found:
    """Answers a question from the store."""
    searcher = s.copy()
    searcher += af.user(f"{question} Which words should I search for to find it out? Write only these words.")
    searcher += af.assistant(af.gen("query", max_tokens=16, stop="\n"))
    query = await searcher["query"].strip()
    # The question and the query together: each may find passages that the other misses.
    passages = "\n".join(await store.search(f"{question} {query}", 2))
    s += af.user(f"{passages}\n\n{question} Answer in one sentence.")
    s += af.assistant(af.gen("answer", max_tokens=32, stop="\n"))
    return Found(query, passages, await s["answer"].strip())


def embedder_of(flow: af.Session) -> Embed:
    """Returns the session's embedding model, or one of letters where it has none."""

    async def letters(texts: list[str]) -> list[list[float]]:
        return [embed(text).tolist() for text in texts]

    return flow.embed if flow.capabilities.embedding_models else letters


async def main(flow: af.Session, console: Console) -> None:
    """Asks all questions in parallel, and prints the queries, the passages and the answers."""
    store = Store(embedder_of(flow))
    await store.fill(PASSAGES)
    answers = await flow.map(ask, [(question, store) for question in QUESTIONS])
    for question, found in zip(QUESTIONS, answers, strict=True):
        text = f"[dim]{escape(found.query)}[/]\n[cyan]{escape(found.passages)}[/]\n\n{escape(found.answer)}"
        console.print(Panel(text, title=escape(question), title_align="left"))


if __name__ == "__main__":
    parser = example_parser(__doc__)
    parser.add_argument("--embed-model", help="a model for embeddings, or its name on the server")
    sys.exit(run_example(main, parser.parse_args()))
