"""A server gives way to its engines: its thread runs at a lower priority than theirs.

An engine on the CPU computes in threads that wait for each other many times a step. Where the server takes a
processor for a fraction of a millisecond in between, all of them wait. At a lower priority it takes what they
leave, as between two steps. (Measured on two cores with 25 requests a second, most of them refused: a fifth
more steps.) On Linux each thread has a priority of its own, and a process that a thread starts gets that
thread's: engines are started from a thread that keeps the old one, for only root may raise one again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

NICENESS = 5
"""Added to what the thread has. Where all processors are busy all the time, it still gets its quarter."""

_starter: ThreadPoolExecutor | None = None
_popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen


def give_way() -> None:
    """This thread, and those that it starts from now on, give way to the processes that are started with
    ``start_process``. For good. Has no effect the second time."""
    global _starter
    if sys.platform != "linux":
        return
    if _starter is None:
        _starter = ThreadPoolExecutor(1, thread_name_prefix="process starter")
    before = os.getpriority(os.PRIO_PROCESS, _starter.submit(threading.get_native_id).result())
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), before + NICENESS)


def start_process(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """``subprocess.Popen``, at the priority that this process had before it gave way."""
    if _starter is None:
        return _popen(command, **options)
    return _starter.submit(_popen, command, **options).result()
