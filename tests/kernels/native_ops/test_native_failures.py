"""What the system refuses to the native kernels is an exception of their caller, and the next call works."""

from __future__ import annotations

from pathlib import Path

from support.commands import run_python

WITHOUT_THREADS = ["WARNING", "0", "2", "True"]
"""Fewer threads do the work, with a warning. The others are there as soon as the system allows them."""
NO_MEMORY_IN_A_LOOP = ["MemoryError", "True", "True"]
"""Whichever thread needs it."""
NO_MEMORY_FOR_A_FORWARD = ["MemoryError", "True"]


def test_the_kernels_work_on_after_the_system_refused_threads_and_memory() -> None:
    child = run_python(Path(__file__).with_name("failing_kernels.py"))
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == WITHOUT_THREADS + NO_MEMORY_IN_A_LOOP + NO_MEMORY_FOR_A_FORWARD
