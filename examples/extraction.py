"""Extraction: turns PDFs into typed records, all of them in parallel, and continues where it was stopped.

One gen generates a record under its schema, so the record always parses and keeps the limits of the type (the
length of the name, the range of years). With ``--resume``, each record is appended to a file as soon as it is
there: after Ctrl-C, the same command reads only the PDFs that are left. The people are fictional.

    python examples/extraction.py [--url ws://127.0.0.1:8410] [--resume people.jsonl] [PDF …]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import anyio.to_thread
from example_session import example_parser, run_example
from msgspec import Meta
from pypdf import PdfReader
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import agentflow as af

PAPERS = sorted((Path(__file__).parent / "documents" / "people").glob("*.pdf"))


@dataclass(frozen=True)
class Person:
    """What a text says about a person. ``born``: a year."""

    name: Annotated[str, Meta(min_length=1, max_length=40)]
    born: Annotated[int, Meta(ge=1000, le=2100)]
    kind: Literal["scientist", "musician", "athlete"]


def text_of(pdf: str) -> str:
    """Returns the text of all pages, on one line."""
    return " ".join(" ".join(page.extract_text().split()) for page in PdfReader(pdf).pages)


@af.program
async def extract(s: af.State, pdf: str) -> Person:
    """Returns the record of a PDF."""
    text = await anyio.to_thread.run_sync(text_of, pdf)  # a long PDF would block the event loop
    person = af.gen("person", schema=Person, max_tokens=96)
    s += af.system("You read texts about people and write down what they say, as JSON.")
    s += af.user(f"{text}\n\nWrite this person's name, year of birth and kind as JSON.")
    s += af.assistant(person)
    return await s[person]


async def main(
    flow: af.Session, console: Console, papers: Sequence[Path] = PAPERS, resume: str | None = None
) -> None:
    """Prints the records."""
    people = await flow.map(extract, [str(paper) for paper in papers], resume=resume)
    table = Table("PDF", "name", "born", "kind", title=f"{len(people)} records")
    for paper, person in zip(papers, people, strict=True):
        table.add_row(escape(paper.name), escape(person.name), str(person.born), person.kind)
    console.print(table)


if __name__ == "__main__":
    parser = example_parser(__doc__)
    parser.add_argument(
        "papers", nargs="*", type=Path, default=PAPERS, metavar="PDF", help="the PDFs to read"
    )
    parser.add_argument("--resume", metavar="FILE", help="keep the records there, and make only what is left")
    given = parser.parse_args()
    for missing in [paper for paper in given.papers if not paper.is_file()]:
        parser.error(f"there is no file {missing}")
    sys.exit(run_example(partial(main, papers=given.papers, resume=given.resume), given))
