"""Pages about people, and the forms that a model fills in from them."""

from __future__ import annotations

import re

FIELDS = ("Name", "Born", "Died", "Education", "Field", "Employer", "Known for", "Summary")
PEOPLE = (
    (
        "Augusta Ada King, Countess of Lovelace",
        "10 December 1815 in London, England",
        "27 November 1852 in Marylebone, London",
        "Private lessons by Mary Somerville and Augustus De Morgan",
        "Mathematics and the theory of computing machines",
        "None: she worked with Charles Babbage without pay",
        "The notes on the Analytical Engine, with a program that computes Bernoulli numbers",
        "An English mathematician who saw that a machine for numbers could also work with other things.",
    ),
    (
        "Grace Brewster Murray Hopper",
        "9 December 1906 in New York City, New York",
        "1 January 1992 in Arlington County, Virginia",
        "Vassar College and a doctorate in mathematics at Yale University",
        "Mathematics, compilers and programming languages",
        "United States Navy, Harvard University and Remington Rand",
        "The A-0 system and FLOW-MATIC, from which COBOL was made",
        "An American computer scientist and rear admiral who wrote one of the first linkers.",
    ),
    (
        "Edsger Wybe Dijkstra",
        "11 May 1930 in Rotterdam, Netherlands",
        "6 August 2002 in Nuenen, Netherlands",
        "Leiden University and a doctorate at the University of Amsterdam",
        "Computer science, above all algorithms and distributed systems",
        "Burroughs Corporation, Eindhoven University of Technology and the University of Texas at Austin",
        "The shortest path algorithm, semaphores and structured programming",
        "A Dutch computer scientist who asked for programs that are derived together with their proofs.",
    ),
)
_TOKEN = re.compile(r" ?[^\W\d]+| ?\d{1,3}| ?[^\w\s]+|\s")


def page_of(person: int) -> str:
    """Returns the text that the values are extracted from."""
    name, *facts = PEOPLE[person]
    told = [
        f"On {field.lower()}, the sources agree: {fact}"
        for field, fact in zip(FIELDS[1:], facts, strict=True)
    ]
    return "\n".join([f"This page is about {name}.", *told])


def form_of(person: int) -> str:
    """Returns the whole form as a model writes it."""
    return "\n".join(f"{field}: {value}" for field, value in zip(FIELDS, PEOPLE[person], strict=True)) + "\n"


def person_on(page: str) -> int:
    """Returns the number of the person whom the last page of a prompt is about."""
    return max(range(len(PEOPLE)), key=lambda person: page.rfind(f"This page is about {PEOPLE[person][0]}."))


def tokens_of(text: str) -> list[str]:
    """Splits a text into words, numbers and punctuation, much like the tokenizers of models.

    >>> tokens_of("Born: 10 December 1815")
    ['Born', ':', ' 10', ' December', ' 181', '5']
    """
    return _TOKEN.findall(text)
