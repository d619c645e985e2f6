"""Runs examples on the scripted backend: their prompts, results, output and services."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import msgspec
from fastapi import FastAPI
from fastapi_stream import served
from rich.console import Console

import agentflow as af

ROOT = Path(__file__).parents[2]
# The adapters' examples run in the adapters' environments (`make test-adapters` tests them), the third one on
# a server.
OF_FRAMEWORKS = {"langchain_agent", "dspy_rag", "pydantic_ai_agent"}
EXAMPLES = sorted(
    path.stem
    for path in (ROOT / "examples").glob("*.py")
    if path.stem not in {"example_session", "passages", *OF_FRAMEWORKS}
)
OPTIONS: dict[str, dict[str, Any]] = {
    "long_document": {"text": "A fox found a key. The key opened a door.\n\n" * 5}
}
"""Of an example's ``main``, besides the session and the console."""


class Asked:
    """A script that answers with ``answer(prompt)`` and remembers every prompt."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.prompts: list[str] = []
        self._answer = answer

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self._answer(prompt)

    def ending(self, end: str) -> list[str]:
        """The prompts that end so, in the order in which they were asked."""
        return [prompt for prompt in self.prompts if prompt.endswith(end)]


def in_turn(answers: Iterable[str]) -> Callable[[str], str]:
    """A script's answers one after the other, for any prompts."""
    rest = iter(answers)
    return lambda prompt: next(rest)


def scripted(script: Callable[[str], str], *, keeps_schemas: bool = True) -> af.Scripted:
    """The backend; without schemas, it keeps no constraints."""
    backend = af.Scripted(script)
    if not keeps_schemas:
        capabilities = backend.generator.capabilities
        backend.generator.capabilities = msgspec.structs.replace(capabilities, constraints=())
    return backend


async def run(program: Callable[..., Awaitable[Any]], backend: af.Scripted, *args: Any, **kwargs: Any) -> Any:
    """The result of a program; nothing stays open."""
    async with af.session(backend=backend, seed=1) as flow:
        result = await flow.run(program, *args, **kwargs)
    assert backend.generator.num_open == 0
    assert backend.generator.num_running == 0
    return result


async def shown(main: Callable[..., Awaitable[None]], backend: af.Scripted, **kwargs: Any) -> str:
    """The output of an example."""
    printed = io.StringIO()
    async with af.session(backend=backend, seed=1) as flow:
        await main(flow, Console(file=printed, width=160), **kwargs)
    assert backend.generator.num_open == 0
    return printed.getvalue()


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a service."""
    async with served(app) as base, httpx2.AsyncClient(base_url=base, timeout=30) as client:
        yield client


def events(text: str) -> list[tuple[str, Any]]:
    """The kinds and values of the events in a whole stream."""
    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in blocks]


async def idle(backend: af.Scripted) -> None:
    """Waits until nothing is open and nothing runs."""
    with anyio.fail_after(20):
        while backend.generator.num_open or backend.generator.num_running:
            await anyio.lowlevel.checkpoint()
