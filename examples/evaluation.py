"""An evaluation: two programs on the same questions, and how many answers of each are right.

Each program's answers are kept in a file as they come. With ``--results FOLDER`` the files stay: after
Ctrl-C, the same command runs only questions without answers.

    python examples/evaluation.py [--results FOLDER] [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

from example_session import example_parser, run_example
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import agentflow as af


class Case(NamedTuple):
    """``expected``: a part of the right answer."""

    question: str
    expected: str


CASES = [
    Case("What is the capital of France?", "Paris"),
    Case("How many days has a week?", "7"),
    Case("Which planet is closest to the sun?", "Mercury"),
    Case("What is the chemical symbol of water?", "H2O"),
    Case("Who wrote Romeo and Juliet?", "Shakespeare"),
    Case("What is the largest ocean on Earth?", "Pacific"),
    Case("What is 3 + 4?", "7"),
    Case("In which country is Mount Fuji?", "Japan"),
]


@af.program
async def direct(s: af.State, question: str) -> str:
    """Answers without reasoning."""
    s += af.user(question)
    s += af.assistant(af.gen("answer", max_tokens=24, stop="\n"))
    return await s["answer"].strip()


@af.program
async def brief(s: af.State, question: str) -> str:
    """Answers in one word, as in an example."""
    s += af.system("You answer with one word or number.")
    s += af.user("How many legs has a dog?") + af.assistant("4")
    s += af.user(question)
    s += af.assistant(af.gen("answer", max_tokens=8, stop="\n"))
    return await s["answer"].strip()


PROGRAMS = [direct, brief]


async def evaluate(flow: af.Session, folder: Path) -> dict[str, list[str]]:
    """Returns the answers of each program, in the order of the cases."""
    questions = [case.question for case in CASES]
    return {
        program.__name__: await flow.map(
            program, questions, retries=2, resume=folder / f"{program.__name__}.jsonl"
        )
        for program in PROGRAMS
    }


def is_right(answer: str, case: Case) -> bool:
    """Whether the answer contains the expected text."""
    return case.expected.lower() in answer.lower()


async def main(flow: af.Session, console: Console, folder: Path | None = None) -> None:
    """Prints all answers and the scores."""
    with tempfile.TemporaryDirectory() as temporary:
        answers = await evaluate(flow, folder or Path(temporary))
    table = Table("question", *answers, title=f"{len(CASES)} questions", show_footer=True)
    for row, case in enumerate(CASES):
        cells = [given[row] for given in answers.values()]
        styled = [f"[{'green' if is_right(cell, case) else 'red'}]{escape(cell)}[/]" for cell in cells]
        table.add_row(escape(case.question), *styled)
    for column, given in zip(table.columns[1:], answers.values(), strict=True):
        num_right = sum(is_right(answer, case) for answer, case in zip(given, CASES, strict=True))
        column.footer = f"{num_right / len(CASES):.0%} right"
    console.print(table)


if __name__ == "__main__":
    parser = example_parser(__doc__)
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="the folder of the files (default: a temporary one)"
    )
    options = parser.parse_args()
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
    sys.exit(run_example(partial(main, folder=options.results), options))
