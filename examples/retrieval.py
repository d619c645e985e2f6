"""Retrieval: the model writes a search query, a local index finds passages, and the model answers from them.

The index is plain Python and ranks passages by BM25. ``map`` connects it to two prompts: it is called with
the query as soon as that is complete, and its result goes into the next prompt. The program submits the whole
pipeline at once and waits only for the answer.

    python examples/retrieval.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial

from example_session import example_parser, run_example
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

import agentflow as af

PASSAGES = [
    "Bees collect nectar from flowers and turn it into honey. A bee colony has one queen.",
    "The lighthouse keeper lights the lamp at dusk and puts it out at dawn.",
    "Bread rises because yeast turns sugar into gas. The dough should rest for two hours.",
    "A glacier is a river of ice. It moves about one metre a day and carves valleys.",
    "Owls hunt at night. Their soft feathers let them fly without a sound.",
    "Salt was once so precious that soldiers were paid with it.",
    "A sundial shows the time by the shadow of a stick. It is of no use at night.",
    "Silk is made by a caterpillar that spins a thread one kilometre long.",
]
QUESTIONS = ["How do bees make honey?", "How fast does a glacier move?", "Why can owls fly without a sound?"]


class Index:
    """BM25 over a few passages: rare words weigh more; repetitions and long passages weigh less."""

    SATURATION = 1.2
    LENGTH_WEIGHT = 0.75

    def __init__(self, passages: list[str]) -> None:
        self.passages = passages
        self._counts = [Counter(words_of(passage)) for passage in passages]
        self._holders = Counter(word for counts in self._counts for word in counts)
        self._mean_length = sum(counts.total() for counts in self._counts) / len(passages)

    def search(self, query: str, count: int) -> list[str]:
        """Returns up to ``count`` passages that share a word with the query, the best first."""
        scores = [self._score(set(words_of(query)), counts) for counts in self._counts]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[:count]
        return [self.passages[i] for i in best if scores[i] > 0]

    def _score(self, query: set[str], counts: Counter[str]) -> float:
        length = 1 - self.LENGTH_WEIGHT + self.LENGTH_WEIGHT * counts.total() / self._mean_length
        return sum(
            math.log(1 + (len(self.passages) - self._holders[word] + 0.5) / (self._holders[word] + 0.5))
            * counts[word]
            * (self.SATURATION + 1)
            / (counts[word] + self.SATURATION * length)
            for word in query
            if counts[word]
        )


def words_of(text: str) -> list[str]:
    """Returns the words in lower case, without a final s and without very common words."""
    common = {"a", "and", "by", "do", "does", "for", "in", "is", "it", "of", "the", "to", "was", "with"}
    return [word.removesuffix("s") for word in re.findall(r"[a-z]+", text.lower()) if word not in common]


@dataclass
class Found:
    """The model's query, the passages and the answer."""

    query: str
    passages: str
    answer: str


@af.program
async def ask(s: af.State, question: str, index: Index) -> Found:
    """Answers a question from the index."""
    searcher = s.copy()
    searcher += af.user(f"Which words should I search for to find out: {question}")
    searcher += af.assistant("Search for:", af.gen("query", max_tokens=16, stop="\n"))
    passages = searcher["query"].map(partial(retrieve, index, question))
    s += af.user(f"{passages}\n\n{question} Answer in one sentence.")
    s += af.assistant(af.gen("answer", max_tokens=32, stop="\n"))
    return Found(await searcher["query"].strip(), await passages, await s["answer"].strip())


def retrieve(index: Index, question: str, query: str) -> str:
    """Returns the passages for a question and the model's query together: each may find what the other
    misses."""
    return "\n".join(index.search(f"{question} {query}", 2)) or "(nothing was found)"


async def main(flow: af.Session, console: Console) -> None:
    """Asks all questions in parallel, and prints the queries, the passages and the answers."""
    index = Index(PASSAGES)
    answers = await flow.map(ask, [(question, index) for question in QUESTIONS])
    for question, found in zip(QUESTIONS, answers, strict=True):
        text = f"[dim]{escape(found.query)}[/]\n[cyan]{escape(found.passages)}[/]\n\n{escape(found.answer)}"
        console.print(Panel(text, title=escape(question), title_align="left"))


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
