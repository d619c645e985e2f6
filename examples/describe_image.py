"""Describe image: one picture, several questions about it at the same time, and a typed answer.

The picture is part of the prompt that the branches of the fork share: a server computes it once, and an API
reads it from its cache. Without a model with vision, the example only says so: give the address of a server
or an API that has one, such as ``--url openai:gpt-4.1-mini``.

    python examples/describe_image.py [--url ws://127.0.0.1:8410] [PICTURE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from example_session import example_parser, run_example
from msgspec import Meta
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import agentflow as af

PICTURE = Path(__file__).parent / "documents" / "visitors.png"
QUESTIONS = ("What does the picture show?", "Which words are in it?", "Which colors does it have?")


@dataclass(frozen=True)
class Picture:
    """The answer in a form that a program can use."""

    kind: Literal["photo", "chart", "drawing", "text"]
    title: Annotated[str, Meta(max_length=80)]


@af.program
async def describe(
    s: af.State, picture: af.Image | Path, questions: Sequence[str]
) -> tuple[list[str], Picture]:
    """Returns the answers to the questions about a picture, and its kind and title."""
    record = af.gen("record", schema=Picture, max_tokens=96)
    s += af.system("You look at pictures and answer questions about them briefly.")
    async with s.user():
        s += af.image(picture)
        *asked, last = s.fork(len(questions) + 1)
    for branch, question in zip(asked, questions, strict=True):
        branch += f"\n{question}"
        branch.end()
        branch += af.assistant(af.gen("answer", max_tokens=64))
    last += "\nWrite the kind and the title of the picture as JSON."
    last.end()
    last += af.assistant(record)
    return [await branch["answer"] for branch in asked], await last[record]


async def main(flow: af.Session, console: Console, picture: Path = PICTURE) -> None:
    """Prints the answers."""
    name, model = next(iter(flow.models.items()))
    if not model.images:
        console.print(f"{escape(name)} accepts no images: give --url of a model with vision.")
        return
    answers, found = await flow.run(describe, picture, QUESTIONS)
    table = Table("question", "answer", title=f"{escape(picture.name)}: {found.kind}, {escape(found.title)}")
    for question, answer in zip(QUESTIONS, answers, strict=True):
        table.add_row(escape(question), escape(answer.strip()))
    console.print(table)


if __name__ == "__main__":
    parser = example_parser(__doc__)
    parser.add_argument("picture", nargs="?", type=Path, default=PICTURE, metavar="PICTURE")
    given = parser.parse_args()
    sys.exit(run_example(partial(main, picture=given.picture), given))
