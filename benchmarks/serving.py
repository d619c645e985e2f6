"""Servers in separate processes, so that their CPU time is not part of the client's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(*arguments: str, errors: int | None = None) -> Iterator[tuple[str, int]]:
    """Runs ``python -m ARGUMENTS`` while the scope is open. Yields the first address that it prints,
    when it is ready, and the id of its process. ``errors``: its standard error, as for ``Popen``."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True) as process:
        try:
            assert process.stdout is not None
            words = (word for line in process.stdout for word in line.split())
            address = next((word for word in words if "://" in word), None)
            if address is None:
                raise RuntimeError(f"{' '.join(arguments)} ended before it was ready")
            yield address, process.pid
        finally:
            process.terminate()


@contextmanager
def serving_model(*, kv_tokens: int, dtype: str = "bfloat16") -> Iterator[tuple[str, int]]:
    """Runs ``agentflow serve`` with the default model. Yields its address (ws://…) and its process's id."""
    options = ("--port", "0", "--kv-tokens", f"{kv_tokens}", "--threads", "2", "--dtype", dtype)
    with serving("agentflow", "serve", *options, errors=subprocess.DEVNULL) as server:
        yield server
