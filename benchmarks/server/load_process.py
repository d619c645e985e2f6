"""Starts and controls the process that runs ``http_load``."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.server.http_load import Outcome

# The size limit of one line: the outcomes of a minute of overload.
MAX_LINE_BYTES = 64 * 1024 * 1024


class LoadProcess:
    """A running process of clients, which ``load_process`` starts."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    async def put(self, **load: Any) -> tuple[float, list[Outcome]]:
        """Runs a load, given as the fields of ``http_load.Load``. Returns its seconds, and each outcome."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(load).encode() + b"\n")
        line = await self._process.stdout.readline()
        answer = json.loads(line)
        return answer["wall_s"], [Outcome(**outcome) for outcome in answer["outcomes"]]


@asynccontextmanager
async def load_process() -> AsyncIterator[LoadProcess]:
    """Runs the process of clients while the scope is open."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.server.http_load", stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES
    )
    try:
        yield LoadProcess(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
