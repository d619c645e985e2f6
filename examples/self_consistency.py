"""Self-consistency: samples several lines of thought and takes the majority of their answers.

After Wang et al., 2023. The lines of thought are the branches of one fork: they share the question's keys and
values and are decoded in one batch. A line without a number abstains. The vote ends as soon as no other
answer can win, and cancels the lines that have not voted by then.

    python examples/self_consistency.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from example_session import example_parser, run_example
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import agentflow as af

QUESTION = "What is 2 times 9?"


@dataclass(frozen=True)
class Poll:
    """``thoughts``: the lines of thought that have ended, each with its vote, or None if it abstains."""

    winner: int | None
    thoughts: list[tuple[str, int | None]]
    num_cancelled: int


@af.program
async def poll(s: af.State, question: str, num_voters: int = 8) -> Poll:
    """Samples up to ``num_voters`` answers to a question whose answer is an integer."""
    s += af.user(question)
    async with s.fork(num_voters) as voters:
        for voter in voters:
            thought = af.gen("thought", max_tokens=40, stop=["\n\n"], temperature=0.7, top_p=0.95)
            vote = af.gen("vote", max_tokens=10, stop=["\n", "."])
            voter += af.assistant("Let us think:", thought, "\nThe answer is", vote)
    winner = await voters.vote("vote", key=number_in)
    ended = [voter for voter in voters if voter["vote"].has_value]
    thoughts = [(voter["thought"].text, number_in(voter["vote"].text)) for voter in ended]
    return Poll(winner, thoughts, num_voters - len(ended))


def number_in(text: str) -> int | None:
    """Returns the last integer in ``text``, if there is one."""
    found = re.findall(r"\d{1,9}", text)
    return int(found[-1]) if found else None


async def main(flow: af.Session, console: Console) -> None:
    """Prints the lines of thought, their votes, and the winner."""
    result = await flow.run(poll, QUESTION)
    table = Table("line of thought", "vote", title=QUESTION, show_lines=True)
    for thought, vote in result.thoughts:
        table.add_row(escape(" ".join(thought.split())), "abstains" if vote is None else str(vote))
    console.print(table)
    console.print(f"The answer: {result.winner}", style="bold")
    console.print(f"Lines of thought that could not change it, and were cancelled: {result.num_cancelled}")


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
