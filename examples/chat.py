"""Multi-turn chat: one state is the whole conversation, and each reply is shown as it is written.

Nothing is sent twice: a turn appends to the state what is new, and all that came before it is in the cache,
the model's own replies included, token by token. The table at the end says how much each turn found there.

    python examples/chat.py [--talk] [--url ws://127.0.0.1:8410]

With --talk you write the user's turns yourself; an empty line ends the chat.
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
    """A conversation. ``show`` hears the reply as it comes."""
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
    """The questions above, shown as if they were typed."""
    for question in QUESTIONS:
        console.print(f"[bold]> {question}")
        yield question


async def typed(console: Console) -> AsyncIterator[str]:
    """What somebody types, until an empty line or the end of the input."""
    while question := await anyio.to_thread.run_sync(partial(_ask, console), abandon_on_cancel=True):
        yield question


def _ask(console: Console) -> str:
    try:
        return console.input("[bold]> [/]").strip()
    except EOFError:
        return ""


async def main(flow: af.Session, console: Console, is_typed: bool = False) -> None:
    """Shows the conversation as it goes on, then the table."""
    show = partial(console.print, end="", markup=False, highlight=False, soft_wrap=True)
    talk = await flow.run(chat, typed(console) if is_typed else prepared(console), show)
    table = Table("turn", "prompt tokens", "of which cached", "written")
    for number, usage in enumerate(talk.usage, 1):
        prompt = (str(usage.prompt_tokens), f"{usage.hit_rate:.0%}")
        table.add_row(str(number), *prompt, str(usage.output_tokens))
    console.print(table)


if __name__ == "__main__":
    parser = example_parser(__doc__)
    parser.add_argument("--talk", action="store_true", help="write the user's turns yourself")
    options = parser.parse_args()
    sys.exit(run_example(partial(main, is_typed=options.talk), options))
