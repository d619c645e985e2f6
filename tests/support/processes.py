"""Processes that tests started, and their descendants."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Whether a process runs no longer. Another one than its parent may still have to wait for it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def signal_child(pid: int | None, number: signal.Signals) -> None:
    """Sends a signal to a child of this process. Fails if there is none: the number of a child that has ended
    may be of any other process by now, or of a thread, and a signal to a thread ends its whole process."""
    assert pid is not None
    child = psutil.Process(pid)
    assert child.ppid() == os.getpid()
    child.send_signal(number)


def run_in_fork(work: Callable[[], bool], limit_s: int = 30) -> int:
    """Forks this process and runs ``work`` in the child. Returns its exit status, 0 if ``work`` was true. The
    child always ends there: it must not run the other tests."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout has a handler, which raises
            signal.alarm(limit_s)
            code = 0 if work() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]
