"""Skeleton of thought: generates the points of an answer first, then expands all of them in parallel.

After Ning et al., 2024. The paragraphs do not depend on each other, so they are decoded in one batch: the
answer takes as many steps as its longest paragraph. ``join`` appends them to one turn, in order, without
waiting.

    python examples/skeleton_of_thought.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import sys

from example_session import example_parser, run_example
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

import agentflow as af

QUESTION = "How can I sleep better?"


@af.program
async def answer(s: af.State, question: str, num_points: int = 4) -> str:
    """Returns an answer with one paragraph for each point of its skeleton."""
    s += af.system("You give good advice.")
    s += af.user(f"{question} Give {num_points} short tips, of three to six words each.")
    async with s.assistant():
        for number in range(1, num_points + 1):
            s += f"{number})"
            s += af.gen(f"point{number}", max_tokens=12, stop=["\n", "."])
            s += "\n"
    s += af.user("Now explain each tip in one sentence.")
    async with s.assistant():
        async with s.fork(num_points) as branches:
            for number, branch in enumerate(branches, 1):
                # The points are not awaited: a branch starts as soon as the skeleton is complete.
                branch += f"{number}) {s[f'point{number}'].strip()}:"
                branch += af.gen("paragraph", max_tokens=40, stop=["\n"])
        s.join(branches, separator="\n\n")
    return str((await s.messages())[-1]["content"])


async def main(flow: af.Session, console: Console) -> None:
    """Prints the answer."""
    text = await flow.run(answer, QUESTION)
    console.print(Panel(escape(text), title=QUESTION, title_align="left"))


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
