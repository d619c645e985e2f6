"""A refusal of the system is an exception in the caller of the native kernels, and the next call works."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.commands import run_python

WITHOUT_THREADS = ["WARNING", "0", "2", "True"]
"""Fewer threads do the work, with a warning. The others are there as soon as the system allows them."""
NO_MEMORY_IN_A_LOOP = ["MemoryError", "True", "True"]
"""Whichever thread needs it."""
NO_MEMORY_FOR_A_FORWARD = ["MemoryError", "True"]


@pytest.fixture(scope="module")
def child() -> subprocess.CompletedProcess[str]:
    return run_python(Path(__file__).with_name("failing_kernels.py"))


def test_the_kernels_work_on_after_the_system_refused_threads_and_memory(
    child: subprocess.CompletedProcess[str],
) -> None:
    assert child.stdout.split() == WITHOUT_THREADS + NO_MEMORY_IN_A_LOOP + NO_MEMORY_FOR_A_FORWARD


def test_f37_a_process_may_end_while_the_kernels_compute(child: subprocess.CompletedProcess[str]) -> None:
    """The kernels' memory is not destroyed at exit: an engine's thread may be in a forward pass."""
    assert child.returncode == 0, child.stderr
