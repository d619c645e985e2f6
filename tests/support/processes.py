"""Processes that tests started, and those below them."""

from __future__ import annotations

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Whether a process runs no longer. Another one than its parent may still have to wait for it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
