"""Extraction: turns texts into typed records, all texts in parallel.

One gen generates a record under its schema, so the record always parses and keeps the limits of the type (the
length of the name, the range of years). The people are fictional.

    python examples/extraction.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from example_session import example_parser, run_example
from msgspec import Meta
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import agentflow as af

TEXTS = [
    "Anna Holm was born in 1867 in a small town. She studied physics and discovered a new metal.",
    "In 1685, Peter Lund was born into a family of organists. He wrote songs for the church.",
    "The runner Emil Novak, who was born in 1922, won three gold medals in one week.",
    "Rosa Feld explained how atoms fall apart. She was born in 1878 and grew up in Vienna.",
]


@dataclass(frozen=True)
class Person:
    """What a text says about a person. ``born``: a year."""

    name: Annotated[str, Meta(min_length=1, max_length=40)]
    born: Annotated[int, Meta(ge=1000, le=2100)]
    kind: Literal["scientist", "musician", "athlete"]


@af.program
async def extract(s: af.State, text: str) -> Person:
    """Returns the record of a text."""
    person = af.gen("person", schema=Person, max_tokens=96)
    s += af.system("You read texts about people and write down what they say, as JSON.")
    s += af.user(f"{text}\n\nWrite this person's name, year of birth and kind as JSON.")
    s += af.assistant(person)
    return await s[person]


async def main(flow: af.Session, console: Console) -> None:
    """Prints the records."""
    people = await flow.map(extract, TEXTS)
    table = Table("text", "name", "born", "kind", title=f"{len(people)} records", show_lines=True)
    for text, person in zip(TEXTS, people, strict=True):
        table.add_row(escape(text), escape(person.name), str(person.born), person.kind)
    console.print(table)


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
