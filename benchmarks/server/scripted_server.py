"""``python -m benchmarks.server.scripted_server``: a real server with a scripted generator.

A gen answers with ``max_tokens`` words. The first line printed is the address. The server runs until standard
input ends.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.runtime.generator import Generator
from agentflow.server.models.models import one_model
from agentflow.server.serve import running_server

ENDLESS = " ".join(["word"] * 4096)


@asynccontextmanager
async def _open_generator() -> AsyncIterator[Generator[ScriptedContext]]:
    yield ScriptedGenerator(lambda prompt: ENDLESS)


async def main() -> None:
    """Serves until standard input ends."""
    async with running_server(one_model(_open_generator)) as server:
        print(server.url, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(main)
