"""The command line that the examples share: ``--url``, a session, and the cache statistics at the end.

This file is not an example. Without ``--url`` the model runs in this process; with it, on a server that
``agentflow serve`` started.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Mapping

import anyio
from rich.console import Console

import agentflow as af

Main = Callable[[af.Session, Console], Awaitable[None]]


def example_parser(about: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the option ``--url``. Its description is the first line of ``about``."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--url", help="a server's url (default: the model runs in this process)")
    return parser


def run_example(main: Main, options: argparse.Namespace, models: Mapping[str, str] | None = None) -> int:
    """Runs ``main`` in a session and returns the exit status. The seed is fixed, so every run samples the
    same text. ``models``: several models, instead of the one at ``options.url``."""
    session: af.SessionOptions = {
        "seed": 1,
        "models": models,
        "embed_model": getattr(options, "embed_model", None),
    }
    console = Console()
    try:
        anyio.run(_run, main, None if models else options.url, session, console)
    except af.AgentflowError as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return 1
    return 0


async def _run(main: Main, url: str | None, options: af.SessionOptions, console: Console) -> None:
    doing = "Loading the model …" if url is None else f"Connecting to {url} …"
    with console.status(doing) as status:
        async with session_at(url, options) as flow:
            status.stop()
            before = await flow.stats()
            await main(flow, console)
            console.print(figures(before, await flow.stats()), style="dim")


def session_at(url: str | None, options: af.SessionOptions) -> af.Session:
    """A session whose answers are checked, and asked for again, where the API of a vendor does not enforce
    their schema."""
    vendor, _, model = (url or "").partition(":")
    if vendor not in ("openai", "anthropic"):
        return af.session(url, **options)
    given = options.copy()
    if vendor == "openai":
        embed_model = given.pop("embed_model", None)
        given["backend"] = af.OpenAI(model, embed_model=embed_model, on_unsupported="retry")
    else:
        given["backend"] = af.Anthropic(model, on_unsupported="retry")
    return af.session(**given)


def figures(before: af.Stats, after: af.Stats) -> str:
    """Returns one line about the work between two readings of the model's counters."""
    prompt = after.prompt_tokens - before.prompt_tokens
    cached = after.cached_tokens - before.cached_tokens
    generated = after.generated_tokens - before.generated_tokens
    text = (
        f"{after.model}: {prompt:,} prompt tokens, {cached / max(1, prompt):.0%} of them cached; "
        f"{generated:,} generated"
    )
    if after.cost > before.cost:
        text += f"; ${after.cost - before.cost:.4g}"
    if after.steps is None or before.steps is None:  # the server does not show them to this key
        return text
    return f"{text} in {after.steps - before.steps:,} steps"
