"""The tools that check the stack's files. `make compose-check` installs those from package indexes into
build/stack; the others are Debian's packages, which .ci/run installs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
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
    """Runs a tool in the repository's root and returns its output; its failure is that of the test."""
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
        "docker-compose", "--profile", "gpu", "--env-file", ".env.example", "config", **environment
    )
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found
