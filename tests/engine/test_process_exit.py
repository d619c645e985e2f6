"""The exit of a process whose engine no session has ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, threading, time
import torch
from agentflow.engine.client import running_engine

computes = threading.Event()

def load():
    matrix = torch.ones(300, 300)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        torch.mm(matrix, matrix)
        computes.set()

async def main():
    async def session():
        async with running_engine(load):
            pass

    task = asyncio.create_task(session())
    await asyncio.to_thread(computes.wait)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

asyncio.run(main())
"""


@pytest.mark.timeout(120)
def test_f37_a_process_that_exits_while_a_model_is_loaded_does_not_abort(tmp_path: Path) -> None:
    """The interpreter ends daemon threads where they are; in a function of torch, that aborts the process."""
    script = tmp_path / "exits.py"
    script.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
