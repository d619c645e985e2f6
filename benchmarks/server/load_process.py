"""The process that ``http_load`` runs in, as the benchmark sees it."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.server.http_load import Outcome

# One line of answers to a minute of overload.
MAX_LINE_BYTES = 64 * 1024 * 1024


class LoadProcess:
    """Use ``load_process`` to start one."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    async def put(self, **load: Any) -> tuple[float, list[Outcome]]:
        """Puts a load on a server: the fields of ``http_load.Load``. Seconds, and what became of each."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(load).encode() + b"\n")
        line = await self._process.stdout.readline()
        answer = json.loads(line)
        return answer["wall_s"], [Outcome(**outcome) for outcome in answer["outcomes"]]


@asynccontextmanager
async def load_process() -> AsyncIterator[LoadProcess]:
    """Clients for as long as the scope lasts."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.server.http_load", stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES
    )
    try:
        yield LoadProcess(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
