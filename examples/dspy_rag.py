"""A DSPy program on agentflow: retrieves passages from a local index and answers from them.

The program is plain DSPy; only the LM is agentflow's. Answers are constrained to the format that DSPy parses,
and all questions run in parallel.

    pip install ./adapters/dspy-agentflow
    python examples/dspy_rag.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import asyncio
import sys

import dspy
import numpy as np
from dspy_agentflow import AgentflowLM
from example_session import example_parser
from passages import PASSAGES, QUESTIONS, embed
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel


class Index:
    """Passages with their vectors, compared by the cosine."""

    def __init__(self, passages: list[str]) -> None:
        self.passages = passages
        vectors = np.stack([embed(passage) for passage in passages])
        self._vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def search(self, query: str, count: int) -> list[str]:
        """Returns the ``count`` nearest passages, the nearest first."""
        nearest = np.argsort(-(self._vectors @ embed(query)), kind="stable")[:count]
        return [self.passages[i] for i in nearest]


class Rag(dspy.Module):
    """Answers a question from the passages that the index finds."""

    def __init__(self, index: Index) -> None:
        super().__init__()
        self.index = index
        self.answer = dspy.ChainOfThought("passages, question -> answer")

    async def aforward(self, question: str) -> dspy.Prediction:
        """Returns the answer, the reasoning and the passages."""
        passages = self.index.search(question, 2)
        found = await self.answer.acall(passages=passages, question=question)
        return dspy.Prediction(passages=passages, reasoning=found.reasoning, answer=found.answer)


async def main(lm: AgentflowLM, console: Console) -> None:
    """Asks all questions in parallel, and prints the passages, the reasoning and the answers."""
    rag = Rag(Index(PASSAGES))
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        answers = await asyncio.gather(*[rag.acall(question=question) for question in QUESTIONS])
    for question, found in zip(QUESTIONS, answers, strict=True):
        passages = "\n".join(found.passages)
        text = f"[cyan]{escape(passages)}[/]\n\n[dim]{escape(found.reasoning)}[/]\n\n{escape(found.answer)}"
        console.print(Panel(text, title=escape(question), title_align="left"))


def figures(lm: AgentflowLM) -> str:
    """Returns one line about the tokens of all calls."""
    usages = [call["usage"] for call in lm.history]
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(dict(usage["prompt_tokens_details"])["cached_tokens"] for usage in usages)
    output = sum(usage["completion_tokens"] for usage in usages)
    return f"{prompt:,} prompt tokens, {cached / max(1, prompt):.0%} of them cached; {output:,} generated"


if __name__ == "__main__":
    options = example_parser(__doc__).parse_args()
    the_console = Console()
    the_lm = AgentflowLM(base_url=options.url, max_tokens=96, cache=False, num_retries=0)
    try:
        asyncio.run(main(the_lm, the_console))
    except Exception as error:
        the_console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        sys.exit(1)
    the_console.print(figures(the_lm), style="dim")
