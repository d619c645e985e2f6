"""Summarizes a long document part by part: in parallel (map-reduce) or one after the other (chain).

After the two summaries of the Parrot paper (Lin et al., 2024). Map-reduce summarizes every part in a separate
branch and merges the summaries: few steps, each with a large batch. A chain reads each part with the
summary of the parts before it: more steps, but with context. In both, the next prompt refers to the
summaries, and only the last summary is awaited.

    python examples/long_document.py [FILE] [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from example_session import example_parser, figures, run_example
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

import agentflow as af

DOCUMENT = Path(__file__).parent / "documents" / "lighthouse.txt"
TASK = "You sum up texts. You answer in two short sentences."


def parts_of(text: str, max_words: int = 200) -> list[str]:
    """Splits a text into parts of whole paragraphs, each of at most ``max_words`` or one paragraph."""
    parts: list[list[str]] = []
    num_words = max_words
    for paragraph in filter(None, map(str.strip, text.split("\n\n"))):
        num_words += len(paragraph.split())
        if not parts or num_words > max_words:
            parts.append([])
            num_words = len(paragraph.split())
        parts[-1].append(paragraph)
    return ["\n\n".join(part) for part in parts]


@af.program
async def map_reduce(s: af.State, parts: list[str]) -> str:
    """Summarizes all parts in parallel, then their summaries."""
    s += af.system(TASK)
    async with s.fork(len(parts)) as branches:
        for branch, part in zip(branches, parts, strict=True):
            branch += af.user(f"{part}\n\nSum up this text.")
            branch += af.assistant(af.gen("summary", max_tokens=40, stop="\n"))
    notes = [f"{note}\n\n" for note in branches.variables("summary")]
    s += af.user("These are the parts of one story:\n\n", *notes, "Sum up the whole story.")
    summary = af.gen("summary", max_tokens=40, stop="\n")
    s += af.assistant(summary)
    return await s[summary]


@af.program
async def chain(s: af.State, parts: list[str]) -> str:
    """Reads part by part, each in a copy of the state, so that no prompt has more than one part."""
    s += af.system(TASK)
    so_far = "(nothing yet)"
    summary = af.gen("summary", max_tokens=40, stop="\n")
    step = s
    for part in parts:
        step = s.copy()
        step += af.user(
            f"What happened so far: {so_far}\n\n{part}\n\nSum up what happened so far and this text."
        )
        step += af.assistant(summary)
        so_far = f"{step[summary]}"
    return await step[summary]


async def main(flow: af.Session, console: Console, text: str) -> None:
    """Prints both summaries with their time and tokens."""
    parts = parts_of(text)
    console.print(f"{len(text.split())} words in {len(parts)} parts")
    for name, program in {"map-reduce": map_reduce, "chain": chain}.items():
        before, start = await flow.stats(), time.perf_counter()
        summary = await flow.run(program, parts)
        took = f"{time.perf_counter() - start:.1f} s; {figures(before, await flow.stats())}"
        console.print(Panel(f"{escape(summary.strip())}\n\n[dim]{took}", title=name, title_align="left"))


if __name__ == "__main__":
    parser = example_parser(__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=DOCUMENT, help="a text (default: a story)")
    options = parser.parse_args()
    try:
        document = options.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{options.file} cannot be read as text: {error}")
    sys.exit(run_example(partial(main, text=document), options))
