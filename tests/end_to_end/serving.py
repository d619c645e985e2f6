"""Starts ``agentflow serve`` as a user would, for tests that need the whole thing."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def run_cli(*arguments: str, timeout: float = 60, **kwargs) -> subprocess.CompletedProcess[str]:
    """The ``agentflow`` command, to its end."""
    command = [sys.executable, "-m", "agentflow", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **kwargs)


@contextmanager
def served(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server on a port of its own choice; gives its url and its process."""
    command = [sys.executable, "-m", "agentflow", "serve", "--port", "0", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        assert server.stdout is not None
        output = ""
        for line in server.stdout:
            output += line
            if "ws://" in line:
                yield "ws://" + line.partition("ws://")[2].split()[0], server
                return
        raise AssertionError(f"the server ended before it was ready:\n{output}")
    finally:
        server.terminate()
        try:
            server.communicate(timeout=20)
        except subprocess.TimeoutExpired:  # it waits for what a test that failed has left open
            server.terminate()
            server.communicate(timeout=10)
