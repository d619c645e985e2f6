"""Extraction: texts become typed records, all texts at once and each field in a branch of its own.

Where the backend can keep a schema, one gen writes the whole record. Where it can not (the capabilities say
so: the embedded engine does not yet), every field is asked for by itself, side by side after the one text:
a choice by select, a number by a pattern, free text up to the end of its line. The people are invented.

    python examples/extraction.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Literal

from example_session import example_parser, run_example
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import agentflow as af

Kind = Literal["scientist", "musician", "athlete"]
KINDS: dict[str, Kind] = {"A scientist": "scientist", "A musician": "musician", "An athlete": "athlete"}
TEXTS = [
    "Anna Holm was born in 1867 in a small town. She studied physics and discovered a new metal.",
    "In 1685, Peter Lund was born into a family of organists. He wrote songs for the church.",
    "The runner Emil Novak, who was born in 1922, won three gold medals in one week.",
    "Rosa Feld explained how atoms fall apart. She was born in 1878 and grew up in Vienna.",
]


@dataclass(frozen=True)
class Person:
    """What a text tells of somebody. ``born``: a year, 0 where none was found."""

    name: str
    born: int
    kind: Kind


@af.program
async def extract(s: af.State, text: str) -> Person:
    """The record of a text, in the way that the backend allows."""
    s += af.system("You answer questions about a text, in a few words.")
    s.begin("user")
    s += text + "\n\n"
    if "schema" in s.session.capabilities.constraints:
        return await whole(s)
    return await by_fields(s)


@af.program
async def whole(s: af.State) -> Person:
    """One gen for all fields; its value is a ``Person``."""
    person = af.gen("person", schema=Person, max_tokens=64)
    s += "Write this person's name, year of birth and kind as JSON."
    s.end()
    s += af.assistant(person)
    return await s[person]


@af.program
async def by_fields(s: af.State) -> Person:
    """One branch for each field; each goes on in the turn that holds the text."""
    async with s.fork(3) as branches:
        name, born, kind = branches
        name += "What is the name of this person?"
        born += "In which year was this person born?"
        kind += "What was this person?"
        for branch in branches:
            branch.end()
        name += af.assistant(
            "The name of this person is", af.gen("name", max_tokens=12, stop=["\n", ".", ","])
        )
        born += af.assistant(
            "This person was born in the year", af.gen("born", max_tokens=8, stop=["\n", "."])
        )
        kind += af.assistant(af.select("kind", list(KINDS)))
    year = born["born"].map(year_in)
    return Person(await name["name"].strip(), int(await year), KINDS[await kind["kind"]])


def year_in(text: str) -> str:
    """The first number of four digits, or 0."""
    found = re.search(r"\b[12]\d{3}\b", text)
    return found.group() if found else "0"


async def main(flow: af.Session, console: Console) -> None:
    """Shows the records."""
    people = await flow.map(extract, TEXTS)
    table = Table("text", "name", "born", "kind", title=f"{len(people)} records", show_lines=True)
    for text, person in zip(TEXTS, people, strict=True):
        table.add_row(escape(text), escape(person.name), str(person.born or "?"), person.kind)
    console.print(table)


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
