"""A program and a script that the tests of maps share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio.lowlevel

import agentflow as af


def echo(prompt: str) -> str | Exception:
    """Answers with the prompt; a prompt that ends in ``!`` fails."""
    return af.EngineFailed(f"cannot answer {prompt}") if prompt.endswith("!") else f"<{prompt}>"


@af.program
async def ask(s: af.State, question: str, *, mark: str = "") -> str:
    s += f"{question}{mark}" + af.gen("x")
    return await s["x"]


async def agen(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        await anyio.lowlevel.checkpoint()
        yield item
