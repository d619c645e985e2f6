"""Self-consistency: samples several lines of thought and takes the majority of their answers.

After Wang et al., 2023. The lines of thought are the branches of one fork: they share the question's keys and
values and are decoded in one batch. A line without a number abstains.

    python examples/self_consistency.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass, field

from example_session import example_parser, run_example
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import agentflow as af

QUESTION = "What is 2 times 9?"


@dataclass
class Poll:
    """``thoughts``: each line of thought with its vote, or None if it abstains."""

    thoughts: list[tuple[str, int | None]] = field(default_factory=list)

    @property
    def votes(self) -> Counter[int]:
        """The number of votes for each answer."""
        return Counter(vote for _, vote in self.thoughts if vote is not None)

    @property
    def winner(self) -> int | None:
        """The answer with the most votes; among equals, the first one."""
        return next((answer for answer, _ in self.votes.most_common(1)), None)


@af.program
async def poll(s: af.State, question: str, num_voters: int = 8) -> Poll:
    """Samples ``num_voters`` answers to a question whose answer is an integer."""
    s += af.user(question)
    async with s.fork(num_voters) as voters:
        for voter in voters:
            thought = af.gen("thought", max_tokens=40, stop=["\n\n"], temperature=0.7, top_p=0.95)
            vote = af.gen("vote", max_tokens=10, stop=["\n", "."])
            voter += af.assistant("Let us think:", thought, "\nThe answer is", vote)
    thoughts, votes = await voters.gather("thought"), await voters.gather("vote")
    return Poll([(thought, number_in(vote)) for thought, vote in zip(thoughts, votes, strict=True)])


def number_in(text: str) -> int | None:
    """Returns the last integer in ``text``, if there is one."""
    found = re.findall(r"\d{1,9}", text)
    return int(found[-1]) if found else None


async def main(flow: af.Session, console: Console) -> None:
    """Prints every line of thought, its vote, and the count."""
    result = await flow.run(poll, QUESTION)
    table = Table("line of thought", "vote", title=QUESTION, show_lines=True)
    for thought, vote in result.thoughts:
        table.add_row(escape(" ".join(thought.split())), "abstains" if vote is None else str(vote))
    console.print(table)
    for answer, count in result.votes.most_common():
        console.print(f"{answer:>10} {'█' * count} {count}", style="bold" if answer == result.winner else "")


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
