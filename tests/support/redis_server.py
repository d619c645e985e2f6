"""A real Redis server on loopback."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from agentflow.errors import Overloaded
from agentflow.server.stores.shared import SharedStore


@dataclass
class RedisServer:
    """``url``: for ``SharedStore``."""

    port: int
    _folder: Path
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options: str) -> None:
        """Starts it, empty, and waits until it answers."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self._folder), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as peer:
                peer.sendall(b"PING\r\n")
                if peer.recv(100):
                    return
            assert self._process.poll() is None, "redis-server did not start"
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.01)  # noqa: TID251 - another process has no event

    def stop(self) -> None:
        """Kills it. Its data is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A server with these options on a free port."""
    if shutil.which("redis-server") is None:
        if os.environ.get("CI") and sys.platform == "linux":
            pytest.fail("redis-server is missing: apt-get install redis-server")
        pytest.skip("redis-server is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = RedisServer(port, folder)
    try:
        server.start(*options)
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def shared_store(
    server: RedisServer, prefix: str | None = None, **options: Any
) -> AsyncIterator[SharedStore]:
    """A front's connection. ``prefix``: by default one that no other test has."""
    store = SharedStore(server.url, prefix=prefix or f"{secrets.token_hex(8)}:", **options)
    async with store.running():
        yield store


@contextmanager
def lost_answer(
    store: SharedStore, script: str, then: Callable[[], Awaitable[None]] | None = None
) -> Iterator[None]:
    """The answer to the next run of this script is lost: Redis runs it, and the front cannot know that.
    ``then``: happens before the front can ask again."""
    run, is_lost = store.run, False

    async def lose(asked: str, keys: list[str], arguments: list[Any]) -> Any:
        nonlocal is_lost
        answer = await run(asked, keys, arguments)
        if asked == script and not is_lost:
            is_lost = True
            if then is not None:
                await then()
            raise Overloaded("the answer is lost")
        return answer

    with patch.object(store, "run", lose):
        yield
    assert is_lost
