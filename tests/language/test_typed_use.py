"""Type checkers know the values of typed generations, and find their wrong uses: see ``typed_use.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)  # nothing may be cached yet, and then mypy reads all of the frontend
def test_typed_values_are_checked() -> None:
    here = Path(__file__)
    # In a process of its own: mypy changes the recursion limit of the one that it runs in.
    command = [sys.executable, "-m", "mypy", "--strict", str(here.with_name("typed_use.py"))]
    done = subprocess.run(command, cwd=here.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
