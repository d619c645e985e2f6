"""Scripts and programs that many tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import anyio.lowlevel

import agentflow as af


def echo(prompt: str) -> str | Exception:
    """A script that answers with the prompt; a prompt that ends in ``!`` fails."""
    return af.errors.EngineFailed(f"cannot answer {prompt}") if prompt.endswith("!") else f"<{prompt}>"


def by_end(answers: Mapping[str, Any]) -> Callable[[str], Any]:
    """A script of answers by the end of the prompt. The longest end counts; the empty one is any other. A
    question of a decide gets its first answer."""

    def answer(prompt: str) -> Any:
        if isinstance(prompt, af.ScriptedCall) and prompt.kind == "decide":
            return {question.name: question.answers[0] for question in prompt.questions}
        return answers[max((end for end in answers if prompt.endswith(end)), key=len)]

    return answer


def measure(prompt: str) -> str | Exception:
    """A script that answers with the prompt's length; ``yes or no? `` is answered with yes, ``!`` fails."""
    if prompt.endswith("yes or no? "):
        return "yes"
    return (
        af.errors.EngineFailed(f"cannot answer {prompt[-6:]}")
        if prompt.endswith("!")
        else f"{len(prompt)} chars"
    )


def words(count: int) -> str:
    """A text of ``count`` words, each of which a scripted backend counts as a token."""
    return " ".join(["w"] * count)


@af.program
async def ask(s: af.State, question: str, *, mark: str = "") -> str:
    """Asks a question."""
    s += f"{question}{mark}" + af.gen("x")
    return await s["x"]


@af.program
async def ask_twice(s: af.State, question: str) -> list[str]:
    """Two turns, which are two stages."""
    s += af.user(question) + af.assistant(af.gen("first", max_tokens=8))
    s += af.user("And?") + af.assistant(af.gen("second", max_tokens=8))
    return [await s["first"], await s["second"]]


async def agen(items: list[Any]) -> AsyncIterator[Any]:
    """An asynchronous generator of the items."""
    for item in items:
        await anyio.lowlevel.checkpoint()
        yield item
