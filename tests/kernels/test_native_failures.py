"""What the system refuses to the native kernels is an exception of their caller, and the next call works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def outcome_of(case: str) -> list[str]:
    """What ``failing_kernels.py`` prints."""
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("failing_kernels.py")), case],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.split()


def test_no_memory_in_a_loop_is_a_memory_error_whichever_thread_needs_it() -> None:
    assert outcome_of("loop") == ["MemoryError", "True", "True"]


def test_no_memory_for_a_forward_is_a_memory_error() -> None:
    assert outcome_of("job") == ["MemoryError", "True"]


def test_without_threads_fewer_do_the_work_with_a_warning() -> None:
    """They are there as soon as the system allows them."""
    assert outcome_of("threads") == ["WARNING", "0", "2", "True"]
