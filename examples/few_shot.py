"""Few-shot prompting: solved cases, as earlier turns of the chat, show the model the form of the answer.

The program asks for many countries in parallel, with and without the cases. All prompts share the cases, so
their keys and values are computed once: see the cache hit rate in the last line.

    python examples/few_shot.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from example_session import example_parser, run_example
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import agentflow as af

CASES = [("France", "Paris"), ("Japan", "Tokyo"), ("Egypt", "Cairo"), ("Peru", "Lima"), ("Greece", "Athens")]
COUNTRIES = ["Italy", "Spain", "Germany", "Russia", "Poland", "Austria"]


@af.program
async def capital(s: af.State, country: str, cases: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the capital of a country. ``cases``: solved cases, as pairs of country and capital."""
    s += af.system("You name the capital of a country.")
    for given, wanted in cases:
        s += af.user(given)
        s += af.assistant(wanted)
    s += af.user(country)
    s += af.assistant(af.gen("capital", max_tokens=10, stop="\n"))
    return await s["capital"].strip()


async def main(flow: af.Session, console: Console) -> None:
    """Asks for all countries both ways and prints the answers side by side."""
    without = await flow.map(capital, COUNTRIES)
    with_cases = await flow.map(capital, [(country, CASES) for country in COUNTRIES])
    table = Table("country", "no cases", f"{len(CASES)} cases", title="The capital of a country")
    for row in zip(COUNTRIES, without, with_cases, strict=True):
        table.add_row(*map(escape, row))
    console.print(table)


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
