"""Multi-turn chat: one state holds the whole conversation, and each reply streams to the terminal.

Each turn appends only the new text to the state. The cache has everything before it, the model's own replies
included. The table at the end shows how many prompt tokens of each turn were cached.

    python examples/chat.py [--talk] [--url ws://127.0.0.1:8410]

With --talk you type the user's turns; an empty line ends the chat.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.to_thread
from example_session import example_parser, run_example
from rich.console import Console
from rich.table import Table

import agentflow as af

QUESTIONS = ["Hello! Who are you?", "Tell me about elephants.", "What do they eat?"]


@dataclass
class Talk:
    """``messages``: the conversation. ``usage``: the tokens of each reply, in order."""

    messages: list[dict[str, Any]]
    usage: list[af.Usage]


@af.program
async def chat(s: af.State, questions: AsyncIterator[str], show: Callable[[str], None]) -> Talk:
    """Holds a conversation. ``show`` is called with each piece of a reply."""
    s += af.system("You are a friendly guide in a zoo. You answer in one short sentence.")
    usage = []
    async for question in questions:
        s += af.user(question)
        s += af.assistant(af.gen("reply", max_tokens=32))
        async for text in s["reply"]:
            show(text)
        show("\n")
        usage.append(s["reply"].usage)
    return Talk(await s.messages(), usage)


async def prepared(console: Console) -> AsyncIterator[str]:
    """Yields the questions above, and prints them as if they were typed."""
    for question in QUESTIONS:
        console.print(f"[bold]> {question}")
        yield question


async def typed(console: Console) -> AsyncIterator[str]:
    """Yields the lines that the user types, until an empty line or the end of the input."""
    while question := await anyio.to_thread.run_sync(partial(_ask, console), abandon_on_cancel=True):
        yield question


def _ask(console: Console) -> str:
    try:
        return console.input("[bold]> [/]").strip()
    except EOFError:
        return ""


async def main(flow: af.Session, console: Console, is_typed: bool = False) -> None:
    """Prints the conversation while it runs, then the table."""
    show = partial(console.print, end="", markup=False, highlight=False, soft_wrap=True)
    talk = await flow.run(chat, typed(console) if is_typed else prepared(console), show)
    table = Table("turn", "prompt tokens", "of which cached", "written")
    for number, usage in enumerate(talk.usage, 1):
        prompt = (str(usage.prompt_tokens), f"{usage.hit_rate:.0%}")
        table.add_row(str(number), *prompt, str(usage.output_tokens))
    console.print(table)


if __name__ == "__main__":
    parser = example_parser(__doc__)
    parser.add_argument("--talk", action="store_true", help="type the user's turns")
    options = parser.parse_args()
    sys.exit(run_example(partial(main, is_typed=options.talk), options))
