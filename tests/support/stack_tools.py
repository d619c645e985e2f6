"""The tools that check the stack's files, and its processes. `make compose-check` installs tools from package
indexes into build/stack; the others are Debian's packages, which .ci/run installs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

ROOT = Path(__file__).parents[2]
WAIT_S = 60
CHECKS = ROOT / "build" / "stack" / "bin"
DEBIAN_PACKAGES = {"prometheus": "prometheus", "promtool": "prometheus", "docker-compose": "docker-compose"}


def find_tool(name: str) -> str:
    """The path of a tool. Without it, the test is skipped, and fails in CI."""
    found = shutil.which(name, path=CHECKS) or shutil.which(name)
    if found is None:
        way = f"apt-get install {DEBIAN_PACKAGES[name]}" if name in DEBIAN_PACKAGES else "make compose-check"
        if os.environ.get("CI"):
            pytest.fail(f"{name} is missing: {way}")
        pytest.skip(f"{name} is missing: {way}")
    return found


def run_tool(name: str, *arguments: str | Path, stdin: str | None = None, **environment: str) -> str:
    """Runs a tool in the repository's root and returns its output; if the tool fails, the test fails."""
    done = subprocess.run(
        [find_tool(name), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{name}: {done.stdout}\n{done.stderr}"
    return done.stdout


def resolved(**environment: str) -> dict[str, Any]:
    """The services of docker-compose.yml as Compose resolves them with .env.example, with all profiles."""
    text = run_tool(
        "docker-compose",
        "--profile",
        "gpu",
        "--profile",
        "replicas",
        "--env-file",
        ".env.example",
        "config",
        **environment,
    )
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended at the end, as Compose does; its output is in ``log``."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            command, env={**os.environ, **environment}, cwd=log.parent, stdout=output, stderr=output
        )
        try:
            yield running
        finally:
            running.terminate()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def wait_for(ready: Callable[[], bool], log: Path, wait_s: float = WAIT_S) -> None:
    """Polls until it is ready."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        try:
            if ready():
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.1)  # noqa: TID251  another process gets ready, and says so only when asked
    pytest.fail(f"not ready after {wait_s} s:\n{log.read_text(errors='replace')[-3000:]}")
