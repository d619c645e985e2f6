"""``python -m benchmarks.server.scripted_server [STEPS_PER_S]``: a real server with a scripted generator.

A gen answers with ``max_tokens`` words: immediately, or at a rate. Generations then advance in step, as in
the engine: one step adds a token to each one that runs. The first line printed is the address. The server
runs until standard input ends.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import Generated, Generator, OnText
from agentflow.runtime.task_group import open_task_group
from agentflow.server.models.models import one_model
from agentflow.server.serve import running_server

ENDLESS = " ".join(["word"] * 4096)
WORDS = ("a", "river", "turns", "under", "the", "old", "stone", "bridge", "and", "light", "follows", "it")


class SteadyGenerator(ScriptedGenerator):
    """Generations that wait for the steps."""

    def __init__(self) -> None:
        super().__init__("word")
        self._step = anyio.Event()

    async def run(self, steps_per_s: float) -> None:
        """Steps at this rate, as long as the machine keeps up."""
        next_s = anyio.current_time()
        while True:
            next_s = max(next_s + 1 / steps_per_s, anyio.current_time())
            await anyio.sleep_until(next_s)
            before, self._step = self._step, anyio.Event()
            before.set()

    async def generate(
        self,
        context: ScriptedContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Generates ``max_tokens`` words, one in each step."""
        pieces: list[str] = []
        num_words = params.resolved().max_tokens
        for index in range(num_words):
            await self._step.wait()
            pieces.append(f"{' ' if index else ''}{WORDS[index * index % len(WORDS)]}")
            on_text(pieces[-1])
        text = "".join(pieces)
        context.text += text
        return Generated(text, "length", Usage(len(context.text.split()), 0, num_words))


async def main(steps_per_s: float) -> None:
    """Serves until standard input ends. ``steps_per_s``: 0: immediate answers."""
    steady = SteadyGenerator()

    @asynccontextmanager
    async def open_generator() -> AsyncIterator[Generator[ScriptedContext]]:
        yield steady if steps_per_s else ScriptedGenerator(lambda prompt: ENDLESS)

    async with running_server(one_model(open_generator)) as server, open_task_group() as group:
        if steps_per_s:
            group.start_soon(steady.run, steps_per_s)
        print(server.url, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)
        group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)
