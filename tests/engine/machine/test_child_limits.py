"""Limits of one piece of work, in a child process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WRITING = """
import errno, os, sys
from pathlib import Path
from agentflow.engine.machine.child_limits import LimitedWork

lifeline, _ = os.pipe()
with os.fdopen(lifeline, "rb") as opened:
    work = LimitedWork(opened, cpu_s=10.0, memory_bytes=10**9)
    try:
        work.run(lambda: Path(sys.argv[1]).write_bytes(b"x"))
    except OSError as error:
        print(errno.errorcode[error.errno])
Path(sys.argv[1]).write_bytes(b"after it")
"""


@pytest.mark.timeout(60)
def test_work_writes_no_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    run = subprocess.run(
        [sys.executable, "-c", WRITING, str(file)], capture_output=True, text=True, timeout=50, check=True
    )
    assert run.stdout.split() == ["EFBIG"]
    assert file.read_bytes() == b"after it"
