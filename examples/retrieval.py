"""Retrieval: the model writes a search query, a vector store finds passages, and the model answers from them.

The store is SQLite with the extension sqlite-vec. ``map`` connects it to two prompts: it is called with the
query as soon as that is complete, and its result goes into the next prompt. The program submits the whole
pipeline at once and waits only for the answer. ``passages.embed`` compares groups of three letters, not
meanings: it needs no model, and a real program calls an embedding model there.

    python examples/retrieval.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

import apsw  # SQLite, also where Python's own cannot load extensions
import sqlite_vec
from example_session import example_parser, run_example
from passages import PASSAGES, QUESTIONS, SIZE, embed
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

import agentflow as af


class Store:
    """Passages with their vectors, compared by the cosine."""

    def __init__(self, passages: list[str]) -> None:
        self._database = apsw.Connection(":memory:")
        self._database.enable_load_extension(True)
        self._database.load_extension(sqlite_vec.loadable_path())
        self._database.execute(
            "create virtual table passages using vec0("
            f"vector float[{SIZE}] distance_metric=cosine, +text text)"
        )
        rows = [(embed(passage).tobytes(), passage) for passage in passages]
        self._database.executemany("insert into passages(vector, text) values (?, ?)", rows)

    def search(self, query: str, count: int) -> list[str]:
        """Returns the ``count`` nearest passages, the nearest first."""
        found = self._database.execute(
            "select text from passages where vector match ? and k = ? order by distance",
            (embed(query).tobytes(), count),
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
    searcher += af.user(f"Which words should I search for to find out: {question}")
    searcher += af.assistant("Search for:", af.gen("query", max_tokens=16, stop="\n"))
    passages = searcher["query"].map(partial(retrieve, store, question))
    s += af.user(f"{passages}\n\n{question} Answer in one sentence.")
    s += af.assistant(af.gen("answer", max_tokens=32, stop="\n"))
    return Found(await searcher["query"].strip(), await passages, await s["answer"].strip())


def retrieve(store: Store, question: str, query: str) -> str:
    """Returns the passages for a question and the model's query together: each may find what the other
    misses."""
    return "\n".join(store.search(f"{question} {query}", 2))


async def main(flow: af.Session, console: Console) -> None:
    """Asks all questions in parallel, and prints the queries, the passages and the answers."""
    store = Store(PASSAGES)
    answers = await flow.map(ask, [(question, store) for question in QUESTIONS])
    for question, found in zip(QUESTIONS, answers, strict=True):
        text = f"[dim]{escape(found.query)}[/]\n[cyan]{escape(found.passages)}[/]\n\n{escape(found.answer)}"
        console.print(Panel(text, title=escape(question), title_align="left"))


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
