"""Runs ``chat_server`` in a separate process, so that its CPU time is not part of the client's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import msgspec

from benchmarks.apis.chat_server import Counters


@contextmanager
def chat_server(tokens_per_s: float = 0.0) -> Iterator[str]:
    """Runs a server whose streams have this rate (0: no limit). Yields the address of its API."""
    command = [sys.executable, "-m", "benchmarks.apis.chat_server", str(tokens_per_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()


async def counters(url: str) -> Counters:
    """Returns the calls and tokens that the server has counted so far."""
    async with httpx2.AsyncClient() as http:
        return msgspec.json.decode((await http.get(f"{url}/counters")).content, type=Counters)
